"""Scores and top-k selection of cache rows by Triton kernels, as a backend calls them.

Scores take 8 bytes for every visible row of every new token. A batch that needs more memory than was reserved is split
into blocks of rows, which run one after another. If all requests have the same number of new tokens, blocks consist of
whole requests. Otherwise a block may end inside a request.

Triton is imported when an index is built, not before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnplug import SCRATCH, BackendContext, BackendError, ForwardMode, Geometry, LayerSpec
from attnplug.sparse import IndexInputs, SelectedPositions, SelectedRows, SelectedSlots, selected_tensor
from attnplug_sparse.index.index_plan import IndexBlock, IndexMemory, IndexPlan
from attnplug_sparse.index.tiling import INVARIANT_QUERIES, START_STEPS, DeviceLimits, choose_tiles
from attnplug_sparse.pools import INDEX_KEYS

SCORE_BYTES = 256 << 20
"""Score memory per lane, unless a single request needs more."""
_BLOCK_ROWS = 2048
"""Largest number of rows in a block. Every program of its schedule sums over all of them."""
_FEW_NEW = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)
"""Modes with few new tokens per request. Kernels are tiled for their number if it is the same for all requests."""
_LARGEST_OFFSET = (1 << 31) - 1


@dataclass(frozen=True, slots=True, eq=False)
class ScoreInputs:
    """Inputs of one call of a ``ScoreKernel``: some rows of a batch.

    ``q`` is ``[rows, heads, head_dim]``, ``weights`` ``[rows, heads]`` float32, ``keys`` the pool's own memory
    (``IndexKeyPool.keys``), and ``page_table`` ``[requests, pages]``. ``owners`` ``[rows]`` int32 is each row's request
    and ``seen`` ``[rows]`` int32 the number of cache rows it sees, at most ``width``. Neither is contiguous.
    """

    q: Tensor
    weights: Tensor
    keys: Tensor
    scale: float
    page_table: Tensor
    owners: Tensor
    seen: Tensor
    width: int


class ScoreKernel(Protocol):
    """Computes scores ``[rows, width]`` float32, in memory that the caller may overwrite.

    Scores beyond the rows that are seen are ignored. It must not synchronise and must be capturable.
    """

    def __call__(self, inputs: ScoreInputs) -> Tensor: ...


class SparseIndex:
    """Index of all sparse layers of a backend, for any batch: scores, top-k selection, translation to slots.

    It reads the index keys of the context's pool, in 16 or 32 bits or in fp8. ``reserve`` allocates the plan of a batch
    and ``fill`` fills it, once for all layers and only from the lengths on the device. ``choose`` implements
    ``SparseAttention.choose``. None of them synchronises. All but ``reserve`` can be captured in a CUDA graph: score
    memory comes from the workspace and is reserved in the constructor. Of equal scores, those at the lowest positions
    are selected. If levels of invariance beyond ``run`` are requested, one tile configuration scores all batches.
    """

    def __init__(
        self, context: BackendContext, *, score: ScoreKernel | None = None, multiprocessors: int | None = None
    ) -> None:
        """``score`` replaces the kernel that scores keys. ``multiprocessors`` is needed for interpreted kernels only;
        by default it is the device's."""
        try:
            import attnplug_sparse.index.triton_schedule as triton_schedule
            import attnplug_sparse.index.triton_score as triton_score
            import attnplug_sparse.index.triton_topk as triton_topk
        except ImportError as error:
            raise BackendError(
                f"backend {context.name} selects rows with Triton kernels, and Triton cannot be imported: {error}"
            ) from error
        self._schedule, self._score, self._topk = triton_schedule, triton_score, triton_topk
        self._own_score = score
        indexers = [layer.indexer for layer in context.model.layers if layer.indexer is not None]
        self.topk = max(dims.topk for dims in indexers)
        self._heads, self._dim = max(dims.heads for dims in indexers), max(dims.head_dim for dims in indexers)
        # Layers that reuse the selection of others have no keys.
        self._keys = context.pools.cache(INDEX_KEYS) if context.model.index_layers else None
        # A coordinator finds rows by their positions: with one, slots of the page table are those of index keys only.
        self._by_slots = context.coordinator is None
        self._limits: DeviceLimits | None = None
        if multiprocessors is None:
            properties = torch.cuda.get_device_properties(context.device)
            multiprocessors = properties.multi_processor_count
            shared: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined] # torch's stub lacks it
            self._limits = DeviceLimits(10 * properties.major + properties.minor, shared)
        self._multiprocessors, self._page_size, self._device = multiprocessors, context.page_size, context.device
        self._invariant = bool(context.invariant - {"run"})
        self._name, self._workspace, limits = context.name, context.workspace, context.limits
        longest = -(-limits.max_context // context.page_size) * context.page_size
        self._group = triton_topk.group_of(longest)
        row_bytes = IndexMemory.row_bytes(longest, self._group)
        rows = max(limits.max_tokens, limits.max_requests)
        self._nbytes = row_bytes * min(rows, max(SCORE_BYTES // row_bytes, 1))
        for lane in range(limits.lanes):
            self._buffer(lane, self._nbytes)

    def _buffer(self, lane: int, nbytes: int) -> Tensor:
        return self._workspace.request(self._name, self._device, SCRATCH, nbytes, lane=lane).buffer

    # Planning

    def plan(self, geometry: Geometry) -> IndexPlan:
        """Return the filled plan of an eager batch."""
        plan = self.reserve(geometry)
        self.fill(plan, geometry)
        return plan

    def reserve(self, geometry: Geometry) -> IndexPlan:
        """Allocate the plan of a batch with at least one row. ``fill`` has to fill it."""
        queries = geometry.max_new if geometry.mode in _FEW_NEW and geometry.new_lens is None else 0
        tokens = geometry.page_table.shape[1] * self._page_size
        width = tokens if geometry.captured else min(geometry.max_seq_len, tokens)
        slots = torch.empty(geometry.rows, dtype=torch.int64, device=self._device)
        blocks = tuple(self._blocks(geometry, queries, width))
        return IndexPlan(geometry.page_table, geometry.tree, blocks, slots, queries, width)

    def _blocks(self, geometry: Geometry, queries: int, width: int) -> Iterator[IndexBlock]:
        total, requests, row_bytes = geometry.rows, geometry.requests, IndexMemory.row_bytes(width, self._group)
        each = max(min(_BLOCK_ROWS, self._nbytes // row_bytes), queries or 1)
        if queries:
            each = each // queries * queries
        tiled_for = INVARIANT_QUERIES if self._invariant else queries
        tiles = choose_tiles(tiled_for, self._heads, self._dim, self._limits)
        programs = tiles.programs_per_sm * self._multiprocessors
        for first in range(0, total, each):
            rows = min(each, total - first)
            own = slice(first // queries, (first + rows) // queries) if queries else slice(0, requests)
            size = self._schedule.size_of_numbers(own.stop - own.start, programs) + 1
            schedule = torch.empty(size, dtype=torch.int32, device=self._device)
            numbers = torch.empty(3, rows, dtype=torch.int32, device=self._device)
            memory = IndexMemory.of(self._buffer(geometry.lane, rows * row_bytes), rows, width, self._group)
            infos, counts = numbers[:2].view(rows, 2), numbers[2]
            yield IndexBlock(slice(first, first + rows), own, tiles, programs, schedule, infos, counts, memory)

    def fill(self, plan: IndexPlan, geometry: Geometry) -> None:
        """Fill a plan from the lengths and the page table on the device, without synchronising."""
        plan.page_table, plan.tree = geometry.page_table, geometry.tree
        for block in plan.blocks:
            table, lens, new_lens = geometry.page_table[block.requests], geometry.seq_lens[block.requests], None
            if not plan.queries:
                lens, new_lens = _within(geometry, block.rows)
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
                tile=block.tiles.query_tile,
                step=block.tiles.key_tile,
                start_steps=START_STEPS,
                page_size=self._page_size,
            )
            self._score.launch_spread(block.numbers, len(table), block.infos, block.counts, self.topk, plan.width)
            if block.tiles.overlap:
                # Kernels launched early read the plan before they wait for the previous kernel, so that must not be the
                # one that fills it. Another kernel runs in between: it waits, and writes an unused number.
                block.numbers[-1:].zero_()
        if geometry.slots is not None:
            plan.slots.copy_(geometry.slots)

    # Running

    def choose(self, plan: IndexPlan, index: IndexInputs, layer: LayerSpec, width: int | None = None) -> SelectedRows:
        """Select the top-k cache rows of every row of the plan: ``[rows, width]`` int32, -1 at the end of a row.

        Returns positions if there is a coordinator, else slots. ``width`` is at least ``layer.indexer.topk``, the
        default.
        """
        dims = layer.indexer
        assert dims is not None
        q, weights = _readable(index.q), index.weights
        weights = weights if weights.stride(1) == 1 else weights.contiguous()
        chosen = torch.empty(q.shape[0], width or dims.topk, dtype=torch.int32, device=q.device)
        for block in plan.blocks:
            if plan.tree is not None or plan.width > dims.topk:  # else each row selects all that it sees
                self._fill_scores(plan, block, layer, q[block.rows], weights[block.rows])
            self._select_best(plan, block, dims.topk, chosen[block.rows])
        return SelectedSlots(chosen) if self._by_slots else SelectedPositions(chosen)

    def _fill_scores(self, plan: IndexPlan, block: IndexBlock, layer: LayerSpec, q: Tensor, weights: Tensor) -> None:
        """Compute the scores of a block's rows into its memory."""
        dims, memory, table = layer.indexer, block.memory, plan.page_table[block.requests]
        assert dims is not None and self._keys is not None
        keys = self._keys.keys(layer.layer_id)
        if self._own_score is not None:
            owners, seen = block.infos.unbind(1)
            scores = self._own_score(ScoreInputs(q, weights, keys, dims.scale, table, owners, seen, plan.width))
            _store_scores(memory, scores, seen, self._group)
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
            tiles=block.tiles,
            programs=block.programs,
            topk=dims.topk,
            width=plan.width,
            group=self._group,
            scale=dims.scale,
        )

    def _select_best(self, plan: IndexPlan, block: IndexBlock, topk: int, chosen: Tensor) -> None:
        """Write the top-k of a block's rows, by the scores in its memory."""
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
            overlap=block.tiles.overlap,
        )

    def slots(self, plan: IndexPlan, selected: SelectedRows, width: int) -> Tensor:
        """Return the slots of selected rows, ``[rows, width]`` int32, contiguous, -1 at the end of a row."""
        given = selected_tensor(selected)
        missing = width - given.shape[1]
        if missing < 0:
            raise BackendError(
                f"extras.selected has {width - missing} rows for every token, and the model's layers select "
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
    """Return ``q``, or a copy if the kernels cannot read it: they need adjacent columns and 32-bit offsets in a row."""
    _, heads, _ = q.shape
    if q.stride(2) == 1 and q.stride(1) * heads <= _LARGEST_OFFSET:
        return q
    return q.clone(memory_format=torch.contiguous_format)


def _store_scores(memory: IndexMemory, scores: Tensor, seen: Tensor, group: int) -> None:
    """Store another kernel's scores as ours does: -inf where nothing is seen, and the maximum of every group."""
    width = scores.shape[1]
    hidden = torch.arange(width, device=scores.device) >= seen.unsqueeze(1)
    memory.scores[:, :width] = scores.masked_fill_(hidden, float("-inf"))
    memory.scores[:, width:] = float("-inf")
    best = memory.scores.unflatten(1, (-1, group)).amax(2)
    memory.groups[:, : best.shape[1]] = best


def _within(geometry: Geometry, rows: slice) -> tuple[Tensor, Tensor]:
    """Return lengths and new lengths of the requests as if ``rows`` were all new rows of the batch."""
    new = geometry.new_lens
    if new is None:
        new = torch.full_like(geometry.seq_lens, geometry.max_new)
    ends = new.cumsum(0, dtype=torch.int32)
    here = ends.clamp(rows.start, rows.stop)
    own = here - (ends - new).clamp(rows.start, rows.stop)
    return geometry.seq_lens - (ends - here) * (own > 0), own
