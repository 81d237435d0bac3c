"""Split-KV schedule of a batch, computed by one kernel, and the slot mapping of its new rows.

The unit of work is a *step*: ``STEP`` cache rows for one *tile*, up to ``TILE`` rows of (query token, head) of one
request. All steps of all tiles, request by request, form one line of work. Program p of the scheduled kernel takes the
p-th stretch of the line, and all stretches have the same length. So a long request is split among many programs, short
ones share one, and the load is even whatever the lengths. The grid size is fixed, as a captured graph needs. If a
stretch ends inside a tile, the next program continues that tile, and the partial results must be merged. A program
shares at most two tiles with others. If lengths differ much, every tile is preceded on the line by a lead of empty
steps, which accounts for the cost of starting a tile: a program with many short tiles gets fewer rows.

Every tile counts all cache rows of its request, including those that causality hides from it, so that a division finds
a position on the line. For a verify this costs nothing; in a prefill without prefix, early programs have half the work
of late ones.

With ``SPLIT``, tiles are split at absolute positions (``triton_splits``), for results that do not depend on the batch.
A program then takes the splits that start on its stretch, one after the other, and partial results of the tiles that
programs share are stored by split. A request is shared only if there is memory for all splits of its tiles, and never
with ``WHOLE``; otherwise a program takes the whole tiles that start on its stretch.

The kernel runs once per batch, for all layers. Every program sums over all requests itself, which costs less than
synchronising, and writes its own entry. It reads 4 to 8 bytes per request.

A scheduled kernel reads the schedule with ``begin_stretch``, ``rows_of_part`` and ``next_tile``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnplug_sparse.index.triton_splits import split_from, splits_before

HEADER = tl.constexpr(8)
"""Size of the header, in int32: length of a stretch, length of the line, lead of a tile."""
RECORD = tl.constexpr(8)
"""Size of a request's record, in int32 (one sector of 32 bytes): end of its work on the line, cache rows, cache rows
before its new ones, first new row, new rows, place of its first partial result (-1 for none), steps per tile."""
PROGRAM = tl.constexpr(16)
"""Size of a program's entry, in int32, after all records: record and index of its first request, start of its first
tile on the line, index of that tile, page of its first cache row, start and end of its work on the line. So a program
needs one dependent load before it requests rows, not a chain of four."""

UNEVEN = tl.constexpr(4)
"""Tiles have a lead if a batch's longest request is more than this many times as long as its shortest. For similar
lengths it would balance nothing and split tiles into more parts."""
_ROWS = 128
"""New rows per slot lookup."""


@triton.jit(
    do_not_specialize=["table_row", "table_column", "width", "requests", "rows", "programs", "least_steps", "most"],
    do_not_specialize_on_alignment=["page_table", "seq_lens", "new_lens"],
)
def _plan(
    page_table, table_row, table_column, width, seq_lens, new_lens, slots, numbers,
    requests, rows, programs, least_steps, part_cost, most,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, START: tl.constexpr,
    PAGE_SIZE: tl.constexpr, SPLIT: tl.constexpr, GROWS: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    me = tl.program_id(0)
    request = tl.arange(0, BLOCK)
    exists = request < requests
    asked = tl.load(seq_lens + request, mask=exists, other=0).to(tl.int32)
    # Lengths on the device are unchecked: whatever they are, no access may leave the batch.
    kv_len = tl.minimum(tl.maximum(asked, 0), width * PAGE_SIZE)
    if QUERIES:
        new = tl.where(exists, QUERIES, 0)
        begin = request * QUERIES
    else:
        new = tl.maximum(tl.load(new_lens + request, mask=exists, other=0).to(tl.int32), 0)
        begin = tl.minimum(tl.cumsum(new, 0) - new, rows)
        new = tl.minimum(new, rows - begin)

    tiles = (new * HEADS + TILE - 1) // TILE
    units = tl.maximum((kv_len + STEP - 1) // STEP, 1)  # even without cache rows there is an output to write
    has_work = tiles > 0
    longest = tl.max(tl.where(has_work, units, 0), 0)
    shortest = tl.min(tl.where(has_work, units, longest), 0)
    lead = tl.where(longest > UNEVEN * shortest, START, 0)
    end = tl.cumsum(tiles * (lead + units), 0)
    total = tl.sum(tiles * (lead + units), 0)
    stretch = tl.maximum((total + programs - 1) // programs, 1)
    # Dividing a tile of n steps by k costs n / k steps and k merges: least if a part has sqrt(n * cost) steps.
    worth = tl.ceil(tl.sqrt_rn(longest.to(tl.float32) * part_cost)).to(tl.int32)
    stretch = tl.maximum(tl.maximum(stretch, worth), least_steps)
    base = tl.full([BLOCK], -1, tl.int32)
    if SPLIT > 0 and not WHOLE:
        shared = has_work & ((end - tiles * (lead + units)) // stretch != (end - 1) // stretch)
        results = tl.where(shared, tiles * splits_before(units * STEP, SPLIT, GROWS), 0)
        base = tl.where(shared & (tl.cumsum(results, 0) <= most), tl.cumsum(results, 0) - results, -1)

    records = numbers + HEADER
    at, stop = me * stretch, tl.minimum(me * stretch + stretch, total)
    if SPLIT > 0:
        at = _from_split(at, end, tiles, lead, units, base, request, exists, total, STEP, SPLIT, GROWS)
        stop = _from_split(stop, end, tiles, lead, units, base, request, exists, total, STEP, SPLIT, GROWS)
    first = tl.sum(tl.where(exists & (end <= at), 1, 0), 0)
    its = request == first
    its_end, its_len = tl.sum(tl.where(its, end, 0), 0), tl.sum(tl.where(its, kv_len, 0), 0)
    its_base, its_units = tl.sum(tl.where(its, base, 0), 0), tl.sum(tl.where(its, units, 0), 0)
    its_start = its_end - tl.sum(tl.where(its, tiles, 0), 0) * (lead + its_units)
    tile = (at - its_start) // tl.maximum(lead + its_units, 1)
    tile_start = its_start + tile * (lead + its_units) + lead
    token = tl.maximum(at - tile_start, 0) * STEP
    its_page = page_table + first.to(tl.int64) * table_row + token // PAGE_SIZE * table_column
    mine = records + requests * RECORD + me * PROGRAM
    tl.store(mine, its_end)
    tl.store(mine + 1, its_len)
    tl.store(mine + 2, tl.sum(tl.where(its, asked - new, 0), 0))
    tl.store(mine + 3, tl.sum(tl.where(its, begin, 0), 0))
    tl.store(mine + 4, tl.sum(tl.where(its, new, 0), 0))
    tl.store(mine + 5, its_base)
    tl.store(mine + 6, its_units)
    tl.store(mine + 7, first)
    tl.store(mine + 8, tile_start)
    tl.store(mine + 9, tile)
    tl.store(mine + 10, tl.load(its_page, mask=(at < total) & (token < its_len), other=0).to(tl.int32))
    tl.store(mine + 11, tl.maximum(at, tile_start))
    tl.store(mine + 12, stop)
    if me == 0:
        tl.store(numbers, stretch)
        tl.store(numbers + 1, total)
        tl.store(numbers + 2, lead)
        record = records + request * RECORD
        tl.store(record, end, mask=exists)
        tl.store(record + 1, kv_len, mask=exists)
        tl.store(record + 2, asked - new, mask=exists)
        tl.store(record + 3, begin, mask=exists)
        tl.store(record + 4, new, mask=exists)
        tl.store(record + 5, base, mask=exists)
        tl.store(record + 6, units, mask=exists)

    for number in range(me, requests, programs):
        its_new = tl.sum(tl.where(request == number, new, 0), 0)
        its_begin = tl.sum(tl.where(request == number, begin, 0), 0)
        its_prefix = tl.sum(tl.where(request == number, asked - new, 0), 0)
        for at in range(0, its_new, ROWS):
            row = at + tl.arange(0, ROWS)
            position = its_prefix + row
            column = position // PAGE_SIZE
            placed = (row < its_new) & (position >= 0) & (column < width)
            entry = page_table + (tl.zeros([ROWS], tl.int64) + number) * table_row + column * table_column
            page = tl.load(entry, mask=placed, other=0).to(tl.int64)
            slot = tl.where(placed, page * PAGE_SIZE + position % PAGE_SIZE, -1)
            tl.store(slots + its_begin + row, slot, mask=row < its_new)
    if not QUERIES:
        for at in range(tl.sum(new, 0) + me * ROWS, rows, programs * ROWS):
            row = at + tl.arange(0, ROWS)
            tl.store(slots + row, tl.full([ROWS], -1, tl.int64), mask=row < rows)


@triton.jit
def _from_split(
    at, end, tiles, lead, units, base, request, exists, total, STEP: tl.constexpr, SPLIT: tl.constexpr,
    GROWS: tl.constexpr,
):  # fmt: skip
    """Return the start of the first split at or behind a position on the line, or of a tile if tiles are not shared."""
    its = request == tl.sum(tl.where(exists & (end <= at), 1, 0), 0)
    its_units, its_end = tl.sum(tl.where(its, units, 0), 0), tl.sum(tl.where(its, end, 0), 0)
    its_base = tl.sum(tl.where(its, base, 0), 0)
    length = tl.maximum(lead + its_units, 1)
    its_start = its_end - tl.sum(tl.where(its, tiles, 0), 0) * length
    tile_start = its_start + (at - its_start) // length * length + lead
    inside = tl.maximum(at - tile_start, 0)
    behind = tl.where(its_base < 0, its_units, split_from(inside * STEP, SPLIT, GROWS) // STEP)
    behind = tl.where(inside == 0, 0, tl.minimum(behind, its_units))
    return tl.where(at < total, tile_start + behind, total)


@triton.jit
def begin_stretch(numbers, requests):
    """Return a program's position on the line, the end of its work, and its first request's record."""
    me = tl.program_id(0)
    mine = numbers + HEADER + requests * RECORD + me * PROGRAM
    stretch, lead = tl.load(numbers), tl.load(numbers + 2)
    end, kv_len, prefix, begin = tl.load(mine), tl.load(mine + 1), tl.load(mine + 2), tl.load(mine + 3)
    new, stored_at, units, request = tl.load(mine + 4), tl.load(mine + 5), tl.load(mine + 6), tl.load(mine + 7)
    tile_start, tile, first_page = tl.load(mine + 8), tl.load(mine + 9), tl.load(mine + 10)
    at, stop = tl.load(mine + 11), tl.load(mine + 12)
    return (
        at, stop, stretch, lead, end, kv_len, prefix, begin, new, stored_at, units, request, tile_start, tile,
        first_page,
    )  # fmt: skip


@triton.jit
def rows_of_part(
    at, stop, kv_len, prefix, new, units, tile_start, tile,
    HEADS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, SPLIT: tl.constexpr, GROWS: tl.constexpr,
):  # fmt: skip
    """Return the steps of its tile that a program takes, and the cache rows of these that the last query sees.

    With ``SPLIT`` these are the steps of one split. Gluon kernels call this function, so it calls no other one.
    """
    piece = at - tile_start
    if SPLIT > 0:
        taken = SPLIT // STEP
        if GROWS:
            longer = (piece * STEP >= 16 * SPLIT).to(tl.int32) + (piece * STEP >= 48 * SPLIT).to(tl.int32)
            taken = taken << longer
        taken = tl.minimum(units - piece, taken)
    else:
        taken = tl.minimum(units - piece, stop - at)
    last_query = tl.minimum((tile * TILE + TILE - 1) // HEADS, new - 1)
    seen = tl.minimum(prefix + last_query + 1, kv_len)
    return taken, piece * STEP, tl.minimum((piece + taken) * STEP, seen)


@triton.jit
def next_tile(
    at, end, kv_len, prefix, begin, new, stored_at, units, request, numbers, lead, page_table, table_row, table_column,
    HEADS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Return the tile at or following a position on the line, given the request before it, and its record."""
    records = numbers + HEADER
    if at >= end:
        # The next request. Requests without new rows have no work and are skipped.
        request += 1
        while tl.load(records + request * RECORD) <= at:
            request += 1
        its = records + request * RECORD
        end, kv_len, prefix, begin = tl.load(its), tl.load(its + 1), tl.load(its + 2), tl.load(its + 3)
        new, stored_at, units = tl.load(its + 4), tl.load(its + 5), tl.load(its + 6)
    start = end - (new * HEADS + TILE - 1) // TILE * (lead + units)
    tile = (at - start) // (lead + units)
    tile_start = start + tile * (lead + units) + lead
    at = tl.maximum(at, tile_start)
    token = (at - tile_start) * STEP
    entry = page_table + request.to(tl.int64) * table_row + token // PAGE_SIZE * table_column
    first_page = tl.load(entry, mask=token < kv_len, other=0)
    return at, end, kv_len, prefix, begin, new, stored_at, units, request, tile_start, tile, first_page


