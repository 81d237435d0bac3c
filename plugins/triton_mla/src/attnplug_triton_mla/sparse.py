"""Sparse layers: which cache rows every new token chooses by its index, and attention to these alone.

For attention, every new token is a request of its own, whose page table is the slots that were chosen for it. So sparse
layers run by the kernels of dense ones. Both this and the index are scheduled on the device, once for all layers.

Scores need memory: 8 bytes for every visible row of every new token. A batch that would need more than was reserved is
cut into blocks of rows, which are scored and chosen one after another. Blocks of a batch with equally many new tokens
per request are of whole requests. Others may cut a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import (
    SCRATCH,
    BackendError,
    Geometry,
    IndexerDims,
    IndexInputs,
    SelectedPositions,
    SelectedRows,
    SelectedSlots,
)
from attnplug.host import WorkspaceOwner
from attnplug_triton_mla.attention import readable
from attnplug_triton_mla.configurations import Configuration
from attnplug_triton_mla.planner import Schedule, Shape
from attnplug_triton_mla.scratch import Partials, Scratch
from attnplug_triton_mla.triton_index import UNIT, launch_score, launch_spread
from attnplug_triton_mla.triton_topk import group_of, launch_choose, launch_translate

MOST_BYTES = 256 << 20
"""The memory for scores of one lane, unless a single request needs more."""
_MOST_ROWS = 2048
"""The most rows of a block. Its schedule adds up all of them in every program."""


@dataclass(frozen=True, slots=True, eq=False)
class IndexMemory:
    """Scores ``[rows, width]`` float32, the best of every group of them, and lists of candidates and of groups."""

    scores: Tensor
    groups: Tensor
    candidates: Tensor
    group_list: Tensor

    @staticmethod
    def row_bytes(width: int, group: int) -> int:
        return 8 * (_rounded(width) + _rounded(-(-width // group)))

    @classmethod
    def of(cls, buffer: Tensor, rows: int, width: int, group: int) -> IndexMemory:
        scores, groups = _rounded(width), _rounded(-(-width // group))
        sizes = [rows * columns for columns in (scores, groups, scores, groups)]
        numbers = buffer[: 4 * sum(sizes)].view(torch.float32).split(sizes)
        return cls(
            numbers[0].view(rows, scores),
            numbers[1].view(rows, groups),
            numbers[2].view(torch.int32).view(rows, scores),
            numbers[3].view(torch.int32).view(rows, groups),
        )


def _rounded(count: int) -> int:
    unit: int = UNIT.value
    return max(-(-count // unit), 1) * unit


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Rows of a batch that are scored at once. ``infos`` ``[rows, 2]`` has each row's request in the block, and how
    many cache rows it sees; ``counts`` ``[rows]`` how many it chooses."""

    rows: slice
    requests: slice
    index: Schedule
    attention: Schedule
    infos: Tensor
    counts: Tensor
    memory: IndexMemory
    partials: Partials


@dataclass(frozen=True, slots=True, eq=False)
class SparsePlan:
    blocks: tuple[Block, ...]
    width: int
    """Scores of a row: no request of the batch has more cache rows."""


