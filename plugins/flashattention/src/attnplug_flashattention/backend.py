"""The backend: pools, kernels and plans brought together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import (
    BackendContext,
    BackendError,
    BackendId,
    Captures,
    Claims,
    ExtendPath,
    ForwardBatch,
    ForwardExtras,
    Geometry,
    GraphLevel,
    GraphLimits,
    LayerSpec,
    MHAPool,
    ModelSpec,
    Plan,
    PlanError,
    PlannedBackend,
    PoolError,
    RaggedCall,
    Serving,
    check_lse,
)
from attnplug_flashattention.graphs import Captured, CaptureRules, plan_captured
from attnplug_flashattention.kernels import Kernels, Softmax, choose_kernels
from attnplug_flashattention.merge import merge_parts
from attnplug_flashattention.options import FlashAttentionOptions
from attnplug_flashattention.planner import CachedPlan, Division, GatheredCall, plan_at_hand, plan_cached

_EXTRAS = frozenset({"lse", "sinks"})
_NO_EXTRAS = ForwardExtras()


@dataclass(frozen=True, slots=True, eq=False)
class CachedLayer:
    """One MHA layer's cache ``[pages, page_size, kv_heads, …]`` in the pages that the kernel reads, and its softmax."""

    keys: Tensor
    values: Tensor
    softmax: Softmax


@dataclass(frozen=True, slots=True, eq=False)
class Metadata:
    """How a batch's MHA layers run.

    ``cached`` is how they write to the cache and read from it: one value for both, so that where it is ``None``
    (``fa_skip_kv_cache``) there is nothing to do either with (A6). ``at_hand`` is the call over new rows alone, for
    batches none of whose requests has others.
    """

    cached: CachedPlan | None
    at_hand: RaggedCall | None


