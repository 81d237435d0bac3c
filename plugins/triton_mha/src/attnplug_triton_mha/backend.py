"""The backend: pool, kernels and plans brought together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import (
    BackendContext,
    DType,
    ForwardExtras,
    Geometry,
    LayerSpec,
    NewRows,
    Plan,
    PlannedAttention,
    PoolError,
)
from attnplug_triton_mha.attention import LayerCache, launch_attend
from attnplug_triton_mha.configurations import Configuration, Room, choose, fitting, most_partial_rows
from attnplug_triton_mha.planner import LayerShape, Schedule
from attnplug_triton_mha.scratch import SplitPartials, SplitScratch


@dataclass(slots=True, eq=False)
class Metadata:
    """What a plan holds: the page table that it reads, and for each shape of layers how the batch is divided.

    ``page_table`` and ``tree`` are the batch's own memory. A captured plan serves several graphs, each with a table and
    trees of its own, so ``refill`` sets them. ``padded`` says that some rows may be padding, and only the device knows
    which.
    """

    page_table: Tensor
    tree: Tensor | None
    schedules: dict[LayerShape, tuple[Schedule, SplitPartials]]
    slots: Tensor
    barrier: Tensor
    padded: bool


class TritonMHABackend(PlannedAttention):
    """MHA and GQA by one Triton kernel, and one that merges where requests are divided: a schedule for every kind of
    batch, made on the device from the lengths there.

    A plan takes nothing from the host but shapes. One launch fills it for all layers that have the same shape and
    window. A captured plan follows whatever lengths its graph finds.
    """

    def __init__(
        self,
        context: BackendContext,
        *,
        choose: Callable[[int, int, int, bool], Configuration] = choose,
        multiprocessors: int | None = None,
    ) -> None:
        super().__init__(context)
        pool, layers = context.pools.mha, context.model.full_layers
        if pool is None or not layers:
            raise PoolError(f"backend {context.name} serves MHA layers, and needs a model and a pool with some")
        self._choose, self._device = choose, context.device
        self._fp8 = context.kv_dtype is DType.FLOAT8_E4M3
        self._caches = {layer.layer_id: LayerCache.of(pool, layer) for layer in layers}
        self._shapes = tuple({cache.shape: None for cache in self._caches.values()})
        self._rooms: dict[LayerShape, Room] = {}
        if multiprocessors is None:
            properties = torch.cuda.get_device_properties(context.device)
            multiprocessors = properties.multi_processor_count
            sm = 10 * properties.major + properties.minor
            shared: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined] # torch's stub lacks it
            self._rooms = {shape: Room(sm, shared, shape.width, shape.v_width, self._fp8) for shape in self._shapes}
        self._multiprocessors = multiprocessors
        rows = most_partial_rows(multiprocessors, max(shape.kv_heads for shape in self._shapes))
        width = max(shape.v_width for shape in self._shapes)
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
        """Each captured shape has schedules of its own."""
        metadata = self._metadata(geometry)
        plan = Plan.of(self.backend_id, geometry, metadata, metadata.slots)
        self.refill(plan, geometry)
        return plan

    def refill(self, plan: Plan, geometry: Geometry) -> None:
        metadata: Metadata = plan.metadata
        metadata.page_table, metadata.tree = geometry.page_table, geometry.tree
        self._fill(metadata, geometry)
        if geometry.slots is not None:
            metadata.slots.copy_(geometry.slots)

    def _metadata(self, geometry: Geometry) -> Metadata:
        """Memory for a batch's schedules, still to be filled."""
        schedules = {}
        for shape in self._shapes:
            cut = self._choose(geometry.max_new * shape.group, geometry.requests, shape.kv_heads, self._fp8)
            if (room := self._rooms.get(shape)) is not None:
                cut = fitting(cut, room)
            schedule = Schedule.reserve(shape, cut, geometry, self._multiprocessors)
            rows = schedule.partial_rows * shape.kv_heads
            schedules[shape] = schedule, self._scratch[geometry.lane].partials(rows, shape.v_width, rows // cut.tile)
        slots = torch.empty(geometry.rows, dtype=torch.int64, device=self._device)
        barrier = torch.empty(1, dtype=torch.int32, device=self._device)
        padded = geometry.new_lens is not None and geometry.host is None
        return Metadata(geometry.page_table, geometry.tree, schedules, slots, barrier, padded)

    def _fill(self, metadata: Metadata, geometry: Geometry) -> None:
        slots = metadata.slots if geometry.slots is None else None
        for schedule, _ in metadata.schedules.values():
            schedule.fill(geometry, slots)
            slots = None  # once is enough
        if any(schedule.configuration.overlap for schedule, _ in metadata.schedules.values()):
            # Kernels that are launched early read the schedule before they wait for the previous kernel. That must not
            # be the kernel that fills the schedule, so another one comes between: it does wait, and sets a number that
            # nobody reads.
            metadata.barrier.zero_()

    # Running

    def attend(self, q: Tensor, layer: LayerSpec, plan: Plan, new: NewRows | None, extras: ForwardExtras) -> Tensor:
        metadata: Metadata = plan.metadata
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
