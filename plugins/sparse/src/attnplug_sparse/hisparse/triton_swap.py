"""Swap-in by one launch per layer, without the host: finds the selected rows on the device and copies the others.

Each request has one program that plans and several that copy. Planners come first in the grid and wait for nothing, so
copiers may spin on them, however few programs are resident. Imported only if there is a GPU and Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnplug import Geometry
from attnplug_sparse.hisparse.addresses import DeviceSlots, LogicalSlots, host_slots
from attnplug_sparse.hisparse.host_rows import HostRows
from attnplug_sparse.hisparse.hot_pool import HotPool
from attnplug_sparse.hisparse.tables import HotTables
from attnplug_sparse.hisparse.triton_rows import TILE_ROWS, WARPS, copy_rows, row_constants, word_of

_PROGRAMS = 128
"""Approximate grid size: as many programs as a large GPU runs concurrently."""
_MAX_COPIERS = 64
_PLANNING_WARPS = 16
_STAGING_PROGRAMS = 64
"""Most programs per request that stage a prefix: with 32 rows in flight each, more than the bus needs. A captured
prefill launches them for every request, whatever its prefix."""
_FEW_ROWS = 8
"""Rows in flight per program. A request misses about 200 rows per step, which are then all in flight."""


@triton.jit
def _new_rows(
    request, seq_lens, new_lens, max_new, RAGGED: tl.constexpr, BLOCK_REQUESTS: tl.constexpr
):  # fmt: skip
    """Return a request's first row in the batch, its number of new rows, and its length."""
    length = tl.load(seq_lens + request)
    if RAGGED:
        other = tl.arange(0, BLOCK_REQUESTS)
        first = tl.sum(tl.load(new_lens + other, mask=other < request, other=0))
        new = tl.load(new_lens + request)
    else:
        first = request * max_new
        new = tl.zeros_like(length) + max_new
    return first, new, length