class FlashAttentionBackend(PlannedBackend):
    """MHA and GQA over a paged cache, and MLA prefill over rows at hand. What it knows of a batch is in its plan.

    There is no ``init_mha_chunk_metadata``: kernels take the lengths of each call as they are (A6).
    """

    def __init__(self, context: BackendContext, *, kernels: Kernels | None = None, processors: int = 132) -> None:
        options = context.options if context.options is not None else FlashAttentionOptions()
        self.backend_id = BackendId(context.name)
        self._page_size = context.page_size
        layers = context.model.full_layers
        mha = [layer for layer in layers if layer.mla is None]
        if kernels is None:
            properties = torch.cuda.get_device_properties(context.device)
            processors = properties.multi_processor_count
            kernels = choose_kernels(options.kernel, 10 * properties.major + properties.minor, layers)
        self._kernels = kernels
        self._kernel_page = kernels.page_size(self._page_size, mha) if mha else None
        self._pool = _mha_pool(context) if mha else None
        self._layers = {layer.layer_id: self._cached_layer(layer) for layer in mha}
        self._division = None
        if mha and not kernels.divides and options.most_parts != 1:
            heads = min(cached.keys.shape[2] for cached in self._layers.values())
            self._division = Division(heads, processors, options.most_parts)
        self.fa_skip_kv_cache = skips_kv_cache(context.serving, context.model)
        self.claims = Claims(
            cuda_graph=self._graph_level(prefill_only=len(mha) < len(layers)),
            mla_extend=frozenset({ExtendPath.ONE_SHOT, ExtendPath.CHUNKED}),
            extras=_EXTRAS,
        )
        self._captures: Captures[Captured] = Captures(self.backend_id)
        self._rules: CaptureRules | None = None

    def _graph_level(self, *, prefill_only: bool) -> GraphLevel:
        """Of a model with MLA layers another backend captures the decode, by whatever kernel this one prefills."""
        if prefill_only:
            return GraphLevel.DECODE
        return GraphLevel.UNIFORM if self._kernels.captures and not self.fa_skip_kv_cache else GraphLevel.NEVER

    def _cached_layer(self, layer: LayerSpec) -> CachedLayer:
        assert self._pool is not None
        keys, values = self._pool.keys(layer.layer_id), self._pool.values(layer.layer_id)
        if self._kernel_page is not None:
            key_layout, value_layout = (layout.split(self._kernel_page) for layout in self._pool.layout(layer.layer_id))
            keys = keys.as_strided(key_layout.shape, key_layout.strides)
            values = values.as_strided(value_layout.shape, value_layout.strides)
        return CachedLayer(keys, values, Softmax.of(layer))

    # Planning

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan:
        geometry = Geometry.of(batch, self._page_size)
        metadata = None
        if self._layers:
            at_hand = plan_at_hand(geometry)
            if self.fa_skip_kv_cache:
                if at_hand is None and geometry.query_rows:
                    self._refuse_cached(geometry)
                metadata = Metadata(None, at_hand)
            else:
                metadata = Metadata(plan_cached(geometry, self._kernel_page, self._division), at_hand)
        return Plan(
            planner=self.backend_id,
            mode=batch.forward_mode,
            query_rows=geometry.query_rows,
            kv_rows=geometry.kv_rows,
            metadata=metadata,
        )

    def _refuse_cached(self, geometry: Geometry) -> None:
        raise PlanError(
            f"backend {self.backend_id.name} keeps nothing in the cache here (fa_skip_kv_cache: an embedding model, "
            f"without chunked prefill and radix cache), but a batch to {geometry.mode} has {geometry.query_rows} new "
            f"tokens among {geometry.kv_rows} rows; send whole prompts"
        )

    # CUDA graphs

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Limits of captured batches: up to ``max_bs`` requests and ``max_num_tokens`` rows."""
        if self.claims.cuda_graph is GraphLevel.NEVER:
            why = f"kernel={self._kernels.name} cannot be captured; use kernel=fa4"
            if self.fa_skip_kv_cache:
                why = "with fa_skip_kv_cache nothing is decoded"
            raise BackendError(f"backend {self.backend_id.name} runs outside of CUDA graphs only here: {why}")
        self._captures.reserve(GraphLimits(max_bs, max_num_tokens))
        if self.claims.cuda_graph is GraphLevel.UNIFORM:
            assert self._kernel_page is not None
            windowed = any(cached.softmax.window is not None for cached in self._layers.values())
            self._rules = CaptureRules(self._page_size, self._kernel_page, self._division, windowed)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> Plan:
        """The plan of a captured shape, always the same: what changes from replay to replay is made in the graph."""
        return self._captures.find(forward_batch, in_capture, self._capture).plan

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Slots and tables, from the page table and lengths that the batch has when the graph runs."""
        captured = self._captures.find(forward_batch, False, self._capture)
        captured.fill(forward_batch.page_table, forward_batch.seq_lens, self._page_size)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Padded requests have no rows: nothing is read or written for them."""
        return 0

    def _capture(self, batch: ForwardBatch) -> Captured:
        if self._rules is None:
            raise PlanError(
                f"backend {self.backend_id.name} only prefills here, as MHA, since the model has MLA layers: it has "
                f"nothing to capture for a batch to {batch.forward_mode}; let the decode backend plan that"
            )
        cached, tables = plan_captured(batch, self._rules)
        plan = Plan(self.backend_id, batch.forward_mode, batch.num_tokens, None, Metadata(cached, None))
        return Captured(plan, cached, tables)

    # Running

    def run_plan(
        self,
        plan: Plan,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        save_kv_cache: bool,
        extras: ForwardExtras | None,
    ) -> Tensor:
        cached_layer, metadata = self._layer(layer), plan.metadata
        lse, sinks = self._extras(q, layer, extras)
        rows = plan.query_rows
        if not rows:
            return self._padded(q, rows, q.new_empty(0, q.shape[1], layer.v_head_dim), lse)
        new = self._new_rows(layer, k, v, rows) if save_kv_cache or metadata.cached is None else None
        queries, sums = (q, lse) if q.shape[0] == rows else (q[:rows], None if lse is None else lse[:rows])
        if sinks is not None and sums is None:
            sums = torch.empty(rows, q.shape[1], dtype=torch.float32, device=q.device)
        if metadata.cached is None:
            assert new is not None
            out = self._attend_at_hand(queries, new, metadata, cached_layer, sums)
        else:
            if new is not None:
                assert self._pool is not None
                self._pool.write(layer.layer_id, metadata.cached.new_slots, *new)
            if new is not None and metadata.at_hand is not None:
                out = self._attend_at_hand(queries, new, metadata, cached_layer, sums)  # as written, and nearer
            else:
                out = self._attend_cached(queries, layer, metadata.cached, cached_layer, sums)
        if sinks is not None and sums is not None:
            out = with_sinks(out, sums, sinks)
        return out if q.shape[0] == rows else self._padded(q, rows, out, lse)

    def _attend_at_hand(
        self, q: Tensor, new: tuple[Tensor, Tensor], metadata: Metadata, cached: CachedLayer, lse: Tensor | None
    ) -> Tensor:
        assert metadata.at_hand is not None
        out, sums = self._kernels.at_hand(q, *new, metadata.at_hand, cached.softmax, lse is not None)
        return _with_lse(out, sums, lse)

    def _attend_cached(
        self, q: Tensor, layer: LayerSpec, plan: CachedPlan, cached: CachedLayer, lse: Tensor | None
    ) -> Tensor:
        if plan.divided is not None and cached.softmax.window is None:
            count, call = plan.divided.count, plan.divided.call
            spread = q.unsqueeze(1).expand(-1, count, -1, -1).flatten(0, 1)
            parts, sums = self._kernels.over_pages(spread, cached.keys, cached.values, call, cached.softmax, True)
            assert sums is not None
            return merge_parts(parts, sums, count, lse)
        assert plan.whole is not None
        if isinstance(plan.whole, GatheredCall):
            assert self._pool is not None
            keys = self._pool.read_keys(layer.layer_id, plan.whole.rows)
            values = self._pool.read_values(layer.layer_id, plan.whole.rows)
            found = self._kernels.at_hand(q, keys, values, plan.whole.ragged, cached.softmax, lse is not None)
        else:
            found = self._kernels.over_pages(q, cached.keys, cached.values, plan.whole, cached.softmax, lse is not None)
        return _with_lse(*found, lse)

    def forward_ragged(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: LayerSpec,
        batch: ForwardBatch,
        call: RaggedCall,
        lse: Tensor | None = None,
    ) -> Tensor:
        if lse is not None:
            check_lse(lse, q)
        out, sums = self._kernels.at_hand(q, k, v, call, Softmax.of(layer), lse is not None)
        return _with_lse(out, sums, lse)

    def _layer(self, layer: LayerSpec) -> CachedLayer:
        cached = self._layers.get(layer.layer_id)
        if cached is None:
            if layer.mla is not None:
                raise BackendError(
                    f"layer {layer.layer_id} is MLA, and {self.backend_id.name} has no attention over its latent rows; "
                    "it prefills MLA as MHA (`prefill_attention_backend`), and another backend decodes it",
                    settings=["prefill_attention_backend"],
                )
            raise PoolError(
                f"layer {layer.layer_id} is not an MHA layer of the model that backend {self.backend_id.name} serves"
            )
        return cached

    def _extras(self, q: Tensor, layer: LayerSpec, extras: ForwardExtras | None) -> tuple[Tensor | None, Tensor | None]:
        """The log-sum-exp to fill, and the layer's sinks."""
        extras = _NO_EXTRAS if extras is None else extras
        if unknown := extras.asked() - _EXTRAS:
            raise BackendError(
                f"backend {self.backend_id.name} was asked for {', '.join(sorted(unknown))}; "
                f"it knows {', '.join(sorted(_EXTRAS))}"
            )
        if extras.lse is not None:
            check_lse(extras.lse, q)
        if layer.sinks != (extras.sinks is not None):
            given = "were given" if extras.sinks is not None else "were not given"
            raise BackendError(
                f"layer {layer.layer_id} has sinks={layer.sinks}, but extras.sinks {given}; give them for such layers, "
                "and for no others"
            )
        if extras.sinks is not None and extras.sinks.shape != q.shape[1:2]:
            raise BackendError(f"extras.sinks has shape {tuple(extras.sinks.shape)}, but q has {q.shape[1]} heads")
        return extras.lse, extras.sinks

    def _new_rows(self, layer: LayerSpec, k: Tensor | None, v: Tensor | None, rows: int) -> tuple[Tensor, Tensor]:
        if k is None or v is None:
            given = ", ".join(f"{n}={'None' if t is None else tuple(t.shape)}" for n, t in (("k", k), ("v", v)))
            why = "nothing is in the cache" if self.fa_skip_kv_cache else "save_kv_cache=False is for rows in the cache"
            raise BackendError(f"layer {layer.layer_id} ({layer.kind}) needs k and v, but was given {given}: {why}")
        if min(k.shape[0], v.shape[0]) < rows:
            raise BackendError(
                f"layer {layer.layer_id} was given {k.shape[0]} rows of k and {v.shape[0]} of v for {rows} planned ones"
            )
        return (k, v) if k.shape[0] == v.shape[0] == rows else (k[:rows], v[:rows])

    @staticmethod
    def _padded(q: Tensor, rows: int, out: Tensor, lse: Tensor | None) -> Tensor:
        """Rows behind the plan are padding: their output is zero (B5)."""
        whole = out.new_zeros(q.shape[0], *out.shape[1:])
        whole[:rows] = out
        if lse is not None:
            lse[rows:] = float("-inf")
        return whole


def skips_kv_cache(serving: Serving, model: ModelSpec) -> bool:
    """``fa_skip_kv_cache`` (A6): nobody will ever read what a prefill would write."""
    return (
        serving.is_embedding
        and serving.chunked_prefill_size == -1
        and serving.disable_radix_cache
        and not any(layer.mla is not None for layer in model.layers)
    )


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """``out`` ``[rows, heads, dim]`` as if there were one more key, of logit ``sinks`` ``[heads]`` and value zero."""
    share = torch.sigmoid(lse - sinks)  # of the other keys; they had all of it before
    return (out * share.unsqueeze(-1)).to(out.dtype)


def _with_lse(out: Tensor, found: Tensor | None, lse: Tensor | None) -> Tensor:
    if lse is not None:
        assert found is not None
        lse.copy_(found)
    return out


def _mha_pool(context: BackendContext) -> MHAPool:
    if context.pools.mha is None:
        raise PoolError(f"backend {context.name} serves MHA layers, but there is no MHA pool")
    return context.pools.mha
