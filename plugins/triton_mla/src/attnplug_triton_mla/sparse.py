"""Sparse layers: attention to the cache rows that an index selects for every new token.

For attention, every new token is a request of its own, whose page table holds its selected slots. So sparse layers use
the kernels of dense ones. Attention and index are scheduled on the device, once for all layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import Geometry
from attnplug.sparse import SelectedRows
from attnplug_sparse.index import IndexPlan, SparseIndex
from attnplug_triton_mla.configurations import MLAKernelConfig
from attnplug_triton_mla.planner import BatchShape, MLASchedule
from attnplug_triton_mla.scratch import MLAPartials, MLAScratch


@dataclass(frozen=True, slots=True, eq=False)
class SparseBlock:
    """Schedule of one block of query rows of the index. ``counts`` ``[rows]`` are the selected rows of each."""

    rows: slice
    counts: Tensor
    schedule: MLASchedule
    partials: MLAPartials


@dataclass(frozen=True, slots=True, eq=False)
class SparsePlan:
    """Plan of the index, and schedules of attention per block."""

    index: IndexPlan
    blocks: tuple[SparseBlock, ...]


class SparseLayers:
    """Index and attention schedules of a backend's sparse layers."""

    def __init__(
        self,
        index: SparseIndex,
        device: torch.device,
        *,
        heads: int,
        multiprocessors: int,
        choose: Callable[[int, int], MLAKernelConfig],
    ) -> None:
        """``choose(rows, topk)`` returns the configuration for ``rows`` queries with up to ``topk`` selected rows."""
        self.index, self._device, self._heads = index, device, heads
        self._multiprocessors, self._choose = multiprocessors, choose

    def reserve(self, geometry: Geometry, scratch: MLAScratch) -> SparsePlan:
        """Allocate a batch's plan; ``fill`` fills it."""
        plan, topk, blocks = self.index.reserve(geometry), self.index.topk, []
        for block in plan.blocks:
            rows = len(block.counts)
            shape = BatchShape(rows, rows, 1, self._heads, 1, topk, whole=not plan.queries)
            schedule = MLASchedule.reserve(
                shape, self._choose(rows, topk), self._multiprocessors, self._device, scratch.max_rows
            )
            partials = scratch.partials(schedule.partial_slots, schedule.tile_rows)
            blocks.append(SparseBlock(block.rows, block.counts, schedule, partials))
        return SparsePlan(plan, tuple(blocks))

    def fill(self, plan: SparsePlan, geometry: Geometry) -> None:
        """Fill from device lengths, without synchronization."""
        self.index.fill(plan.index, geometry)
        for block in plan.blocks:
            # Slots are known only after the selection.
            dummy_table = block.counts[:1].expand(len(block.counts), self.index.topk)
            block.schedule.fill(dummy_table, block.counts, None)

    def slots(self, plan: SparsePlan, selected: SelectedRows) -> Tensor:
        """Return the slots of the selected rows, ``[rows, topk]`` int32, contiguous."""
        return self.index.slots(plan.index, selected, self.index.topk)
