"""Plan of the index for a batch, in memory that a captured graph can hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug_sparse.index.tiling import ScoreConfig

UNIT = 64
"""Alignment, in elements, of the rows of scores and of groups."""


@dataclass(frozen=True, slots=True, eq=False)
class IndexMemory:
    """Scores ``[rows, width]`` float32, the maximum of every group of them, and lists of candidates and of groups."""

    scores: Tensor
    groups: Tensor
    candidates: Tensor
    group_list: Tensor

    @staticmethod
    def row_bytes(width: int, group: int) -> int:
        """Bytes per row of scores for ``width`` cache rows, in groups of ``group``."""
        return 8 * (_rounded(width, max(UNIT, group)) + _rounded(-(-width // group), UNIT))

    @classmethod
    def of(cls, buffer: Tensor, rows: int, width: int, group: int) -> IndexMemory:
        """Views of a workspace buffer, for ``rows`` rows of ``width`` scores."""
        scores, groups = _rounded(width, max(UNIT, group)), _rounded(-(-width // group), UNIT)
        sizes = [rows * columns for columns in (scores, groups, scores, groups)]
        numbers = buffer[: 4 * sum(sizes)].view(torch.float32).split(sizes)
        return cls(
            numbers[0].view(rows, scores),
            numbers[1].view(rows, groups),
            numbers[2].view(torch.int32).view(rows, scores),
            numbers[3].view(torch.int32).view(rows, groups),
        )


def _rounded(count: int, unit: int) -> int:
    return max(-(-count // unit), 1) * unit


@dataclass(frozen=True, slots=True, eq=False)
class IndexBlock:
    """Rows of a batch that are scored by one launch, and the schedule of that launch."""

    rows: slice
    requests: slice
    tiles: ScoreConfig
    programs: int
    numbers: Tensor
    """The schedule, int32; see ``triton_schedule``."""
    infos: Tensor
    """``[rows, 2]`` int32: each row's request within the block, and the number of cache rows it sees."""
    counts: Tensor
    """``[rows]`` int32: the number of cache rows that each row selects."""
    memory: IndexMemory


@dataclass(slots=True, eq=False)
class IndexPlan:
    """Index plan of one batch, for all layers. ``SparseIndex.reserve`` makes it, ``SparseIndex.fill`` fills it.

    ``page_table`` and ``tree`` are the batch's own memory. A captured plan serves several graphs, each with its own
    page table and trees, so ``fill`` sets them.
    """

    page_table: Tensor
    tree: Tensor | None
    blocks: tuple[IndexBlock, ...]
    slots: Tensor
    """``[rows]`` int64: slot mapping of the new rows; -1 for padding."""
    queries: int
    """New tokens of every request; 0 if they may differ."""
    width: int
    """Upper bound of the cache rows of any request of the batch."""