def size_of_numbers(requests: int, programs: int) -> int:
    """Return the size of a schedule, in int32."""
    size: int = HEADER.value + RECORD.value * requests + PROGRAM.value * programs
    return size


def launch_plan(
    page_table: Tensor,
    seq_lens: Tensor,
    new_lens: Tensor | None,
    slots: Tensor,
    numbers: Tensor,
    *,
    queries: int,
    programs: int,
    least_steps: int,
    part_cost: float,
    heads: int,
    tile: int,
    step: int,
    start_steps: int,
    page_size: int,
    split: int = 0,
    grows: bool = False,
    whole: bool = False,
    most_results: int = 0,
) -> None:
    """Fill ``slots`` ``[rows]`` int64 and ``numbers`` int32, for ``queries`` new tokens of every request.

    If ``queries`` is 0, ``new_lens`` ``[requests]`` has their numbers. A slot is -1 if the page table has no page for
    the row, or no request has the row. ``split`` rows are the shortest split of ``triton_splits``, a multiple of
    ``step``, with memory for ``most_results`` partial results; 0 splits by the work of the batch. Does not synchronise
    and can be captured.
    """
    requests, width = page_table.shape
    block = max(triton.next_power_of_2(requests), 16)
    _plan[(programs,)](
        page_table,
        page_table.stride(0),
        page_table.stride(1),
        width,
        seq_lens,
        seq_lens if new_lens is None else new_lens,
        slots,
        numbers,
        requests,
        slots.shape[0],
        programs,
        least_steps,
        part_cost,
        most_results,
        QUERIES=queries,
        HEADS=heads,
        TILE=tile,
        STEP=step,
        START=start_steps,
        PAGE_SIZE=page_size,
        SPLIT=split,
        GROWS=grows,
        WHOLE=whole,
        BLOCK=block,
        ROWS=min(triton.next_power_of_2(max(queries, 1)), _ROWS) if queries else _ROWS,
        num_warps=min(max(block // 128, 1), 8),
    )
