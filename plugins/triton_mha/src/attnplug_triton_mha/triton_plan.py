"""Triton kernel that computes a batch's split-KV schedule and write slots on the device.

A *tile* is up to ``TILE`` rows of (query token, head of one KV head's group) of one request. A *step* is ``STEP`` cache
rows for one tile. A tile's steps are divided into *parts* of equal length, and each part is one program for each KV
head. The length of a part follows from the total work of the batch, which only the device knows, divided by ``target``
programs. So one long request is divided among all multiprocessors, and a batch of many short requests is not divided at
all. There are at most ``tiles + target`` programs. The grid has this size; programs without work exit at once.

All tiles of a request are planned with the length of its longest one, so that a division finds a program's tile. Parts
that a causal mask hides entirely have no steps. In a layer with a window, a tile begins at its first query's window.

With ``SPLIT``, tiles are split at absolute positions (``triton_splits``). A part then consists of the splits that start
within its steps, possibly none, and tiles are divided only if all requests have equally many new tokens: otherwise a
program computes a whole tile, because partial results of a prefill would take gigabytes.

It runs once per batch for all layers of one shape and window. Every program sums over all requests, which costs less
than a synchronization, and writes its own record. It reads 4 to 8 bytes per request.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnplug_triton_mha.triton_splits import SHORT_SPLITS, split_from, splits_before

RECORD = tl.constexpr(16)
"""Integers of a program's record (64 bytes): request, new tokens, first query row, prefix length, KV length, tile,
first and end cache row of the part, part, parts of the tile, index of the tile's first partial result, page of the
part's first cache row. A program without work has no new tokens."""
RECORD_NUMBERS = 16
TILE_NUMBERS = 2
"""Integers of a tile for the merge kernel: its parts, and the index of its first partial result."""
SPLIT_TILE_NUMBERS = 4
"""Integers of a tile with ``SPLIT``: number of its splits, 0 if it is not divided; index of its first partial result;
number of splits that the first result contains."""
_MAX_PAIRS = 8192
"""Maximum (new row, request) pairs that a program compares at once to find the request of a row."""
_MAX_ROWS = 128
_VARIED = ("table_row", "table_column", "width", "requests", "rows", "queries", "target", "programs", "most_results")