class SparseLayers:
    """What a backend needs for sparse layers beside their caches: configurations, and memory reserved for scores."""

    def __init__(
        self,
        name: str,
        workspace: WorkspaceOwner,
        device: torch.device,
        *,
        topk: int,
        heads: int,
        page_size: int,
        longest: int,
        rows: int,
        lanes: int,
        multiprocessors: int,
        invariant: bool,
        choose: Callable[[int], Configuration],
        choose_index: Callable[[int], Configuration],
    ) -> None:
        """``choose`` gives attention's configuration for so many rows, ``choose_index`` that of the index for so many
        new tokens per request. Batches have up to ``rows`` rows, and requests up to ``longest`` cache rows."""
        self._device, self._topk, self._heads, self._page_size = device, topk, heads, page_size
        self._multiprocessors, self._invariant = multiprocessors, invariant
        self._choose, self._choose_index = choose, choose_index
        self._group = group_of(longest)
        row_bytes = IndexMemory.row_bytes(longest, self._group)
        self._nbytes = row_bytes * min(rows, max(MOST_BYTES // row_bytes, 1))
        self._name, self._workspace = name, workspace
        for lane in range(lanes):
            self._buffer(lane, self._nbytes)

    def _buffer(self, lane: int, nbytes: int) -> Tensor:
        return self._workspace.request(self._name, self._device, SCRATCH, nbytes, lane=lane).buffer

    # Planning

    def reserve(self, geometry: Geometry, scratch: Scratch, queries: int) -> SparsePlan:
        """Memory for a batch's plan, still to be filled. ``queries`` is 0 if the number differs."""
        tokens = geometry.page_table.shape[1] * self._page_size
        width = tokens if geometry.captured else min(geometry.max_seq_len, tokens)
        return SparsePlan(tuple(self._blocks(geometry, scratch, queries, width)), width)

    def _blocks(self, geometry: Geometry, scratch: Scratch, queries: int, width: int) -> Iterator[Block]:
        total, requests, row_bytes = geometry.rows, geometry.requests, IndexMemory.row_bytes(width, self._group)
        each = max(min(_MOST_ROWS, self._nbytes // row_bytes), queries or 1)
        if queries:
            each = each // queries * queries
        device = self._device
        for first in range(0, total, each):
            rows = min(each, total - first)
            mine = slice(first // queries, (first + rows) // queries) if queries else slice(0, requests)
            count = mine.stop - mine.start
            shape = Shape(count, rows, queries, 1, self._page_size, geometry.page_table.shape[1], invariant=False)
            index = Schedule.reserve(shape, self._choose_index(queries), self._multiprocessors, device)
            whole = not queries
            shape = Shape(rows, rows, 1, self._heads, 1, self._topk, self._invariant, whole)
            attention = Schedule.reserve(shape, self._choose(rows), self._multiprocessors, device)
            numbers = torch.empty(3, rows, dtype=torch.int32, device=device)
            partials = scratch.partials(attention.partial_slots, attention.configuration.tile)
            memory = IndexMemory.of(self._buffer(geometry.lane, rows * row_bytes), rows, width, self._group)
            infos, counts = numbers[:2].view(rows, 2), numbers[2]
            yield Block(slice(first, first + rows), mine, index, attention, infos, counts, memory, partials)

    def fill(self, plan: SparsePlan, geometry: Geometry) -> None:
        """From the lengths on the device, by launches that wait for nothing."""
        for block in plan.blocks:
            lens, new_lens = geometry.seq_lens[block.requests], None
            if not block.index.shape.queries:
                lens, new_lens = _within(geometry, block.rows)
            block.index.fill(geometry.page_table[block.requests], lens, new_lens)
            launch_spread(block.index, block.infos, block.counts, self._topk, plan.width)
            # This schedule looks up no pages: they are known only when rows were chosen.
            nowhere = block.counts[:1].expand(len(block.counts), self._topk)
            block.attention.fill(nowhere, block.counts, None)

    # Running

    def choose(
        self,
        plan: SparsePlan,
        index: IndexInputs,
        keys: Tensor,
        dims: IndexerDims,
        page_table: Tensor,
        tree: Tensor | None,
        *,
        slots: bool,
    ) -> SelectedRows:
        """What every row chooses, by the keys ``[pages, page_size, dim]``, or bytes ``[pages, page bytes]``."""
        q = readable(index.q)
        weights = index.weights if index.weights.stride(1) == 1 else index.weights.contiguous()
        chosen = torch.empty(q.shape[0], dims.topk, dtype=torch.int32, device=q.device)
        for block in plan.blocks:
            memory, table = block.memory, page_table[block.requests]
            trees = None if tree is None else tree[block.requests]
            launch_score(
                q[block.rows],
                weights[block.rows],
                keys,
                self._page_size,
                table,
                trees,
                memory.scores,
                memory.groups,
                block.index,
                topk=dims.topk,
                width=plan.width,
                group=self._group,
                scale=dims.scale,
            )
            launch_choose(
                memory.scores,
                memory.groups,
                memory.group_list,
                memory.candidates,
                block.infos,
                table,
                trees,
                chosen[block.rows],
                group=self._group,
                page_size=self._page_size,
                slots=slots,
                overlap=block.index.configuration.overlap,
            )
        return SelectedSlots(chosen) if slots else SelectedPositions(chosen)

    def slots(self, plan: SparsePlan, selected: SelectedRows, page_table: Tensor) -> Tensor:
        """Where the selected rows lie, ``[rows, topk]`` int32, adjacent."""
        given = selected.slots if isinstance(selected, SelectedSlots) else selected.positions
        width = given.shape[1]
        if width > self._topk:
            raise BackendError(
                f"extras.selected has {width} rows for every token, and the model's layers choose {self._topk}; "
                "give no more"
            )
        if width < self._topk:
            given = torch.nn.functional.pad(given, (0, self._topk - width), value=-1)
        given = given.contiguous()
        if isinstance(selected, SelectedSlots):
            return given
        slots = torch.empty_like(given)
        for block in plan.blocks:
            launch_translate(
                given[block.rows], block.infos, page_table[block.requests], slots[block.rows], self._page_size
            )
        return slots


def _within(geometry: Geometry, rows: slice) -> tuple[Tensor, Tensor]:
    """Lengths as if a batch had no rows but these: each request's cache rows up to its last one here, and how many of
    these are its own."""
    new = geometry.new_lens
    if new is None:
        new = torch.full_like(geometry.seq_lens, geometry.max_new)
    ends = new.cumsum(0, dtype=torch.int32)
    here = ends.clamp(rows.start, rows.stop)
    mine = here - (ends - new).clamp(rows.start, rows.stop)
    return geometry.seq_lens - (ends - here) * (mine > 0), mine
