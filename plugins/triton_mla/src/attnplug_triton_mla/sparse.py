"""Sparse layers: attention to the cache rows that an index chose for every new token, and to these alone.

For attention, every new token is a request of its own, whose page table is the slots that were chosen for it. So sparse
layers run by the kernels of dense ones. Both this and the index are scheduled on the device, once for all layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import Geometry, IndexPlan, SelectedRows, SparseIndex
from attnplug_triton_mla.configurations import Configuration
from attnplug_triton_mla.planner import Schedule, Shape
from attnplug_triton_mla.scratch import MLAPartials, MLAScratch


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Attention of the rows that the index takes as a block; ``counts`` ``[rows]`` says how many each has chosen."""

    rows: slice
    counts: Tensor
    schedule: Schedule
    partials: MLAPartials


@dataclass(frozen=True, slots=True, eq=False)
class SparsePlan:
    index: IndexPlan
    blocks: tuple[Block, ...]


class SparseLayers:
    """What a backend needs for sparse layers beside their caches: the index, and how attention is cut."""

    def __init__(
        self,
        index: SparseIndex,
        device: torch.device,
        *,
        heads: int,
        multiprocessors: int,
        invariant: bool,
        choose: Callable[[int, int], Configuration],
    ) -> None:
        """``choose`` gives attention's configuration for so many rows that each attend to up to so many."""
        self.index, self._device, self._heads = index, device, heads
        self._multiprocessors, self._invariant, self._choose = multiprocessors, invariant, choose

    def reserve(self, geometry: Geometry, scratch: MLAScratch) -> SparsePlan:
        """Memory for a batch's plan, still to be filled."""
        plan, topk, blocks = self.index.reserve(geometry), self.index.topk, []
        for block in plan.blocks:
            rows = len(block.counts)
            shape = Shape(rows, rows, 1, self._heads, 1, topk, self._invariant, whole=not plan.queries)
            schedule = Schedule.reserve(shape, self._choose(rows, topk), self._multiprocessors, self._device)
            partials = scratch.partials(schedule.partial_slots, schedule.configuration.tile)
            blocks.append(Block(block.rows, block.counts, schedule, partials))
        return SparsePlan(plan, tuple(blocks))

    def fill(self, plan: SparsePlan, geometry: Geometry) -> None:
        """From the lengths on the device, by launches that wait for nothing."""
        self.index.fill(plan.index, geometry)
        for block in plan.blocks:
            # This schedule looks up no pages: they are known only when rows were chosen.
            nowhere = block.counts[:1].expand(len(block.counts), self.index.topk)
            block.schedule.fill(nowhere, block.counts, None)

    def slots(self, plan: SparsePlan, selected: SelectedRows) -> Tensor:
        """Where the selected rows lie, ``[rows, topk]`` int32, adjacent."""
        return self.index.slots(plan.index, selected, self.index.topk)