@triton.jit(do_not_specialize=_VARIED)
def _plan(
    page_table, table_row, table_column, width, seq_lens, new_lens, slots, records, merged,
    requests, rows, queries, target, programs, most_results,
    UNIFORM: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr, SLOTS: tl.constexpr, MERGED: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    me = tl.program_id(0)
    SHORT: tl.constexpr = 0 if WINDOW else SHORT_SPLITS
    request = tl.arange(0, BLOCK)
    exists = request < requests
    asked = tl.load(seq_lens + request, mask=exists, other=0).to(tl.int32)
    # Device lengths are not validated: whatever they are, nothing outside the batch may be accessed.
    kv_len = tl.minimum(tl.maximum(asked, 0), width * PAGE_SIZE)
    if UNIFORM:
        new = tl.where(exists, queries, 0)
        begin = request * queries
    else:
        new = tl.maximum(tl.load(new_lens + request, mask=exists, other=0).to(tl.int32), 0)
        begin = tl.minimum(tl.cumsum(new, 0) - new, rows)
        new = tl.minimum(new, rows - begin)
    prefix = asked - new

    if me < programs:
        tiles = (new * GROUP + TILE - 1) // TILE
        steps = (kv_len + STEP - 1) // STEP
        if WINDOW > 0:
            # A tile's queries are this many at most, and the window of its first one may begin within a step.
            steps = tl.minimum(steps, (WINDOW + (TILE + GROUP - 2) // GROUP + (SPLIT or STEP) - 1) // STEP + 1)
        steps = tl.maximum(steps, 1)  # even without cache rows there is an output to write
        total = tl.sum(tiles.to(tl.int64) * steps, 0)
        most = tl.maximum((total + target - 1) // target, 1).to(tl.int32)
        if SPLIT > 0:
            most = tl.where(steps <= SPLIT // STEP, steps, most) if UNIFORM else steps  # else there is nothing to merge
        parts = (steps + most - 1) // most
        unit = (steps + parts - 1) // parts
        parts = (steps + unit - 1) // unit
        partial_results = parts
        if SPLIT > 0:
            partial_results = splits_before(steps * STEP, SPLIT, SHORT)
        partial_end = tl.cumsum(tl.where(parts > 1, tiles * partial_results, 0), 0)
        if SPLIT > 0:
            parts = tl.where(partial_end <= most_results, parts, 1)
            unit = tl.where(parts > 1, unit, steps)
        end = tl.cumsum(tiles * parts, 0)

        owner = tl.sum(tl.where(exists & (end <= me), 1, 0), 0)
        its = request == owner  # all false if there are fewer splits
        its_parts = tl.maximum(tl.sum(tl.where(its, parts, 0), 0), 1)
        its_new = tl.sum(tl.where(its, new, 0), 0)
        its_prefix = tl.sum(tl.where(its, prefix, 0), 0)
        its_len = tl.sum(tl.where(its, kv_len, 0), 0)
        its_unit = tl.sum(tl.where(its, unit, 0), 0)
        its_tiles = tl.sum(tl.where(its, tiles, 0), 0)
        place = me - tl.sum(tl.where(its, end - tiles * parts, 0), 0)
        number, part = place // its_parts, place % its_parts
        tile = its_tiles - 1 - number  # the last tiles see most: they begin first
        first_query = tile * TILE // GROUP
        last_query = tl.minimum((tile * TILE + TILE - 1) // GROUP, its_new - 1)
        tile_end = tl.minimum(its_prefix + last_query + 1, its_len)
        start = part * its_unit * STEP
        tile_begin = 0
        if WINDOW > 0:
            tile_begin = tl.maximum(its_prefix + first_query - WINDOW + 1, 0) // (SPLIT or STEP) * (SPLIT or STEP)
            start += tile_begin
        stop = start + its_unit * STEP
        its_results = its_parts
        if SPLIT > 0:
            start, stop = split_from(start, SPLIT, SHORT), split_from(stop, SPLIT, SHORT)
            its_results = tl.sum(tl.where(its, partial_results, 0), 0)
        stop = tl.minimum(stop, tile_end)
        partial = tl.sum(tl.where(its & (parts > 1), partial_end - tiles * partial_results, 0), 0)
        partial += number * its_results
        page_at = page_table + owner.to(tl.int64) * table_row + start // PAGE_SIZE * table_column
        page = tl.load(page_at, mask=(its_new > 0) & (start < stop), other=0)
        mine = records + me * RECORD
        tl.store(mine, owner)
        tl.store(mine + 1, its_new)
        tl.store(mine + 2, tl.sum(tl.where(its, begin, 0), 0))
        tl.store(mine + 3, its_prefix)
        tl.store(mine + 4, its_len)
        tl.store(mine + 5, tile)
        tl.store(mine + 6, start)
        tl.store(mine + 7, stop)
        tl.store(mine + 8, part)
        tl.store(mine + 9, its_parts)
        tl.store(mine + 10, partial)
        tl.store(mine + 11, page)
        if MERGED:
            # All requests have equally many tiles. The program of a tile's first part writes for all of its parts.
            first = (its_new > 0) & (part == 0)
            if SPLIT > 0:
                its_tile = merged + (owner * its_tiles + tile) * 4
                before = splits_before(tile_begin, SPLIT, SHORT)
                count = tl.maximum(splits_before(tile_end, SPLIT, SHORT) - before, 1)
                added = tl.maximum(splits_before(stop, SPLIT, SHORT) - before, 1)
                tl.store(its_tile, tl.where(its_parts > 1, count, 0), mask=first)
                tl.store(its_tile + 1, partial, mask=first)
                tl.store(its_tile + 2, added, mask=first)
            else:
                its_tile = merged + (owner * its_tiles + tile) * 2
                tl.store(its_tile, its_parts, mask=first)
                tl.store(its_tile + 1, partial, mask=first)

    if SLOTS and me * ROWS < rows:
        row = me * ROWS + tl.arange(0, ROWS)
        if UNIFORM:
            whose = row // queries
            position = tl.load(seq_lens + whose, mask=row < rows, other=0).to(tl.int32) - queries + row % queries
        else:
            past = tl.where(exists, begin + new, rows)
            whose = tl.sum((past[None, :] <= row[:, None]).to(tl.int32), 1)
            shift = tl.where(whose[:, None] == request[None, :], (prefix - begin)[None, :], 0)
            position = tl.sum(shift, 1) + row
        column = position // PAGE_SIZE
        placed = (row < rows) & (whose < requests) & (position >= 0) & (column < width)
        page = tl.load(page_table + whose.to(tl.int64) * table_row + column * table_column, mask=placed, other=0)
        slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        tl.store(slots + row, tl.where(placed, slot, -1), mask=row < rows)


def launch_plan(
    page_table: Tensor,
    seq_lens: Tensor,
    new_lens: Tensor | None,
    slots: Tensor | None,
    records: Tensor,
    merged: Tensor | None,
    *,
    rows: int,
    queries: int,
    target: int,
    group: int,
    tile: int,
    step: int,
    window: int,
    page_size: int,
    split: int = 0,
    most_results: int = 0,
) -> None:
    """Fill ``records`` ``[programs, RECORD_NUMBERS]`` int32, ``slots`` ``[rows]`` int64 if they are given, and
    ``merged`` ``[tiles, TILE_NUMBERS]`` int32 of all requests' tiles if it is, for requests of equally many new tokens.

    ``queries`` is the number of new tokens of every request; ``new_lens`` is read if it is 0. ``window`` is 0 without
    one. ``split`` is the shortest split of ``triton_splits``, a multiple of ``step``; 0 splits by the work of the
    batch. With it, ``merged`` is ``[tiles, SPLIT_TILE_NUMBERS]``, and tiles are divided only as far as there is memory
    for ``most_results`` partial results per KV head.
    """
    requests, width = page_table.shape
    block = triton.next_power_of_2(requests)
    at_once = _MAX_ROWS if queries else max(1, min(_MAX_ROWS, _MAX_PAIRS // block))
    grid = (max(records.shape[0], triton.cdiv(rows, at_once) if slots is not None else 0),)
    _plan[grid](
        page_table,
        page_table.stride(0),
        page_table.stride(1),
        width,
        seq_lens,
        seq_lens if new_lens is None else new_lens,
        records if slots is None else slots,
        records,
        records if merged is None else merged,
        requests,
        rows,
        queries,
        target,
        records.shape[0],
        most_results,
        UNIFORM=queries > 0,
        GROUP=group,
        TILE=tile,
        STEP=step,
        WINDOW=window,
        PAGE_SIZE=page_size,
        SLOTS=slots is not None,
        MERGED=merged is not None,
        BLOCK=block,
        ROWS=at_once,
        SPLIT=split,
        num_warps=min(max(block // 128, 1), 8),
    )
