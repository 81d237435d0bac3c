"""The ``triton_mha`` backend: MHA and GQA by a split-KV Triton kernel, planned on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnplug import (
    BackendContext,
    ForwardExtras,
    Geometry,
    LayerSpec,
    NewRows,
    Plan,
    PlannedAttention,
    PoolError,
)
from attnplug_triton_mha.attention import KVLayerCache, launch_attend
from attnplug_triton_mha.configurations import (
    INVARIANT,
    MHAKernelConfig,
    MHAKernelLimits,
    choose,
    fit_config,
    fit_invariant,
    max_partial_rows,
)
from attnplug_triton_mha.gluon_attention import GROUP_ROWS
from attnplug_triton_mha.planner import BatchSizes, SplitKVSchedule, TritonLayerShape, max_split_rows
from attnplug_triton_mha.scratch import SplitPartials, SplitScratch


@dataclass(slots=True, eq=False)
class TritonMHAMetadata:
    """A plan's metadata: page table, and a schedule with partial results per layer shape.

    ``page_table`` and ``tree`` are the batch's own memory. A captured plan serves several graphs, each with its own
    table and trees, so ``refill`` sets them. ``padded``: some rows may be padding, which is known on the device only.
    ``slots`` ``[rows]`` int64 are the write slots.
    """

    page_table: Tensor
    tree: Tensor | None
    schedules: dict[TritonLayerShape, tuple[SplitKVSchedule, SplitPartials]]
    slots: Tensor
    barrier: Tensor
    padded: bool


class TritonMHABackend(PlannedAttention):
    """MHA and GQA by one Triton attention kernel and one that merges KV splits.

    Schedules of all batch kinds are computed on the device from device lengths; planning takes only shapes from the
    host. One launch fills a schedule for all layers of the same shape and window. A captured plan serves any lengths.
    If levels of invariance beyond ``run`` are requested, KV is split at absolute positions (``triton_splits``), and
    configurations differ only in what changes no bit. ``choose``, ``invariant`` and ``multiprocessors`` replace the
    configuration table, those configurations and the GPU's size in tests and benchmarks.
    """

    def __init__(
        self,
        context: BackendContext,
        *,
        choose: Callable[[int, int, int, int], MHAKernelConfig] = choose,
        invariant: tuple[MHAKernelConfig, ...] = INVARIANT,
        multiprocessors: int | None = None,
    ) -> None:
        super().__init__(context)
        pool, layers = context.pools.mha, context.model.full_layers
        if pool is None or not layers:
            raise PoolError(f"backend {context.name} requires a model with MHA layers and an MHA pool")
        self._choose = choose
        self._device, self._max_context = context.device, context.limits.max_context
        self._caches = {layer.layer_id: KVLayerCache.of(pool, layer) for layer in layers}
        self._shapes = tuple({cache.shape: None for cache in self._caches.values()})
        self._limits: dict[TritonLayerShape, MHAKernelLimits] = {}
        if multiprocessors is None:
            properties = torch.cuda.get_device_properties(context.device)
            multiprocessors = properties.multi_processor_count
            sm = 10 * properties.major + properties.minor
            shared: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined] # torch's stub lacks it
            copied = all(cache.copied is not None for cache in self._caches.values())
            self._limits = {
                shape: MHAKernelLimits(sm, shared, shape.width, shape.v_width, shape.format, copied)
                for shape in self._shapes
            }
        self._multiprocessors = multiprocessors
        width = max(shape.v_width for shape in self._shapes)
        rows = max_partial_rows(multiprocessors, max(shape.kv_heads for shape in self._shapes))
        self._invariant: dict[TritonLayerShape, tuple[MHAKernelConfig, ...]] = {}
        if context.invariant - {"run"}:
            self._invariant = {shape: fit_invariant(invariant, self._limits.get(shape)) for shape in self._shapes}
            each = ((shape, configs[-1]) for shape, configs in self._invariant.items())
            rows = max(rows, *(max_split_rows(context, shape, config, width) for shape, config in each))
        self._scratch = [SplitScratch(context, rows, width, lane) for lane in range(context.limits.lanes)]

    # Planning

    def plan(self, geometry: Geometry) -> Plan:
        if not geometry.rows:
            return Plan.of(self.backend_id, geometry)
        metadata = self._metadata(geometry)
        self._fill(metadata, geometry)
        slots = metadata.slots if geometry.slots is None else geometry.slots
        return Plan.of(self.backend_id, geometry, metadata, slots)

    def capture(self, geometry: Geometry, memory: None) -> Plan:
        """Plan a captured shape, with schedules of its own."""
        metadata = self._metadata(geometry)
        plan = Plan.of(self.backend_id, geometry, metadata, metadata.slots)
        self.refill(plan, geometry)
        return plan

    def refill(self, plan: Plan, geometry: Geometry) -> None:
        metadata: TritonMHAMetadata = plan.metadata
        metadata.page_table, metadata.tree = geometry.page_table, geometry.tree
        self._fill(metadata, geometry)
        if geometry.slots is not None:
            metadata.slots.copy_(geometry.slots)

    def _metadata(self, geometry: Geometry) -> TritonMHAMetadata:
        """Allocate a batch's schedules; ``_fill`` fills them."""
        schedules = {}
        sizes = BatchSizes.of(geometry) if geometry.captured else BatchSizes.rounded(geometry, self._max_context)
        for shape in self._shapes:
            config = self._config(shape, sizes, tree=geometry.tree is not None)
            scratch = self._scratch[geometry.lane]
            most = scratch.max_rows(shape.v_width) // shape.kv_heads
            schedule = SplitKVSchedule.reserve(shape, config, geometry, self._multiprocessors, most, sizes)
            rows = schedule.partial_rows * shape.kv_heads
            schedules[shape] = (
                schedule,
                scratch.partials(rows, shape.v_width, rows // min(config.tile, GROUP_ROWS.value) or 1),
            )
        slots = torch.empty(geometry.rows, dtype=torch.int64, device=self._device)
        barrier = torch.empty(1, dtype=torch.int32, device=self._device)
        padded = geometry.new_lens is not None and geometry.host is None
        return TritonMHAMetadata(geometry.page_table, geometry.tree, schedules, slots, barrier, padded)

    def _config(self, shape: TritonLayerShape, sizes: BatchSizes, *, tree: bool) -> MHAKernelConfig:
        rows = sizes.new * shape.group
        if invariant := self._invariant.get(shape):
            return next((each for each in invariant if rows <= each.tile), invariant[-1])
        config = self._choose(rows, sizes.requests, shape.kv_heads, shape.format)
        limits = self._limits.get(shape)
        if limits is None:
            return config
        # ``gluon_attention`` does not read trees.
        return fit_config(config, replace(limits, copied=False) if tree else limits)

    def _fill(self, metadata: TritonMHAMetadata, geometry: Geometry) -> None:
        slots = metadata.slots if geometry.slots is None else None
        for schedule, _ in metadata.schedules.values():
            schedule.fill(geometry, slots)
            slots = None  # the first schedule fills them
        if any(schedule.configuration.overlap for schedule, _ in metadata.schedules.values()):
            # With programmatic dependent launch, kernels read the schedule before they wait for the previous kernel,
            # which therefore must not be the one that fills the schedule. This kernel in between does wait; its output
            # is not read.
            metadata.barrier.zero_()

    # Running

    def attend(self, q: Tensor, layer: LayerSpec, plan: Plan, new: NewRows | None, extras: ForwardExtras) -> Tensor:
        metadata: TritonMHAMetadata = plan.metadata
        cache = self._caches[layer.layer_id]
        schedule, partials = metadata.schedules[cache.shape]
        out, lse = extras.out, extras.lse
        if out is None or not out.is_contiguous():
            out = q.new_empty(*q.shape[:2], cache.shape.v_dim)
        if metadata.padded:
            out.zero_()
            if lse is not None:
                lse.fill_(float("-inf"))
        launch_attend(
            q,
            cache,
            metadata.page_table,
            out,
            lse,
            extras.sinks,
            partials,
            schedule,
            layer.scale,
            layer.logit_cap,
            metadata.tree,
        )
        return out
