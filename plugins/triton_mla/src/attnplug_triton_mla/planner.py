"""Split-KV schedules of batches, computed on the device from lengths and page tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import BackendContext, PlanError
from attnplug_sparse.index.triton_schedule import launch_plan, size_of_numbers
from attnplug_sparse.index.triton_splits import max_splits
from attnplug_triton_mla.configurations import MLAKernelConfig

_MAX_SPLIT_ROWS = 1 << 18
"""Maximum rows of partial results of shared tiles: 512 MiB with 512 columns. 64 requests with 16 heads and 65536 cache
rows each use 300 MiB."""
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
    whole: bool = False
    """Share no tile among programs if splits are at absolute positions: there are too many for partial results."""

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
    most_partial_rows: int

    @classmethod
    def reserve(
        cls,
        shape: BatchShape,
        configuration: MLAKernelConfig,
        multiprocessors: int,
        device: torch.device,
        most_partial_rows: int = 0,
    ) -> MLASchedule:
        """Allocate. Splits at absolute positions have memory for ``most_partial_rows`` rows of partial results."""
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
            most_partial_rows,
        )

    @property
    def whole(self) -> bool:
        """True if no tile is shared among programs, for splits at absolute positions."""
        return self.shape.whole or not self.shape.queries

    @property
    def tile_rows(self) -> int:
        """Rows of a partial result."""
        if not self.configuration.split or self.whole:
            return self.configuration.tile
        return min(self.configuration.tile, self.shape.queries * self.shape.heads)

    @property
    def partial_slots(self) -> int:
        """Maximum number of partial results. Splits at absolute positions have one per program in addition, in which
        it adds them up."""
        if not self.configuration.split:
            return 2 * self.programs
        return self.programs if self.whole else self.programs + self._most_results

    @property
    def _most_results(self) -> int:
        """Maximum number of splits of the tiles that programs share."""
        configuration, shape = self.configuration, self.shape
        splits = max_splits(shape.pages * shape.page_size, configuration.split, grows=configuration.grows)
        wanted = min(shape.tiles(configuration.tile), self.programs) * splits
        return min(wanted, max(self.most_partial_rows // self.tile_rows - self.programs, 0))

    @property
    def merged_by_kernel(self) -> bool:
        """True if a separate kernel merges splits. It requires the same number of rows in every request."""
        if self.configuration.split:
            return not self.whole
        return self.configuration.merge == "kernel" and self.shape.queries > 0

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
            start_steps=self.configuration.start_steps,
            page_size=self.shape.page_size,
            split=self.configuration.split,
            grows=self.configuration.grows,
            whole=self.whole,
            most_results=self._most_results if self.configuration.split and not self.whole else 0,
        )
        if self.configuration.overlap:
            # With programmatic dependent launch, kernels read the schedule before they wait for the previous kernel,
            # which therefore must not be the one that fills the schedule. This kernel in between does wait; its output
            # is not read.
            self.numbers[-1:].zero_()


def max_split_rows(context: BackendContext, heads: int, configuration: MLAKernelConfig, multiprocessors: int) -> int:
    """Return the rows of partial results to allocate for splits at absolute positions.

    A program has one tile in which it adds up splits. Tiles that programs share have memory for all splits, as far as
    there is memory.
    """
    limits, programs = context.limits, configuration.programs * multiprocessors
    splits = max_splits(limits.max_context, configuration.split, grows=configuration.grows)
    tiles = min(limits.max_requests * -(-heads // configuration.tile), programs)
    shared = min(tiles * splits * min(configuration.tile, heads), _MAX_SPLIT_ROWS)
    return programs * configuration.tile + shared
