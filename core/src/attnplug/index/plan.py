"""What the index knows of a batch, in memory that a captured graph can hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug.index.cuts import Cut

UNIT = 64
"""Rows of scores and of groups start at multiples of this many numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class IndexMemory:
    """Scores ``[rows, width]`` float32, the best of every group of them, and lists of candidates and of groups."""

    scores: Tensor
    groups: Tensor
    candidates: Tensor
    group_list: Tensor

    @staticmethod
    def row_bytes(width: int, group: int) -> int:
        return 8 * (_rounded(width, max(UNIT, group)) + _rounded(-(-width // group), UNIT))

    @classmethod
    def of(cls, buffer: Tensor, rows: int, width: int, group: int) -> IndexMemory:
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
    """Rows of a batch that are scored at once, and the schedule by which they are."""

    rows: slice
    requests: slice
    cut: Cut
    programs: int
    numbers: Tensor
    """The schedule, int32; see ``triton_schedule``."""
    infos: Tensor
    """``[rows, 2]`` int32: each row's request within the block, and how many cache rows it sees."""
    counts: Tensor
    """``[rows]`` int32: how many cache rows each row chooses."""
    memory: IndexMemory


@dataclass(slots=True, eq=False)
class IndexPlan:
    """One batch, for all layers. ``SparseIndex.reserve`` makes it, ``SparseIndex.fill`` fills it.

    ``page_table`` and ``tree`` are the batch's own memory. A captured plan serves several graphs, each with a table and
    trees of its own, so ``fill`` sets them.
    """

    page_table: Tensor
    tree: Tensor | None
    blocks: tuple[IndexBlock, ...]
    slots: Tensor
    """``[rows]`` int64: where the new rows go by the page table; -1 for padding."""
    queries: int
    """New tokens of every request; 0 if they may differ."""
    width: int
    """Scores of a row: no request of the batch has more cache rows."""
