"""Planner: device lengths and page table → the split-KV schedule of a batch, computed on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import PlanError
from attnplug_sparse.index.triton_schedule import launch_plan, size_of_numbers
from attnplug_triton_mla.configurations import INVARIANT_PARTS, MLAKernelConfig

_MAX_INDEX = 1 << 30
"""Limit of step counts: kernels count in 32 bits, and the last program's range may end beyond the last step."""


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Host-side shape of a batch. ``queries`` is the number of new tokens per request, 0 if they may differ."""

    requests: int
    rows: int
    queries: int
    heads: int
    page_size: int
    pages: int
    """Page table columns."""
    invariant: bool
    whole: bool = False
    """Never split a tile under ``invariant``: there are too many rows to keep partial results of."""

    def tiles(self, tile: int) -> int:
        """Return the maximum number of tiles."""
        if self.queries:
            return self.requests * -(-self.queries * self.heads // tile)
        return min(-(-self.rows * self.heads // tile) + self.requests, self.rows * self.heads)


@dataclass(frozen=True, slots=True, eq=False)
class MLASchedule:
    """Split-KV schedule of a batch: ``numbers`` int32 and write slots ``[rows]`` int64, filled by ``fill``."""

    shape: BatchShape
    configuration: MLAKernelConfig
    programs: int
    numbers: Tensor
    slots: Tensor

    @classmethod
    def reserve(
        cls, shape: BatchShape, configuration: MLAKernelConfig, multiprocessors: int, device: torch.device
    ) -> MLASchedule:
        steps = -(-shape.pages * shape.page_size // configuration.step)
        if shape.tiles(configuration.tile) * (configuration.start_steps + max(steps, 1)) >= _MAX_INDEX:
            raise PlanError(
                f"{shape.rows} rows with {shape.heads} heads, over up to {shape.pages * shape.page_size} cache rows, "
                "exceed the schedule's 32-bit counters; lower `chunked_prefill_size`",
                settings=["chunked_prefill_size"],
            )
        programs = configuration.programs * multiprocessors
        return cls(
            shape,
            configuration,
            programs,
            torch.empty(size_of_numbers(shape.requests, programs) + 1, dtype=torch.int32, device=device),
            torch.empty(shape.rows, dtype=torch.int64, device=device),
        )

    @property
    def parts(self) -> int:
        """Maximum splits per tile under ``batch_invariant``; 0 if the whole batch determines them."""
        if not self.shape.invariant:
            return 0
        return INVARIANT_PARTS if self.shape.queries and not self.shape.whole else 1

    @property
    def partial_slots(self) -> int:
        """Maximum number of partial results."""
        if self.shape.invariant:
            return self.shape.tiles(self.configuration.tile) * self.parts if self.parts > 1 else 1
        return 2 * self.programs

    @property
    def merged_by_kernel(self) -> bool:
        """True if a separate kernel merges splits. It requires the same number of rows in every request."""
        return self.configuration.merge == "kernel" and self.shape.queries > 0 and self.parts != 1

    def fill(self, page_table: Tensor, seq_lens: Tensor, new_lens: Tensor | None) -> None:
        """Fill from the page table ``[requests, pages]`` and lengths ``[requests]``, without synchronization.

        ``new_lens`` ``[requests]`` is read if ``shape.queries`` is 0.
        """
        launch_plan(
            page_table,
            seq_lens,
            new_lens,
            self.slots,
            self.numbers,
            queries=self.shape.queries,
            programs=self.programs,
            least_steps=self.configuration.least_steps,
            part_cost=self.configuration.part_cost,
            heads=self.shape.heads,
            tile=self.configuration.tile,
            step=self.configuration.step,
            start_steps=0 if self.shape.invariant else self.configuration.start_steps,
            page_size=self.shape.page_size,
            parts=self.parts,
        )
        if self.configuration.overlap:
            # With programmatic dependent launch, kernels read the schedule before they wait for the previous kernel,
            # which therefore must not be the one that fills the schedule. This kernel in between does wait; its output
            # is not read.
            self.numbers[-1:].zero_()