@triton.jit
def _plan(
    out, positions, position_row, pages, held, hints, order, touched, sources, targets,
    first, new, start, first_slot, is_hot, part,
    COLUMNS: tl.constexpr, CHOSEN: tl.constexpr, NODES: tl.constexpr, PAGE_ROWS: tl.constexpr, RATIO: tl.constexpr,
    BLOCK_WANTED: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Find a request's selected rows, evict columns for the missing ones, and list these. Returns the number of missing
    rows, and of selected rows of earlier steps.

    Pointers to tables and lists are those of the request. Threads exchange values through them, so barriers separate
    stores from loads.
    """
    # ``part`` is 0, but the compiler cannot know that and assumes no alignment. So every thread owns single elements of
    # all tensors alike, and scattered loads and stores need no exchange between threads.
    place_in = tl.arange(0, BLOCK_COLUMNS) + part
    exists = place_in < tl.where(is_hot, COLUMNS, 0)
    column = tl.load(order + place_in, mask=exists, other=0).to(tl.int32)  # early: it depends on nothing
    number = tl.arange(0, BLOCK_WANTED) + part
    in_use = number < tl.where(new <= NODES, new * CHOSEN, 0)
    place = (first + number // CHOSEN).to(tl.int64) * position_row + number % CHOSEN
    position = tl.load(positions + place, mask=number < tl.where(is_hot, new * CHOSEN, 0), other=-1)
    last = position * RATIO + RATIO - 1  # token that completes the row
    is_old = (position >= 0) & (last < start)
    hint = tl.load(hints + position, mask=is_old, other=0).to(tl.int32)
    there = tl.load(held + hint, mask=is_old, other=-1)
    is_hit, is_missing = is_old & (there == position), is_old & (there != position)
    tl.store(touched + hint, 1, mask=is_hit)
    is_first = is_missing
    if NODES > 1:  # several queries may select the same row: the one left in the hints loads it
        tl.debug_barrier()
        tl.store(hints + position, number.to(tl.int16), mask=is_missing)
        tl.debug_barrier()
        is_first = is_missing & (tl.load(hints + position, mask=is_missing, other=-1).to(tl.int32) == number)
    rank = tl.cumsum(is_first.to(tl.int32), 0) - 1
    both = tl.sum(is_first.to(tl.int64) + (is_old.to(tl.int64) << 32))  # one sum is faster than two
    missing, old = both.to(tl.int32), both >> 32
    tl.debug_barrier()
    # New LRU order: unused columns that stay, columns replaced now, columns used now.
    is_free = exists & (tl.load(touched + column, mask=exists, other=1) == 0)
    free_before = tl.cumsum(is_free.to(tl.int32), 0) - is_free.to(tl.int32)
    free = tl.sum(is_free.to(tl.int32))
    replaced = free - missing
    when_free = tl.where(free_before < missing, replaced + free_before, free_before - missing)
    place_out = tl.where(is_free, when_free, free + place_in - free_before)
    tl.debug_barrier()
    tl.store(order + place_out, column.to(tl.int16), mask=exists)
    tl.store(touched + column, 0, mask=exists)
    tl.debug_barrier()
    taken = tl.load(order + replaced + rank, mask=is_first, other=0).to(tl.int32)
    tl.store(held + taken, position, mask=is_first)
    tl.store(hints + position, taken.to(tl.int16), mask=is_first)
    page = tl.load(pages + position // PAGE_ROWS, mask=is_first, other=0)
    tl.store(sources + rank, page * PAGE_ROWS + position % PAGE_ROWS, mask=is_first)
    tl.store(targets + rank, first_slot + taken, mask=is_first)
    if NODES > 1:
        tl.debug_barrier()
        taken = tl.load(hints + position, mask=is_missing, other=0).to(tl.int32)
    slot = first_slot + tl.where(is_hit, hint, taken)
    slot = tl.where(is_old, slot, tl.where(position >= 0, first + last - start, -1))
    target = (first + number // CHOSEN).to(tl.int64) * CHOSEN + number % CHOSEN
    tl.store(out + target, slot, mask=in_use)
    return missing, old


@triton.jit(do_not_specialize=["requests", "first_slot", "max_requests", "copiers", "max_new", "table_row"])
def _swap_in(
    out, positions, position_row, page_table, table_row, seq_lens, new_lens, max_new, table_rows, new_slots,
    held, hints, order, touched, sources, targets, ready, done, counters, host, device, requests, first_slot,
    max_requests, context, copiers, COLUMNS: tl.constexpr, CHOSEN: tl.constexpr,
    NODES: tl.constexpr, RAGGED: tl.constexpr, PAGE_ROWS: tl.constexpr, RATIO: tl.constexpr,
    WORDS: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, BLOCK_WANTED: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, BLOCK_REQUESTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program ``request`` plans. Program ``request + requests * i`` copies part i, new rows to the host first."""
    request, part = tl.program_id(0) % requests, tl.program_id(0) // requests
    first, new, length = _new_rows(request, seq_lens, new_lens, max_new, RAGGED, BLOCK_REQUESTS)
    if part == 0:
        row = tl.load(table_rows + request)
        is_live = (length > 0) & (new > 0) & (row >= 0) & (row < max_requests)
        row = tl.where(is_live, row, 0).to(tl.int64)
        missing, old = _plan(
            out, positions, position_row, page_table + request.to(tl.int64) * table_row, held + row * COLUMNS,
            hints + row * context, order + row * COLUMNS, touched + row * COLUMNS, sources + row * COLUMNS,
            targets + row * COLUMNS, first, new, length - new, first_slot + row.to(tl.int32) * COLUMNS,
            is_live & (new <= NODES), part,
            COLUMNS, CHOSEN, NODES, PAGE_ROWS, RATIO, BLOCK_WANTED, BLOCK_COLUMNS,
        )  # fmt: skip
        tl.debug_barrier()  # all lists are written before the request is marked ready
        tl.atomic_xchg(ready + request, missing + 1, sem="release")
        if is_live:
            tl.atomic_add(counters, old, sem="relaxed")
            tl.atomic_add(counters + 1, missing.to(tl.int64), sem="relaxed")
            written = length // RATIO - (length - new) // RATIO
            tl.atomic_add(counters + 3, written.to(tl.int64), sem="relaxed")
    else:
        row = tl.load(table_rows + request)
        row = tl.where((row >= 0) & (row < max_requests), row, 0).to(tl.int64)
        lane = tl.arange(0, ROWS)
        for tile in range(part - 1, tl.cdiv(new, ROWS), copiers):
            token = first + tile * ROWS + lane
            slot = tl.load(new_slots + token, mask=token < first + new, other=-1)
            copy_rows(host, slot, device, token, slot >= 0, WORDS, MAIN, REST)
        state = tl.atomic_add(ready + request, 0, sem="acquire")
        while state == 0:
            state = tl.atomic_add(ready + request, 0, sem="acquire")
        for tile in range(part - 1, tl.cdiv(state - 1, ROWS), copiers):
            entry = tile * ROWS + lane
            listed = entry < state - 1
            source = tl.load(sources + row * COLUMNS + entry, mask=listed, other=0)
            target = tl.load(targets + row * COLUMNS + entry, mask=listed, other=0)
            copy_rows(device, target, host, source, listed, WORDS, MAIN, REST)
        if tl.atomic_add(done + request, 1, sem="relaxed") == copiers - 1:  # for the next launch
            tl.store(done + request, 0)
            tl.store(ready + request, 0)


@triton.jit(do_not_specialize=["staging", "max_new", "window", "table_row"])
def _stage(
    page_table, table_row, seq_lens, new_lens, max_new, counters, host, device, staging, window,
    NODES: tl.constexpr, RAGGED: tl.constexpr, PAGE_ROWS: tl.constexpr, RATIO: tl.constexpr,
    WORDS: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, BLOCK_REQUESTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copy the ``window`` newest of a prefilling request's earlier rows to the staging area."""
    request, block = tl.program_id(1), tl.program_id(0)
    _, new, length = _new_rows(request, seq_lens, new_lens, max_new, RAGGED, BLOCK_REQUESTS)
    old = (length - new) // RATIO
    begin = tl.maximum(old - window, 0)
    if (new > NODES) & (begin + block * ROWS < old):
        for first in range(begin + block * ROWS, old, tl.num_programs(0) * ROWS):
            position = first + tl.arange(0, ROWS)
            there = position < old
            page = tl.load(page_table + request.to(tl.int64) * table_row + position // PAGE_ROWS, mask=there, other=0)
            slot = page * PAGE_ROWS + position % PAGE_ROWS
            copy_rows(device, staging + slot, host, slot, there, WORDS, MAIN, REST)
        if block == 0:
            tl.atomic_add(counters + 2, (old - begin).to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["requests", "staging", "max_new", "table_row"])
def _translate(
    out, positions, position_row, page_table, table_row, seq_lens, new_lens, max_new, requests, staging,
    CHOSEN: tl.constexpr, NODES: tl.constexpr, RAGGED: tl.constexpr, PAGE_ROWS: tl.constexpr, RATIO: tl.constexpr,
    BLOCK_CHOSEN: tl.constexpr, BLOCK_REQUESTS: tl.constexpr,
):  # fmt: skip
    """Translate the selection of one new row of a prefilling request to slots. Skips other rows."""
    token = tl.program_id(0)
    if RAGGED:
        other = tl.arange(0, BLOCK_REQUESTS)
        ends = tl.cumsum(tl.load(new_lens + other, mask=other < requests, other=0), 0)
        request = tl.sum(((ends <= token) & (other < requests)).to(tl.int32))
    else:
        request = token // max_new
    if request < requests:
        first, new, length = _new_rows(request, seq_lens, new_lens, max_new, RAGGED, BLOCK_REQUESTS)
        start = length - new
        place = tl.arange(0, BLOCK_CHOSEN)
        exists = place < tl.where(new > NODES, CHOSEN, 0)
        position = tl.load(positions + token.to(tl.int64) * position_row + place, mask=exists, other=-1)
        last = position * RATIO + RATIO - 1
        is_old = (position >= 0) & (last < start)
        page = tl.load(page_table + request.to(tl.int64) * table_row + position // PAGE_ROWS, mask=is_old, other=0)
        staged = staging + page * PAGE_ROWS + position % PAGE_ROWS
        slot = tl.where(is_old, staged, tl.where(position >= 0, first + last - start, -1))
        tl.store(out + token.to(tl.int64) * CHOSEN + place, slot, mask=exists)


def _block(size: int, threads: int) -> int:
    """Return a block size for ``size`` elements, at least one per thread, so that none are replicated."""
    return max(int(triton.next_power_of_2(size)), threads)


class TritonSwap:
    """Implements ``HiSparse.load_selected`` once the new rows are on the device."""

    def __init__(self, pool: HotPool, host: HostRows, tables: HotTables) -> None:
        self._pool, self._tables, self._page_rows, sizes = pool, tables, host.page_rows, pool.sizes
        nbytes, device = pool.cells.shape[1], pool.cells.device
        self._device, self._host = pool.cells.view(word_of(nbytes)), host.cells.view(word_of(nbytes))
        self._row = row_constants(nbytes)
        buffers = (sizes.max_requests, sizes.buffer_size)
        # Invariant between launches: ``touched``, ``ready`` and ``done`` are zero.
        self._touched: Tensor = torch.zeros(buffers, dtype=torch.int8, device=device)
        self._lists: Tensor = torch.zeros(2, *buffers, dtype=torch.int32, device=device)
        self._ready, self._done = torch.zeros(2, sizes.max_tokens, dtype=torch.int32, device=device).unbind()

    def swap_in(self, number: int, positions: Tensor, new_slots: LogicalSlots, geometry: Geometry) -> DeviceSlots:
        sizes, tables, requests = self._pool.sizes, self._tables, geometry.requests
        rows, chosen = positions.shape
        ragged = geometry.new_lens is not None
        if positions.stride(1) != 1:
            positions = positions.contiguous()
        # The slots of a decode may be a column of a table.
        slots, table_rows = host_slots(new_slots).slots.contiguous(), geometry.table_rows
        assert table_rows is not None
        # Rows without a request are padding.
        out = positions.new_full((rows, chosen), -1) if ragged else positions.new_empty(rows, chosen)
        new_lens = geometry.new_lens if geometry.new_lens is not None else geometry.seq_lens
        table, table_row = geometry.page_table, geometry.page_table.stride(0)
        batch = (table, table_row, geometry.seq_lens, new_lens, geometry.max_new)
        host, device = self._host[number], self._device
        shape = {
            "NODES": min(sizes.nodes, geometry.max_new),
            "RAGGED": ragged,
            "PAGE_ROWS": self._page_rows,
            "RATIO": sizes.ratio,
            # No constant may vary with the batch: one kernel serves all batches.
            "BLOCK_REQUESTS": _block(requests, 32) if ragged else 1,
        }
        if geometry.max_new > sizes.nodes:
            most = max(geometry.max_seq_len // sizes.ratio, 1)
            window = most if sizes.window is None else sizes.window - 1  # without the row of a token itself
            tiles = triton.cdiv(max(min(most, window), 1), TILE_ROWS)
            _stage[min(tiles, _STAGING_PROGRAMS), requests](
                *batch, tables.counters, host, device, self._pool.staging, window, **shape, **self._row, ROWS=TILE_ROWS,
                num_warps=WARPS,
            )  # fmt: skip
            _translate[(rows,)](
                out, positions, positions.stride(0), *batch, requests, self._pool.staging, **shape, CHOSEN=chosen,
                BLOCK_CHOSEN=_block(chosen, 32 * 4), num_warps=4,
            )  # fmt: skip
        copiers = max(1, min(_PROGRAMS // requests - 1, _MAX_COPIERS))
        _swap_in[(requests * (1 + copiers),)](
            out, positions, positions.stride(0), *batch, table_rows.contiguous(), slots,
            tables.held[number], tables.hints[number], tables.order[number], self._touched, self._lists[0],
            self._lists[1], self._ready, self._done, tables.counters, host, device, requests,
            self._pool.first_of(number), sizes.max_requests, sizes.max_positions, copiers, **shape, **self._row,
            COLUMNS=sizes.buffer_size, CHOSEN=chosen,
            BLOCK_WANTED=_block(shape["NODES"] * chosen, 32 * _PLANNING_WARPS),
            BLOCK_COLUMNS=_block(sizes.buffer_size, 32 * _PLANNING_WARPS), ROWS=_FEW_ROWS, num_warps=_PLANNING_WARPS,
        )  # fmt: skip
        return DeviceSlots(out)
