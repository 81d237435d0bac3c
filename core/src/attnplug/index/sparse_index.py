"""The index as a backend uses it: which cache rows every new token chooses, by kernels in Triton.

Scores need memory: 8 bytes for every visible row of every new token. A batch that would need more than was reserved is
cut into blocks of rows, which are scored and chosen one after another. Blocks of a batch with equally many new tokens
per request are of whole requests. Others may cut a request.

Triton is imported when an index is built, and not before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnplug.contract.context import BackendContext
from attnplug.contract.geometry import Geometry
from attnplug.contract.mode import ForwardMode
from attnplug.contract.sparse import IndexInputs, SelectedPositions, SelectedRows, SelectedSlots, selected_tensor
from attnplug.declare.errors import BackendError
from attnplug.declare.model import LayerSpec
from attnplug.declare.workspace_kind import SCRATCH
from attnplug.index.cuts import START_STEPS, Room, choose_cut
from attnplug.index.plan import IndexBlock, IndexMemory, IndexPlan
from attnplug.kv import INDEX_KEYS

MOST_BYTES = 256 << 20
"""The memory for scores of one lane, unless a single request needs more."""
_MOST_ROWS = 2048
"""The most rows of a block. Its schedule adds up all of them in every program."""
_FEW_NEW = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)
"""Modes with few new tokens per request. Kernels are cut for their number if all requests have the same."""
_LARGEST_OFFSET = (1 << 31) - 1


@dataclass(frozen=True, slots=True, eq=False)
class ScoreInputs:
    """What a kernel of an author's own scores: some rows of a batch, which is one call.

    ``q`` is ``[rows, heads, head_dim]``, ``weights`` ``[rows, heads]`` float32, ``keys`` the pool's own memory
    (``IndexKeyPool.keys``), and ``page_table`` ``[requests, pages]``. ``owners`` ``[rows]`` int32 has each row's
    request, ``seen`` ``[rows]`` int32 how many cache rows it sees, which are ``width`` at most. Both have strides.
    """

    q: Tensor
    weights: Tensor
    keys: Tensor
    scale: float
    page_table: Tensor
    owners: Tensor
    seen: Tensor
    width: int


class Score(Protocol):
    """Scores ``[rows, width]`` float32, in memory that may be overwritten. Whatever is past the rows that are seen is
    ignored. Waits for nothing, and can be captured."""

    def __call__(self, inputs: ScoreInputs) -> Tensor: ...


def schedule_kernels() -> ModuleType:
    """The module of the schedule that the index runs by: its launch, and what a kernel of an author's own reads it
    with. Imports Triton."""
    from attnplug.index import triton_schedule

    return triton_schedule


class SparseIndex:
    """Scores, choice and translation to slots, for all sparse layers of a backend, on any batch.

    Index keys are those of the context's pool, in 16 or 32 bits or in fp8. ``reserve`` makes the plan of a batch and
    ``fill`` fills it, once for all layers and from the lengths on the device alone. ``choose`` is all that
    ``SparseAttention.choose`` needs. None of them waits. All but ``reserve`` can be captured: memory for scores is the
    workspace's, and is reserved when the index is built.
    """

    def __init__(
        self, context: BackendContext, *, score: Score | None = None, multiprocessors: int | None = None
    ) -> None:
        """``score`` takes the place of the kernel that scores keys. ``multiprocessors`` is for kernels that are
        interpreted; without it the device is asked."""
        try:
            from attnplug.index import triton_schedule, triton_score, triton_topk
        except ImportError as error:
            raise BackendError(
                f"backend {context.name} chooses rows by kernels in Triton, which cannot be imported: {error}"
            ) from error
        self._schedule, self._score, self._topk = triton_schedule, triton_score, triton_topk
        self._own_score = score
        indexers = [layer.indexer for layer in context.model.layers if layer.indexer is not None]
        self.topk = max(dims.topk for dims in indexers)
        self._heads, self._dim = max(dims.heads for dims in indexers), max(dims.head_dim for dims in indexers)
        # Layers that share the choice of others have no keys.
        self._keys = context.pools.cache(INDEX_KEYS) if context.model.index_layers else None
        # A coordinator finds rows by their positions: what the page table says of them is true of index keys alone.
        self._by_slots = context.coordinator is None
        self._room: Room | None = None
        if multiprocessors is None:
            properties = torch.cuda.get_device_properties(context.device)
            multiprocessors = properties.multi_processor_count
            shared: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined] # torch's stub lacks it
            self._room = Room(10 * properties.major + properties.minor, shared)
        self._multiprocessors, self._page_size, self._device = multiprocessors, context.page_size, context.device
        self._name, self._workspace, limits = context.name, context.workspace, context.limits
        longest = -(-limits.max_context // context.page_size) * context.page_size
        self._group = triton_topk.group_of(longest)
        row_bytes = IndexMemory.row_bytes(longest, self._group)
        rows = max(limits.max_tokens, limits.max_requests)
        self._nbytes = row_bytes * min(rows, max(MOST_BYTES // row_bytes, 1))
        for lane in range(limits.lanes):
            self._buffer(lane, self._nbytes)

    def _buffer(self, lane: int, nbytes: int) -> Tensor:
        return self._workspace.request(self._name, self._device, SCRATCH, nbytes, lane=lane).buffer

    # Planning

    def plan(self, geometry: Geometry) -> IndexPlan:
        """The plan of an eager batch."""
        plan = self.reserve(geometry)
        self.fill(plan, geometry)
        return plan

    def reserve(self, geometry: Geometry) -> IndexPlan:
        """Memory for the plan of a batch with at least one row, still to be filled."""
        queries = geometry.max_new if geometry.mode in _FEW_NEW and geometry.new_lens is None else 0
        tokens = geometry.page_table.shape[1] * self._page_size
        width = tokens if geometry.captured else min(geometry.max_seq_len, tokens)
        slots = torch.empty(geometry.rows, dtype=torch.int64, device=self._device)
        blocks = tuple(self._blocks(geometry, queries, width))
        return IndexPlan(geometry.page_table, geometry.tree, blocks, slots, queries, width)

    def _blocks(self, geometry: Geometry, queries: int, width: int) -> Iterator[IndexBlock]:
        total, requests, row_bytes = geometry.rows, geometry.requests, IndexMemory.row_bytes(width, self._group)
        each = max(min(_MOST_ROWS, self._nbytes // row_bytes), queries or 1)
        if queries:
            each = each // queries * queries
        cut = choose_cut(queries, self._heads, self._dim, self._room)
        programs = cut.programs * self._multiprocessors
        for first in range(0, total, each):
            rows = min(each, total - first)
            mine = slice(first // queries, (first + rows) // queries) if queries else slice(0, requests)
            size = self._schedule.size_of_numbers(mine.stop - mine.start, programs) + 1
            schedule = torch.empty(size, dtype=torch.int32, device=self._device)
            numbers = torch.empty(3, rows, dtype=torch.int32, device=self._device)
            memory = IndexMemory.of(self._buffer(geometry.lane, rows * row_bytes), rows, width, self._group)
            infos, counts = numbers[:2].view(rows, 2), numbers[2]
            yield IndexBlock(slice(first, first + rows), mine, cut, programs, schedule, infos, counts, memory)

    def fill(self, plan: IndexPlan, geometry: Geometry) -> None:
        """From the lengths and the page table on the device, by launches that wait for nothing."""
        plan.page_table, plan.tree = geometry.page_table, geometry.tree
        for block in plan.blocks:
            table, lens, new_lens = geometry.page_table[block.requests], geometry.seq_lens[block.requests], None
            if not plan.queries:
                lens, new_lens = _within(geometry, block.rows)
            cut = block.cut
            self._schedule.launch_plan(
                table,
                lens,
                new_lens,
                plan.slots[block.rows],
                block.numbers,
                queries=plan.queries,
                programs=block.programs,
                least_steps=1,
                part_cost=0.0,
                heads=1,
                tile=cut.tile,
                step=cut.step,
                start_steps=START_STEPS,
                page_size=self._page_size,
                parts=0,
            )
            self._score.launch_spread(block.numbers, len(table), block.infos, block.counts, self.topk, plan.width)
            if cut.overlap:
                # Kernels that are launched early read all this before they wait for the previous kernel. That must not
                # be one that fills it, so another one comes between: it does wait, and sets a number that nobody reads.
                block.numbers[-1:].zero_()
        if geometry.slots is not None:
            plan.slots.copy_(geometry.slots)

    # Running

    def choose(self, plan: IndexPlan, index: IndexInputs, layer: LayerSpec, width: int | None = None) -> SelectedRows:
        """What every row of the plan chooses, by the layer's keys: ``[rows, width]`` int32, -1 after the last.

        Positions if there is a coordinator, else slots. ``width`` is that of ``layer.indexer.topk`` or more.
        """
        dims = layer.indexer
        assert dims is not None
        q, weights = _readable(index.q), index.weights
        weights = weights if weights.stride(1) == 1 else weights.contiguous()
        chosen = torch.empty(q.shape[0], width or dims.topk, dtype=torch.int32, device=q.device)
        for block in plan.blocks:
            if plan.tree is not None or plan.width > dims.topk:  # else each row takes all that it sees
                self._fill_scores(plan, block, layer, q[block.rows], weights[block.rows])
            self._put_best(plan, block, dims.topk, chosen[block.rows])
        return SelectedSlots(chosen) if self._by_slots else SelectedPositions(chosen)

    def _fill_scores(self, plan: IndexPlan, block: IndexBlock, layer: LayerSpec, q: Tensor, weights: Tensor) -> None:
        """Scores of a block's rows, in its memory."""
        dims, memory, table = layer.indexer, block.memory, plan.page_table[block.requests]
        assert dims is not None and self._keys is not None
        keys = self._keys.keys(layer.layer_id)
        if self._own_score is not None:
            owners, seen = block.infos.unbind(1)
            found = self._own_score(ScoreInputs(q, weights, keys, dims.scale, table, owners, seen, plan.width))
            _keep_scores(memory, found, seen, self._group)
            return
        self._score.launch_score(
            q,
            weights,
            keys.flatten(1) if keys.dtype is torch.uint8 else keys,  # fp8: keys and scales by whole pages
            self._page_size,
            table,
            None if plan.tree is None else plan.tree[block.requests],
            memory.scores,
            memory.groups,
            block.numbers,
            cut=block.cut,
            programs=block.programs,
            topk=dims.topk,
            width=plan.width,
            group=self._group,
            scale=dims.scale,
        )

    def _put_best(self, plan: IndexPlan, block: IndexBlock, topk: int, chosen: Tensor) -> None:
        """The best of a block's rows by the scores in its memory."""
        memory = block.memory
        self._topk.launch_choose(
            memory.scores,
            memory.groups,
            memory.group_list,
            memory.candidates,
            block.infos,
            plan.page_table[block.requests],
            None if plan.tree is None else plan.tree[block.requests],
            chosen,
            topk=topk,
            group=self._group,
            page_size=self._page_size,
            slots=self._by_slots,
            overlap=block.cut.overlap,
        )

    def slots(self, plan: IndexPlan, selected: SelectedRows, width: int) -> Tensor:
        """Where the selected rows lie, ``[rows, width]`` int32, adjacent, -1 after the last."""
        given = selected_tensor(selected)
        missing = width - given.shape[1]
        if missing < 0:
            raise BackendError(
                f"extras.selected has {width - missing} rows for every token, and the model's layers choose "
                f"{self.topk}; give no more"
            )
        if missing:
            given = pad(given, (0, missing), value=-1)
        given = given.contiguous()
        if isinstance(selected, SelectedSlots):
            return given
        slots = torch.empty_like(given)
        for block in plan.blocks:
            self._topk.launch_translate(
                given[block.rows], block.infos, plan.page_table[block.requests], slots[block.rows], self._page_size
            )
        return slots


def _readable(q: Tensor) -> Tensor:
    """``q``, or a copy if the kernels cannot read it: columns are adjacent, and a row's heads within 32-bit offsets."""
    _, heads, _ = q.shape
    if q.stride(2) == 1 and q.stride(1) * heads <= _LARGEST_OFFSET:
        return q
    return q.clone(memory_format=torch.contiguous_format)


def _keep_scores(memory: IndexMemory, found: Tensor, seen: Tensor, group: int) -> None:
    """Scores of another kernel as ours leaves them: -inf where nothing is seen, and the best of every group."""
    width = found.shape[1]
    hidden = torch.arange(width, device=found.device) >= seen.unsqueeze(1)
    memory.scores[:, :width] = found.masked_fill_(hidden, float("-inf"))
    memory.scores[:, width:] = float("-inf")
    best = memory.scores.unflatten(1, (-1, group)).amax(2)
    memory.groups[:, : best.shape[1]] = best


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
