"""The ``triton_mla`` backend: dense and sparse MLA by split-KV Triton kernels, planned on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnplug import (
    BackendContext,
    Claims,
    ExtendPath,
    ForwardBatch,
    ForwardExtras,
    ForwardMode,
    Geometry,
    LayerSpec,
    MLAShape,
    NewRows,
    Plan,
    RaggedCall,
)
from attnplug.kernels import check_lse
from attnplug.sparse import IndexerDims, IndexInputs, SelectedRows
from attnplug_sparse.attention import SparseAttention
from attnplug_sparse.index import SparseIndex
from attnplug_triton_mla.attention import LatentLayerCache, launch_attend
from attnplug_triton_mla.configurations import (
    MLAKernelConfig,
    MLAKernelLimits,
    choose,
    choose_invariant,
    fit_config,
    fit_invariant,
    max_partial_rows,
    on_triton,
)
from attnplug_triton_mla.planner import BatchShape, MLASchedule, max_split_rows
from attnplug_triton_mla.ragged import RaggedConfig, fit_ragged, launch_ragged, plan_tiles, supports_ragged
from attnplug_triton_mla.scratch import MLAPartials, MLAScratch
from attnplug_triton_mla.sparse import SparseLayers, SparsePlan
from attnplug_triton_mla.triton_merge import launch_merge

_FEW_NEW = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)
"""Modes with few new tokens per request. Kernels are configured for that number if all requests have the same."""


@dataclass(slots=True, eq=False)
class TritonMLAMetadata:
    """A plan's metadata: page table, split-KV schedule, and partial results.

    ``page_table`` and ``tree`` are the batch's own memory. A captured plan serves several graphs, each with its own
    table and trees, so ``refill`` sets them. ``ragged``: some rows may be padding, which is known on the device only.
    ``sparse`` is set for models with an index.
    """

    page_table: Tensor
    tree: Tensor | None
    schedule: MLASchedule
    partials: MLAPartials
    ragged: bool
    sparse: SparsePlan | None


class TritonMLABackend(SparseAttention):
    """MLA by Triton kernels.

    Schedules of all batch kinds are computed on the device from device lengths, by one launch; planning takes only
    shapes from the host. A captured plan serves any lengths. The page table is read from the batch's own memory.
    If levels of invariance beyond ``run`` are requested, KV is split at absolute positions (``triton_splits``), and
    configurations differ only in what changes no bit. ``choose``, ``fixed``, ``ragged`` and ``multiprocessors`` replace
    configurations, those, and the GPU's size in tests and benchmarks.
    """

    def __init__(
        self,
        context: BackendContext,
        *,
        choose: Callable[..., MLAKernelConfig] = choose,
        fixed: tuple[MLAKernelConfig, ...] = (),
        ragged: RaggedConfig | None = None,
        multiprocessors: int | None = None,
    ) -> None:
        shape, invariant = MLAShape.of(context), bool(context.invariant - {"run"})
        super().__init__(context, _narrow_claims(context.declared.claims, shape, invariant))
        rank, device = shape.dims.kv_lora_rank, context.device
        self._heads, self._page_size, self._rank, self._device = shape.heads, shape.page_size, rank, device
        rope, pool = shape.dims.qk_rope_head_dim, shape.pool
        self._caches = {layer_id: LatentLayerCache.of(pool, layer_id, rank, rope) for layer_id in pool.layer_ids}
        first = next(iter(self._caches.values()))
        self._format = first.format
        self._limits: MLAKernelLimits | None = None
        self._choose = choose
        self._max_context = context.limits.max_context
        self._fixed: tuple[MLAKernelConfig, ...] = ()
        index = SparseIndex(context, multiprocessors=multiprocessors) if context.model.is_sparse else None
        if multiprocessors is None:
            properties = torch.cuda.get_device_properties(device)
            multiprocessors = properties.multi_processor_count
            shared: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined] # torch's stub lacks it
            sm = 10 * properties.major + properties.minor
            ragged = ragged or fit_ragged(sm, shared, shape.ragged_dims)
            self._limits = MLAKernelLimits(
                sm,
                shared,
                shape.dims.row_dim * shape.dtype.itemsize,
                first.row_bytes,
                all(cache.copied for cache in self._caches.values()),
                first.converted_bytes,
            )
        self._multiprocessors, self._ragged = multiprocessors, ragged or RaggedConfig()
        rows = max_partial_rows(multiprocessors)
        if invariant:
            self._fixed = fit_invariant(fixed or choose_invariant(self._heads, self._format), self._limits)
            rows = max(max_split_rows(context, self._heads, each, multiprocessors) for each in self._fixed)
        self._scratch = [MLAScratch(context, rank, rows, lane) for lane in range(context.limits.lanes)]
        self._sparse: SparseLayers | None = None
        if index is not None:
            self._sparse = SparseLayers(
                index,
                device,
                heads=self._heads,
                multiprocessors=multiprocessors,
                choose=lambda rows, topk: self._configuration(self._heads, rows, topk),
            )

    # MLA prefill as MHA

    def init_mha_chunk_metadata(self, forward_batch: ForwardBatch) -> Plan | None:
        geometry = forward_batch.geometry
        tiles = {call.index: (call, plan_tiles(call, self._ragged)) for call in geometry.calls}
        return Plan.of(self.backend_id, geometry, tiles) if tiles else None

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
        own = None if plan is None else plan.part_of(self.backend_id)
        planned, tiles = (None, None) if own is None else own.metadata.get(call.index, (None, None))
        if planned is not call or tiles is None:
            tiles = plan_tiles(call, self._ragged)
        return launch_ragged(q, k, v, layer, call, tiles, self._ragged, lse)

    # Planning

    def plan(self, geometry: Geometry) -> Plan:
        if not geometry.rows:
            return Plan.of(self.backend_id, geometry)
        metadata = self._metadata(geometry)
        self._fill(metadata, geometry)
        slots = metadata.schedule.slots if geometry.slots is None else geometry.slots
        return Plan.of(self.backend_id, geometry, metadata, slots)

    def capture(self, geometry: Geometry, memory: None) -> Plan:
        """Plan a captured shape, with a schedule of its own."""
        metadata = self._metadata(geometry)
        plan = Plan.of(self.backend_id, geometry, metadata, metadata.schedule.slots)
        self.refill(plan, geometry)
        return plan

    def refill(self, plan: Plan, geometry: Geometry) -> None:
        metadata: TritonMLAMetadata = plan.metadata
        metadata.page_table, metadata.tree = geometry.page_table, geometry.tree
        self._fill(metadata, geometry)
        if geometry.slots is not None:
            metadata.schedule.slots.copy_(geometry.slots)

    def _metadata(self, geometry: Geometry) -> TritonMLAMetadata:
        """Allocate a batch's schedule; ``_fill`` fills it."""
        requests, pages = geometry.page_table.shape
        ragged = geometry.new_lens is not None
        queries = geometry.max_new if geometry.mode in _FEW_NEW and not ragged else 0
        shape = BatchShape(requests, geometry.rows, queries, self._heads, self._page_size, pages)
        # A warm-up need not run long contexts in batches of every size that is not captured (E1).
        tokens = pages * self._page_size if geometry.captured else self._max_context
        configuration = self._configuration(queries * self._heads, requests, tokens, tree=geometry.tree is not None)
        scratch = self._scratch[geometry.lane]
        schedule = MLASchedule.reserve(shape, configuration, self._multiprocessors, self._device, scratch.max_rows)
        partials = scratch.partials(schedule.partial_slots, schedule.tile_rows)
        sparse = None if self._sparse is None else self._sparse.reserve(geometry, scratch)
        return TritonMLAMetadata(geometry.page_table, geometry.tree, schedule, partials, ragged, sparse)

    def _configuration(self, rows: int, requests: int, tokens: int, *, tree: bool = False) -> MLAKernelConfig:
        if self._fixed:
            configuration = next((each for each in self._fixed if 0 < rows <= each.tile), self._fixed[-1])
        else:
            configuration = self._choose(rows, requests, tokens, format=self._format)
        if tree:
            # Gluon kernels multiply rows in shared memory as copied, and cannot mask what a row must not see.
            configuration = on_triton(configuration)
        return configuration if self._limits is None else fit_config(configuration, self._limits)

    def _fill(self, metadata: TritonMLAMetadata, geometry: Geometry) -> None:
        schedule, new_lens = metadata.schedule, geometry.new_lens
        if new_lens is None and not schedule.shape.queries:
            new_lens = torch.full_like(geometry.seq_lens, geometry.max_new)
        schedule.fill(geometry.page_table, geometry.seq_lens, new_lens)
        if self._sparse is not None and metadata.sparse is not None:
            self._sparse.fill(metadata.sparse, geometry)

    # Running

    def choose(self, index: IndexInputs, layer: LayerSpec, dims: IndexerDims, plan: Plan) -> SelectedRows:
        metadata: TritonMLAMetadata = plan.metadata
        assert self._sparse is not None and metadata.sparse is not None
        return self._sparse.index.choose(metadata.sparse.index, index, layer)

    def attend(self, q: Tensor, layer: LayerSpec, plan: Plan, new: NewRows | None, extras: ForwardExtras) -> Tensor:
        metadata: TritonMLAMetadata = plan.metadata
        cache, schedule, partials = self._caches[layer.layer_id], metadata.schedule, metadata.partials
        out, lse = extras.out, extras.lse
        if out is None or not out.is_contiguous():
            out = q.new_empty(*q.shape[:2], self._rank)
        if extras.selected is not None:
            self._attend_selected(q, layer, metadata, extras.selected, extras.q_rope, out, lse)
            return out
        if metadata.ragged:
            out.zero_()
            if lse is not None:
                lse.fill_(float("-inf"))
        launch_attend(
            q, extras.q_rope, cache, metadata.page_table, out, lse, partials, schedule, layer.scale, metadata.tree
        )
        if schedule.merged_by_kernel:
            launch_merge(partials, out, lse, schedule, cache.scale)
        return out

    def _attend_selected(
        self,
        q: Tensor,
        layer: LayerSpec,
        metadata: TritonMLAMetadata,
        selected: SelectedRows,
        q_rope: Tensor | None,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        assert self._sparse is not None and metadata.sparse is not None
        cache = self._caches[layer.layer_id]
        slots = self._sparse.slots(metadata.sparse, selected)
        for block in metadata.sparse.blocks:
            rows, schedule = block.rows, block.schedule
            rope, sums = None if q_rope is None else q_rope[rows], None if lse is None else lse[rows]
            launch_attend(
                q[rows],
                rope,
                cache,
                slots[rows],
                out[rows],
                sums,
                block.partials,
                schedule,
                layer.scale,
                tree=None,
                selected=True,
            )
            if schedule.merged_by_kernel:
                launch_merge(block.partials, out[rows], sums, schedule, cache.scale)


def _narrow_claims(declared: Claims, shape: MLAShape, invariant: bool) -> Claims:
    """Return the spec's claims without MHA paths for wide heads, and if results must not depend on the batch: its
    lengths decide the path."""
    if supports_ragged(shape) and not invariant:
        return declared
    return replace(declared, mla_extend=declared.mla_extend & {ExtendPath.ABSORBED}, ragged_graphs=False)
