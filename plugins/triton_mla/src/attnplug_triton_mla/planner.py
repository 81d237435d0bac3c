"""Lengths and page table → what the kernels read: a batch's schedule, made on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import PlanError
from attnplug_sparse.index.triton_schedule import launch_plan, size_of_numbers
from attnplug_triton_mla.configurations import INVARIANT_PARTS, Configuration

_LARGEST_INDEX = 1 << 30
"""Kernels count in 32 bits, and the last program's stretch may end this far past the end of the line."""


@dataclass(frozen=True, slots=True)
class Shape:
    """All that the host knows of a batch: ``queries`` new tokens per request, or 0 if they may differ."""

    requests: int
    rows: int
    queries: int
    heads: int
    page_size: int
    pages: int
    """Columns of the page table."""
    invariant: bool
    whole: bool = False
    """With ``invariant``, no tile is cut: there are too many rows to keep parts of."""

    def tiles(self, tile: int) -> int:
        """The most tiles of rows."""
        if self.queries:
            return self.requests * -(-self.queries * self.heads // tile)
        return min(-(-self.rows * self.heads // tile) + self.requests, self.rows * self.heads)


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """How a batch is divided: ``numbers`` int32 and ``slots`` ``[rows]`` int64, both made on the device by ``fill``."""

    shape: Shape
    configuration: Configuration
    programs: int
    numbers: Tensor
    slots: Tensor

    @classmethod
    def reserve(
        cls, shape: Shape, configuration: Configuration, multiprocessors: int, device: torch.device
    ) -> Schedule:
        steps = -(-shape.pages * shape.page_size // configuration.step)
        if shape.tiles(configuration.tile) * (configuration.start_steps + max(steps, 1)) >= _LARGEST_INDEX:
            raise PlanError(
                f"{shape.rows} rows with {shape.heads} heads, over up to {shape.pages * shape.page_size} cache rows, "
                "are more than the schedule can count; lower `chunked_prefill_size`",
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
        """The most parts of a tile, which only its own length decides; 0 if the whole batch decides."""
        if not self.shape.invariant:
            return 0
        return INVARIANT_PARTS if self.shape.queries and not self.shape.whole else 1

    @property
    def partial_slots(self) -> int:
        """The most partial results at once."""
        if self.shape.invariant:
            return self.shape.tiles(self.configuration.tile) * self.parts if self.parts > 1 else 1
        return 2 * self.programs

    @property
    def merged_by_kernel(self) -> bool:
        """Whether a separate kernel merges parts. It needs the same number of rows in every request."""
        return self.configuration.merge == "kernel" and self.shape.queries > 0 and self.parts != 1

    def fill(self, page_table: Tensor, seq_lens: Tensor, new_lens: Tensor | None) -> None:
        """From the page table ``[requests, pages]`` and lengths ``[requests]``, by launches that wait for nothing.

        ``new_lens`` ``[requests]`` are read where the shape does not say how many new tokens there are.
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
            # Kernels that are launched early read the schedule before they wait for the previous kernel. That must not
            # be the kernel that fills the schedule, so another one comes between: it does wait, and sets a number that
            # nobody reads.
            self.numbers[-1:].zero_()
