"""The schedule of a batch, by one kernel: which program reads which rows of which request, and where new rows go.

The unit of work is a *step*: ``STEP`` cache rows for one *tile*, up to ``TILE`` rows of (query token, head) of one
request. All steps of all tiles, request by request, form one line of work. Program p of the scheduled kernel takes the
p-th stretch of it, and all stretches have the same length. So a long request is divided among many programs, short ones
share one, and the load is even whatever the lengths. The grid always has the same size, as a captured graph needs. If a
stretch ends within a tile, the next program continues that tile, and its parts must be merged. A program has at most
two tiles that it shares with others. If lengths differ much, every tile is preceded on the line by a lead of empty
steps, which stands for the cost of starting a tile: a program with many short tiles gets fewer rows.

Every tile counts with all cache rows of its request, even with those that causality hides from it. That way a division
finds a place on the line. For a verify this costs nothing; in a prefill without prefix, early programs have half the
work of late ones.

With ``PARTS`` the partition is batch-invariant: a tile is cut into at most that many parts, by its own request's length
alone. The line then consists of parts instead of steps, and no part is divided.

This runs once per batch, for all layers. Every program adds up all requests by itself, which costs less than
synchronising, and writes its own entry. It reads 4 to 8 bytes per request.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

HEADER = tl.constexpr(8)
"""Numbers before the records: the length of a program's stretch, the length of the line, and a tile's lead on it."""
RECORD = tl.constexpr(8)
"""Numbers of a request, 32 bytes in one sector: where its work ends, cache rows, cache rows before its new ones, first
new row, new rows, steps of a unit, units of a tile."""
PROGRAM = tl.constexpr(16)
"""Numbers of a program, after those of all requests: the record and the number of the request that it begins with,
where on the line its first tile starts, that tile's number, and the page of its first cache row. So a program waits for
one load before it requests rows, not for a chain of four."""

UNEVEN = tl.constexpr(4)
"""Tiles have a lead if a batch's longest request is this many times as long as its shortest. Among similar lengths it
would even out nothing, and cut tiles into more parts."""
_ROWS = 128
"""New rows whose slots are looked up at once."""


@triton.jit(do_not_specialize=["table_row", "table_column", "width", "requests", "rows", "programs", "least_steps"])
def _plan(
    page_table, table_row, table_column, width, seq_lens, new_lens, slots, numbers,
    requests, rows, programs, least_steps, part_cost,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, START: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    me = tl.program_id(0)
    request = tl.arange(0, BLOCK)
    exists = request < requests
    asked = tl.load(seq_lens + request, mask=exists, other=0).to(tl.int32)
    # Nobody checks lengths on the device: whatever they are, nothing outside the batch may be touched.
    kv_len = tl.minimum(tl.maximum(asked, 0), width * PAGE_SIZE)
    if QUERIES:
        new = tl.where(exists, QUERIES, 0)
        begin = request * QUERIES
    else:
        new = tl.maximum(tl.load(new_lens + request, mask=exists, other=0).to(tl.int32), 0)
        begin = tl.minimum(tl.cumsum(new, 0) - new, rows)
        new = tl.minimum(new, rows - begin)

    tiles = (new * HEADS + TILE - 1) // TILE
    steps = tl.maximum((kv_len + STEP - 1) // STEP, 1)  # even without cache rows there is an output to write
    unit = tl.full([BLOCK], 1, tl.int32)
    if PARTS:
        unit = tl.maximum((steps + PARTS - 1) // PARTS, least_steps)
    units = (steps + unit - 1) // unit
    has_work = tiles > 0
    longest = tl.max(tl.where(has_work, steps, 0), 0)
    shortest = tl.min(tl.where(has_work, steps, longest), 0)
    lead = tl.where(longest > UNEVEN * shortest, START, 0)
    end = tl.cumsum(tiles * (lead + units), 0)
    total = tl.sum(tiles * (lead + units), 0)
    stretch = tl.maximum((total + programs - 1) // programs, 1)
    if not PARTS:
        # Dividing a tile of n steps by k costs n / k steps and k merges: least if a part has sqrt(n * cost) steps.
        worth = tl.ceil(tl.sqrt_rn(longest.to(tl.float32) * part_cost)).to(tl.int32)
        stretch = tl.maximum(tl.maximum(stretch, worth), least_steps)

    records = numbers + HEADER
    first = tl.sum(tl.where(exists & (end <= me * stretch), 1, 0), 0)
    its = request == first
    its_end, its_len = tl.sum(tl.where(its, end, 0), 0), tl.sum(tl.where(its, kv_len, 0), 0)
    its_unit, its_units = tl.sum(tl.where(its, unit, 0), 0), tl.sum(tl.where(its, units, 0), 0)
    its_start = its_end - tl.sum(tl.where(its, tiles, 0), 0) * (lead + its_units)
    tile = (me * stretch - its_start) // tl.maximum(lead + its_units, 1)
    tile_start = its_start + tile * (lead + its_units) + lead
    token = tl.maximum(me * stretch - tile_start, 0) * its_unit * STEP
    its_page = page_table + first.to(tl.int64) * table_row + token // PAGE_SIZE * table_column
    mine = records + requests * RECORD + me * PROGRAM
    tl.store(mine, its_end)
    tl.store(mine + 1, its_len)
    tl.store(mine + 2, tl.sum(tl.where(its, asked - new, 0), 0))
    tl.store(mine + 3, tl.sum(tl.where(its, begin, 0), 0))
    tl.store(mine + 4, tl.sum(tl.where(its, new, 0), 0))
    tl.store(mine + 5, its_unit)
    tl.store(mine + 6, its_units)
    tl.store(mine + 7, first)
    tl.store(mine + 8, tile_start)
    tl.store(mine + 9, tile)
    tl.store(mine + 10, tl.load(its_page, mask=(me * stretch < total) & (token < its_len), other=0).to(tl.int32))
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
        tl.store(record + 5, unit, mask=exists)
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
def begin_stretch(numbers, requests):
    """What a program begins with: its place on the line, the end of its stretch, and its own record."""
    me = tl.program_id(0)
    mine = numbers + HEADER + requests * RECORD + me * PROGRAM
    stretch, line, lead = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    end, kv_len, prefix, begin = tl.load(mine), tl.load(mine + 1), tl.load(mine + 2), tl.load(mine + 3)
    new, unit, units, request = tl.load(mine + 4), tl.load(mine + 5), tl.load(mine + 6), tl.load(mine + 7)
    tile_start, tile, first_page = tl.load(mine + 8), tl.load(mine + 9), tl.load(mine + 10)
    at, stop = tl.maximum(me * stretch, tile_start), tl.minimum(me * stretch + stretch, line)
    return (
        at, stop, stretch, lead, end, kv_len, prefix, begin, new, unit, units, request, tile_start, tile, first_page,
    )  # fmt: skip


@triton.jit
def rows_of_part(
    at, stop, kv_len, prefix, new, unit, units, tile_start, tile,
    HEADS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, INVARIANT: tl.constexpr,
):  # fmt: skip
    """How many units of its tile a program takes at once, and their cache rows, as far as the tile's last row sees."""
    piece = at - tile_start
    taken = 1 if INVARIANT else tl.minimum(units - piece, stop - at)
    last_query = tl.minimum((tile * TILE + TILE - 1) // HEADS, new - 1)
    seen = tl.minimum(prefix + last_query + 1, kv_len)
    return taken, piece * unit * STEP, tl.minimum((piece + taken) * unit * STEP, seen)


@triton.jit
def next_tile(
    at, end, kv_len, prefix, begin, new, unit, units, request, numbers, lead, page_table, table_row, table_column,
    HEADS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """The tile at or after a place on the line, given the request before it: where it starts, and its record."""
    records = numbers + HEADER
    if at >= end:
        # The next request. Requests without new rows have no work and are skipped.
        request += 1
        while tl.load(records + request * RECORD) <= at:
            request += 1
        its = records + request * RECORD
        end, kv_len, prefix, begin = tl.load(its), tl.load(its + 1), tl.load(its + 2), tl.load(its + 3)
        new, unit, units = tl.load(its + 4), tl.load(its + 5), tl.load(its + 6)
    start = end - (new * HEADS + TILE - 1) // TILE * (lead + units)
    tile = (at - start) // (lead + units)
    tile_start = start + tile * (lead + units) + lead
    at = tl.maximum(at, tile_start)
    token = (at - tile_start) * unit * STEP
    entry = page_table + request.to(tl.int64) * table_row + token // PAGE_SIZE * table_column
    first_page = tl.load(entry, mask=token < kv_len, other=0)
    return at, end, kv_len, prefix, begin, new, unit, units, request, tile_start, tile, first_page


def size_of_numbers(requests: int, programs: int) -> int:
    """How many int32 a schedule takes."""
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
    parts: int,
) -> None:
    """Fill ``slots`` ``[rows]`` int64 and ``numbers`` int32, for ``queries`` new tokens of every request.

    If ``queries`` is 0, ``new_lens`` has the number. A slot is -1 where the page table has no place for the row, or no
    request has the row. Waits for nothing and can be captured.
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
        QUERIES=queries,
        HEADS=heads,
        TILE=tile,
        STEP=step,
        START=start_steps,
        PAGE_SIZE=page_size,
        PARTS=parts,
        BLOCK=block,
        ROWS=min(triton.next_power_of_2(max(queries, 1)), _ROWS) if queries else _ROWS,
        num_warps=min(max(block // 128, 1), 8),
    )
