"""Triton merge of partial results: a tile's KV may be split among several programs.

A partial result is the sum of its cache rows with weights ``2 ** (logit - top)``, the sum of the weights, and ``top``,
the largest logit in base 2. Splits are merged in the order of their rows, so results are deterministic.

Bytes in L2 decide. A part of 16 rows is 32 KiB in float32, and one multiprocessor reads about 110 GB/s: 64 parts take
19 µs on one multiprocessor, and 1 µs on 64 of them. So a separate kernel merges parts, with one row and some columns
per program (``launch_merge``). It loads as many parts at once as there may be, since loads one after the other wait.
With few requests a program has one or two warps, which have few others to wait for. If requests have different numbers
of rows, which that kernel cannot divide, the program that finishes last merges at the end of the attention kernel
(``merge_tile``).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_sparse.index.triton_schedule import HEADER, RECORD
from attnplug_triton_mla.planner import MLASchedule
from attnplug_triton_mla.scratch import MLAPartials

LN_2 = tl.constexpr(0.6931471805599453)
_FEW = 32
"""Maximum splits for which a specialized path loads only this many: loading 128 takes longer."""


@triton.jit
def parts_of_tile(tile_start, units, stretch, programs, INVARIANT: tl.constexpr):
    """Return a tile's number of splits, the slot of the first one, and the base slot of the others.

    A partial result is stored at its program's number. The first split of a tile is the last that its program starts,
    so the same program may also have another tile's last split. Therefore first splits are stored behind all others.
    """
    if INVARIANT:
        return units, tile_start, tile_start
    first = tile_start // stretch
    return (tile_start + units - 1) // stretch - first + 1, programs + first, first


@triton.jit
def slot_of_part(at, tile_start, programs, INVARIANT: tl.constexpr):
    """Return the slot of the partial result that starts at ``at``: that of ``parts_of_tile``, without a division."""
    if INVARIANT:
        return at
    me = tl.program_id(0)
    return tl.where(at == tile_start, programs + me, me)


@triton.jit
def log2_sum(base, total):
    """Return ``base + log2(total)``; -inf if ``total`` is zero (C4)."""
    empty = total == 0.0
    return tl.where(empty, float("-inf"), base + tl.log2(tl.where(empty, 1.0, total)))


@triton.jit
def _top_of_part(at, live):
    return tl.load(at, mask=live, other=float("-inf"), cache_modifier=".cg")


@triton.jit
def merge_tile(
    partials, partial_weights, partial_slots, out_at, lse_at, live, parts, first, others, out_scale,
    RANK: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Merge all live rows of a tile in one program.

    It processes some columns at a time, because registers do not hold two partial results. Reads bypass the L1 cache,
    which is not coherent with other multiprocessors' writes.
    """
    row = tl.arange(0, TILE)
    weights_at = partial_weights + row * partial_slots
    top = tl.full([TILE], float("-inf"), tl.float32)
    for part in range(parts):
        slot = tl.where(part == 0, first, others + part).to(tl.int64)
        top = tl.maximum(top, _top_of_part(weights_at + slot, live))
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([TILE], tl.float32)
    for part in range(parts):
        slot = tl.where(part == 0, first, others + part).to(tl.int64)
        weight = tl.exp2(_top_of_part(weights_at + slot, live) - base)
        total += weight * tl.load(weights_at + TILE * partial_slots + slot, mask=live, other=0.0, cache_modifier=".cg")
    divisor = tl.where(total == 0.0, 1.0, total)
    for start in range(0, RANK, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        place = row[:, None] * RANK + column[None, :]
        merged = tl.zeros([TILE, COLUMNS], tl.float32)
        for part in range(parts):
            slot = tl.where(part == 0, first, others + part).to(tl.int64)
            weight = tl.exp2(_top_of_part(weights_at + slot, live) - base)
            values = tl.load(partials + slot * TILE * RANK + place, mask=live[:, None], other=0.0, cache_modifier=".cg")
            merged += values * weight[:, None]
        merged = merged * (out_scale / divisor)[:, None]
        tl.store(out_at[:, None] + column[None, :], merged.to(out_at.dtype.element_ty), mask=live[:, None])
    if LSE:
        tl.store(lse_at, log2_sum(base, total) * LN_2, mask=live)


@triton.jit
def _merge_row(
    partials, partial_weights, partial_slots, place, row, parts, first, others, out_scale, out_at, lse_at, writes_lse,
    RANK: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merge some columns of one row of a tile, ``BLOCK`` splits at a time."""
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    merged = tl.zeros([place.shape[0]], tl.float32)
    for start in range(0, parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        there = part < parts
        slot = tl.where(part == 0, first, others + part).to(tl.int64)
        values_at = partials + slot[:, None] * (TILE * RANK) + place[None, :]
        weights_at = partial_weights + row * partial_slots + slot
        if OVERLAP and first >= 0:
            # Wait for the parts, but not for the schedule, which says where they are. No slot is negative, but the
            # compiler does not know that, and so computes addresses before the wait (Triton 3.9 only some).
            gdc_wait()
        tops = tl.load(weights_at, mask=there, other=float("-inf"))
        totals = tl.load(weights_at + TILE * partial_slots, mask=there, other=0.0)
        values = tl.load(values_at, mask=there[:, None], other=0.0)
        higher = tl.maximum(top, tl.max(tops, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight, kept = tl.exp2(tops - base), tl.exp2(top - base)
        total = total * kept + tl.sum(weight * totals, 0)
        merged = merged * kept + tl.sum(values * weight[:, None], 0)
        top = higher
    merged = merged * (out_scale / tl.where(total == 0.0, 1.0, total))
    tl.store(out_at, merged.to(out_at.dtype.element_ty))
    if writes_lse:
        tl.store(lse_at, log2_sum(tl.where(top == float("-inf"), 0.0, top), total) * LN_2)


@triton.jit(do_not_specialize=["programs", "partial_slots"])
def _merge(
    partials, partial_weights, partial_slots, out, lse, numbers, programs, out_scale,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, FEW: tl.constexpr, INVARIANT: tl.constexpr, LSE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merge some columns of one row."""
    if OVERLAP:
        gdc_launch_dependents()
    flat = tl.program_id(0)
    request, row = flat // (QUERIES * HEADS), flat % (QUERIES * HEADS)
    stretch, lead = tl.load(numbers), tl.load(numbers + 2)
    record = numbers + HEADER + request * RECORD
    units = tl.load(record + 6)
    tiles: tl.constexpr = (QUERIES * HEADS + TILE - 1) // TILE
    tile_start = tl.load(record) - (tiles - row // TILE) * (lead + units) + lead
    parts, first, others = parts_of_tile(tile_start, units, stretch, programs, INVARIANT)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = (row % TILE) * RANK + column
    out_at, lse_at = out + flat.to(tl.int64) * RANK + column, lse + flat
    writes_lse = LSE and tl.program_id(1) == 0
    if parts > FEW:
        _merge_row(
            partials, partial_weights, partial_slots, place, row % TILE, parts, first, others, out_scale,
            out_at, lse_at, writes_lse, RANK, TILE, BLOCK, OVERLAP,
        )  # fmt: skip
    elif parts > 1:
        _merge_row(
            partials, partial_weights, partial_slots, place, row % TILE, parts, first, others, out_scale,
            out_at, lse_at, writes_lse, RANK, TILE, FEW, OVERLAP,
        )  # fmt: skip
    if OVERLAP:
        gdc_wait()  # always: the next kernel waits for this one only


def launch_merge(
    partials: MLAPartials, out: Tensor, lse: Tensor | None, schedule: MLASchedule, out_scale: float
) -> None:
    """Merge the rows of ``out`` ``[rows, heads, rank]`` and ``lse`` whose tiles are split; others are not written."""
    _, heads, rank = out.shape
    shape, configuration = schedule.shape, schedule.configuration
    columns = min(configuration.merge_columns, rank)
    _merge[(shape.rows * heads, rank // columns)](
        partials.values,
        partials.weights,
        partials.weights.shape[-1],
        out,
        partials.weights if lse is None else lse,
        schedule.numbers,
        schedule.programs,
        out_scale,
        QUERIES=shape.queries,
        HEADS=heads,
        RANK=rank,
        TILE=configuration.tile,
        COLUMNS=columns,
        BLOCK=configuration.merge_parts,
        FEW=min(configuration.merge_parts, _FEW),
        INVARIANT=shape.invariant,
        LSE=lse is not None,
        OVERLAP=configuration.overlap,
        num_warps=configuration.merge_warps,
        **({"launch_pdl": True} if configuration.overlap else {}),
    )
