"""The ``flashattention`` backend: MHA and GQA over a paged cache, and MLA prefill as MHA."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Never

import torch
from torch import Tensor

from attnplug import (
    BackendContext,
    BackendError,
    ForwardExtras,
    Geometry,
    GraphLevel,
    LayerSpec,
    MHAPool,
    ModelSpec,
    NewRows,
    Plan,
    PlanError,
    PlannedAttention,
    PoolError,
    RaggedCall,
    Serving,
)
from attnplug.kernels import check_lse, check_rows, merge_partial
from attnplug_flashattention.kernels import AttentionOutput, FlashAttentionKernels, SoftmaxParams, choose_kernels
from attnplug_flashattention.merge import merge_splits
from attnplug_flashattention.options import FlashAttentionOptions
from attnplug_flashattention.planner import (
    CachedPlan,
    GatheredCall,
    PagedCall,
    SplitHeuristic,
    plan_cached,
    plan_captured,
    ragged_call,
    refill,
    requests_with_queries,
)
from attnplug_flashattention.trees import TreePlan, attend_nodes, capture_tree, plan_tree


@dataclass(frozen=True, slots=True, eq=False)
class CachedLayer:
    """Cache of one MHA layer, ``[pages, page_size, kv_heads, dim]`` in kernel pages, and its softmax parameters."""

    keys: Tensor
    values: Tensor
    softmax: SoftmaxParams


@dataclass(frozen=True, slots=True, eq=False)
class FlashAttentionMetadata:
    """A plan's metadata: the calls of a batch's MHA layers.

    ``cached`` are the calls over the cache. For chains it is ``None`` exactly if the plan has no ``new_slots``
    (``fa_skip_kv_cache``): the cache is either written and read, or neither (A6). ``new_rows_call`` is the call over
    new rows alone, for batches in which no request has older rows. A batch of trees has ``tree`` instead of both.
    """

    cached: CachedPlan | None
    new_rows_call: RaggedCall | None
    tree: TreePlan | None = None


class FlashAttentionBackend(PlannedAttention):
    """MHA and GQA over a paged cache, and MLA prefill over rows that are passed as arguments.

    The backend keeps no state of a batch. There is no ``init_mha_chunk_metadata``, because kernels take the lengths of
    each ragged call directly (A6). ``kernels`` and ``processors`` replace the library and the GPU's size in tests.
    """

    def __init__(
        self, context: BackendContext, *, kernels: FlashAttentionKernels | None = None, processors: int = 132
    ) -> None:
        options = context.options_of(FlashAttentionOptions)
        layers = context.model.full_layers
        mha = [layer for layer in layers if layer.mla is None]
        if kernels is None:
            properties = torch.cuda.get_device_properties(context.device)
            processors = properties.multi_processor_count
            kernels = choose_kernels(options.kernel, 10 * properties.major + properties.minor, layers)
        self.fa_skip_kv_cache = skips_kv_cache(context.serving, context.model)
        if len(mha) < len(layers):
            level = GraphLevel.DECODE  # another backend decodes MLA layers
        else:
            level = GraphLevel.UNIFORM if kernels.supports_capture and not self.fa_skip_kv_cache else GraphLevel.NEVER
        declared = context.declared.claims
        trees = declared.trees and not self.fa_skip_kv_cache
        super().__init__(context, replace(declared, cuda_graph=min(level, declared.cuda_graph), trees=trees))
        self._kernels = kernels
        self._kernel_page = kernels.page_size(context.page_size, mha) if mha else None
        self._caches = {layer.layer_id: self._cached_layer(layer) for layer in mha}
        self._windowed = any(layer.sliding_window is not None for layer in mha)
        self._heuristic = None
        if mha and not kernels.splits_kv and options.most_parts != 1:
            heads = min(cached.keys.shape[2] for cached in self._caches.values())
            self._heuristic = SplitHeuristic(heads, processors, options.most_parts)

    @property
    def _pool(self) -> MHAPool:
        pool = self.context.pools.mha
        if pool is None:
            raise PoolError(f"backend {self.backend_id.name} requires an MHA pool")
        return pool

    def _cached_layer(self, layer: LayerSpec) -> CachedLayer:
        keys, values = self._pool.keys(layer.layer_id), self._pool.values(layer.layer_id)
        if self._kernel_page is not None:
            # flash-attn-4 would copy a cache of other strides at every call
            check_rows(keys, f"the keys of layer {layer.layer_id}", "FlashAttention")
            check_rows(values, f"the values of layer {layer.layer_id}", "FlashAttention")
            key_layout, value_layout = (layout.split(self._kernel_page) for layout in self._pool.layout(layer.layer_id))
            keys = keys.as_strided(key_layout.shape, key_layout.strides)  # same storage offset
            values = values.as_strided(value_layout.shape, value_layout.strides)
        return CachedLayer(keys, values, SoftmaxParams.of(layer))

    # Planning

    def plan(self, geometry: Geometry) -> Plan:
        if not self._caches or not geometry.rows:
            return Plan.of(self.backend_id, geometry)
        if geometry.tree is not None:
            tree = plan_tree(geometry, geometry.tree, self._kernel_page)
            return Plan.of(self.backend_id, geometry, FlashAttentionMetadata(None, None, tree), geometry.new_slots())
        live = requests_with_queries(geometry)
        call = ragged_call(live)
        new_rows_call = call if call.causal and call.query_lens == call.kv_lens else None
        if self.fa_skip_kv_cache:
            if new_rows_call is None:
                self._refuse_cached(geometry)
            return Plan.of(self.backend_id, geometry, FlashAttentionMetadata(None, new_rows_call))
        new_slots, cached = plan_cached(geometry, live, call, self._kernel_page, self._heuristic)
        return Plan.of(self.backend_id, geometry, FlashAttentionMetadata(cached, new_rows_call), new_slots)

    def _refuse_cached(self, geometry: Geometry) -> Never:
        raise PlanError(
            f"backend {self.backend_id.name} does not use the KV cache (fa_skip_kv_cache: an embedding model without "
            f"chunked prefill and radix cache), but a {geometry.mode} batch has {geometry.rows} new tokens among "
            f"{geometry.kv_rows} rows; send whole prompts"
        )

    # CUDA graphs

    def capture(self, geometry: Geometry, memory: None) -> Plan:
        if self.claims.cuda_graph is not GraphLevel.UNIFORM:
            raise PlanError(
                f"backend {self.backend_id.name} only prefills a model with MLA layers and cannot capture a "
                f"{geometry.mode} batch; plan it with the decode backend"
            )
        assert self._kernel_page is not None
        if geometry.tree is not None:
            slots = torch.full((geometry.rows,), -1, dtype=torch.int64, device=geometry.device)
            return Plan.of(
                self.backend_id,
                geometry,
                FlashAttentionMetadata(None, None, capture_tree(geometry, self._kernel_page)),
                slots,
            )
        new_slots, cached = plan_captured(geometry, self._kernel_page, self._heuristic, windowed=self._windowed)
        return Plan.of(self.backend_id, geometry, FlashAttentionMetadata(cached, None), new_slots)

    def refill(self, plan: Plan, geometry: Geometry) -> None:
        assert plan.new_slots is not None
        cached, tree = plan.metadata.cached, plan.metadata.tree
        whole = cached.whole if tree is None else tree.prefix
        if isinstance(whole, PagedCall) and self._kernel_page == geometry.page_size:
            read, given = [whole.page_table], [geometry.page_table]
            if tree is None:
                read, given = [*read, whole.kv_lens], [*given, geometry.seq_lens]
            if [tensor.data_ptr() for tensor in read] != [tensor.data_ptr() for tensor in given]:
                self._refuse_memory(geometry)
        if tree is None:
            refill(geometry, plan.new_slots, cached.tables)
        else:
            refill(geometry, plan.new_slots, ())
            tree.refill(geometry)

    def _refuse_memory(self, geometry: Geometry) -> Never:
        raise PlanError(
            f"a {geometry.mode} batch of {geometry.requests} requests was captured in lane {geometry.lane} with "
            "another page table and lengths, which its kernels read directly; capture it in a lane of its own"
        )

    # Running

    def takes_rows(self, plan: Plan, save_kv_cache: bool) -> bool:
        """Return True if ``attend`` needs k and v: a plan that writes no rows attends to those passed as arguments
        (A6).

        Without MHA layers ``attend`` raises an error in any case.
        """
        return bool(self._caches) and (save_kv_cache or plan.new_slots is None)

    def attend(self, q: Tensor, layer: LayerSpec, plan: Plan, new: NewRows | None, extras: ForwardExtras) -> Tensor:
        layer_cache, metadata = self._cache(layer), plan.metadata
        lse, sinks = extras.lse, extras.sinks
        if sinks is not None and lse is None:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        if metadata.tree is not None:
            out = self._attend_tree(q, layer, plan, metadata.tree, layer_cache, new, lse)
        elif new is not None and metadata.new_rows_call is not None:
            k, v = new  # the cached rows, without reading pages
            assert v is not None
            found = self._kernels.attend_ragged(q, k, v, metadata.new_rows_call, layer_cache.softmax, lse is not None)
            out = _with_lse(*found, lse)
        else:
            out = self._attend_cached(q, layer, metadata.cached, layer_cache, lse)
        if sinks is not None and lse is not None:
            out = apply_sinks(out, lse, sinks)
        return out

    def _attend_cached(
        self, q: Tensor, layer: LayerSpec, plan: CachedPlan, cached: CachedLayer, lse: Tensor | None
    ) -> Tensor:
        if plan.split is not None and cached.softmax.window is None:
            count, call = plan.split.count, plan.split.call
            repeated = q.unsqueeze(1).expand(-1, count, -1, -1).flatten(0, 1)
            parts, sums = self._kernels.attend_paged(repeated, cached.keys, cached.values, call, cached.softmax, True)
            assert sums is not None
            return merge_splits(parts, sums, count, lse)
        assert plan.whole is not None
        return _with_lse(*self._attend_call(q, layer, plan.whole, cached, lse is not None), lse)

    def _attend_call(
        self, q: Tensor, layer: LayerSpec, call: PagedCall | GatheredCall, cached: CachedLayer, lse: bool
    ) -> AttentionOutput:
        """Run one call over the cache."""
        if isinstance(call, PagedCall):
            return self._kernels.attend_paged(q, cached.keys, cached.values, call, cached.softmax, lse)
        keys, values = self._rows(layer, call.rows)
        return self._kernels.attend_ragged(q, keys, values, call.ragged, cached.softmax, lse)

    def _rows(self, layer: LayerSpec, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self._pool.read_keys(layer.layer_id, slots), self._pool.read_values(layer.layer_id, slots)

    def _attend_tree(
        self,
        q: Tensor,
        layer: LayerSpec,
        plan: Plan,
        tree: TreePlan,
        cached: CachedLayer,
        new: NewRows | None,
        lse: Tensor | None,
    ) -> Tensor:
        if new is None or new[1] is None:
            assert plan.new_slots is not None
            k, v = self._rows(layer, plan.new_slots.clamp(min=0))  # padding rows are masked by the tree
        else:
            k, v = new[0], new[1]
        out, sums = attend_nodes(q, k, v, tree.bits, cached.softmax)
        if tree.prefix is not None:
            some = slice(None) if tree.queries is None else tree.queries
            part, part_sums = self._attend_call(q[some], layer, tree.prefix, cached, True)
            assert part_sums is not None
            merged, merged_sums = merge_partial(out[some], sums[some], part, part_sums)
            if tree.queries is None:
                out, sums = merged, merged_sums
            else:
                out[some], sums[some] = merged, merged_sums
        return _with_lse(out.to(q.dtype), sums, lse)

    def forward_ragged(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: LayerSpec,
        call: RaggedCall,
        plan: Plan | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        call.check(q, k, v)
        if lse is not None:
            check_lse(lse, q)
        out, sums = self._kernels.attend_ragged(q, k, v, call, SoftmaxParams.of(layer), lse is not None)
        return _with_lse(out, sums, lse)

    def _cache(self, layer: LayerSpec) -> CachedLayer:
        cached = self._caches.get(layer.layer_id)
        if cached is None:
            raise BackendError(
                f"layer {layer.layer_id} is MLA, but {self.backend_id.name} has no kernel over latent rows; use it for "
                "prefill (`prefill_attention_backend`) and another backend for decode",
                settings=["prefill_attention_backend"],
            )
        return cached


def skips_kv_cache(serving: Serving, model: ModelSpec) -> bool:
    """Return True for ``fa_skip_kv_cache`` (A6): no later batch reads the rows that a prefill would write."""
    return (
        serving.is_embedding
        and serving.chunked_prefill_size == -1
        and serving.disable_radix_cache
        and not any(layer.mla is not None for layer in model.layers)
    )


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Rescale ``out`` ``[rows, heads, dim]`` for an additional key of logit ``sinks`` ``[heads]`` and value zero."""
    share = torch.sigmoid(lse - sinks)  # remaining weight of the other keys
    return (out * share.unsqueeze(-1)).to(out.dtype)


def _with_lse(out: Tensor, found: Tensor | None, lse: Tensor | None) -> Tensor:
    if lse is not None:
        assert found is not None
        lse.copy_(found)
    return out
