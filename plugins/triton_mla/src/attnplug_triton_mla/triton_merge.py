"""Merge of split-KV partial results in Triton.

A partial result is the sum of its cache rows with weights ``2 ** (logit - top)``, the sum of the weights, and ``top``,
the largest logit in base 2. Splits are merged in the order of their rows, so results are deterministic.

L2 bandwidth is the limit. A part of 16 rows is 32 KiB in float32, and one SM reads about 110 GB/s: 64 parts take 19 µs
on one SM, and 1 µs on 64 of them. So there is a separate kernel with one row and some columns per program (``_merge``).
It loads all parts at once if registers allow, because dependent loads would wait for each other. With few requests a
program has one or two warps. That kernel requires the same number of rows in every request. Otherwise the program that
finishes a tile last merges it at the end of the attention kernel (``merge_tile``).

``_merge_splits`` adds up splits at absolute positions in order. It loads several at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_sparse.index.triton_schedule import HEADER, RECORD
from attnplug_sparse.index.triton_splits import power_of_two, split_from, splits_before
from attnplug_triton_mla.planner import MLASchedule
from attnplug_triton_mla.scratch import MLAPartials

LN_2 = tl.constexpr(0.6931471805599453)
_SPLIT_TOPS, _SPLIT_COLUMNS = 64, 64
"""Splits whose largest logits ``_merge_splits`` loads at once, and columns per program of one warp."""
_MANY_ROWS = 512
"""Rows from which ``_merge_splits`` has one program each, since most of them have nothing to merge. Columns are
independent, so this changes no bit."""
_LOADED_SPLITS = 16
"""Splits that ``_merge_splits`` loads before it adds the first."""
_FEW = 32
"""Maximum splits for which a specialized path loads only this many: loading 128 takes longer."""


@triton.jit
def parts_of_tile(tile_start, units, stretch, programs):
    """Return a tile's number of splits, the slot of the first one, and the base slot of the others.

    A partial result is stored at its program's number. The first split of a tile is the last that its program starts,
    so the same program may also have another tile's last split. Therefore first splits are stored behind all others.
    """
    first = tile_start // stretch
    return (tile_start + units - 1) // stretch - first + 1, programs + first, first


@triton.jit
def slot_of_part(at, tile_start, programs):
    """Return the slot of the partial result that starts at ``at``: that of ``parts_of_tile``, without a division."""
    me = tl.program_id(0)
    return tl.where(at == tile_start, programs + me, me)


@triton.jit
def slot_of_split(at, taken, stop, start, tile_start, number, first, partial_slots, programs):
    """Return the slot of the partial result of split ``number`` of a tile whose first result is stored at ``first``.

    A program that has computed all splits of the tile so far adds them up in a slot of its own, and stores the last of
    these sums at ``first``. Other programs store each split.
    """
    own = partial_slots - programs + tl.program_id(0)
    return tl.where(start > tile_start, first + number, tl.where(at + taken < stop, own, first))


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
            # Wait for the parts; the schedule, which addresses depend on, is older. No slot is negative, but the
            # condition keeps the compiler from moving address computation behind the wait (Triton 3.9: only some).
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
    BLOCK: tl.constexpr, FEW: tl.constexpr, LSE: tl.constexpr, OVERLAP: tl.constexpr,
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
    parts, first, others = parts_of_tile(tile_start, units, stretch, programs)
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


@triton.jit(do_not_specialize=["partial_slots"])
def _merge_splits(
    partials, partial_weights, partial_slots, out, lse, numbers, out_scale,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, TILE_ROWS: tl.constexpr,
    STEP: tl.constexpr, SPLIT: tl.constexpr, GROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    LOADED: tl.constexpr, LSE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add up the splits of some columns of one row, if programs share its tile (see ``triton_splits``).

    The first partial result contains the tile's first splits, and each of the others one."""
    if OVERLAP:
        gdc_launch_dependents()
    flat = tl.program_id(0)
    request, row = flat // (QUERIES * HEADS), flat % (QUERIES * HEADS)
    stretch, lead = tl.load(numbers), tl.load(numbers + 2)
    record = numbers + HEADER + request * RECORD
    base, units = tl.load(record + 5), tl.load(record + 6)
    tiles: tl.constexpr = (QUERIES * HEADS + TILE - 1) // TILE
    tile = row // TILE
    tile_start = tl.load(record) - (tiles - tile) * (lead + units) + lead
    end = splits_before(units * STEP, SPLIT, GROWS)
    behind = split_from(((tile_start // stretch + 1) * stretch - tile_start) * STEP, SPLIT, GROWS)
    added = splits_before(behind, SPLIT, GROWS)
    if OVERLAP:
        gdc_wait()  # always: the next kernel waits for this one only
    if (base >= 0) & (added < end):
        one = tl.arange(0, 1)
        first = base + tile * end + one
        tops_at = partial_weights + (row % TILE) * partial_slots + first
        totals_at = tops_at + TILE_ROWS * partial_slots
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        values_at = partials + (first.to(tl.int64) * TILE_ROWS + row % TILE)[:, None] * RANK + column[None, :]
        first_top, top = tl.load(tops_at), tl.load(tops_at)
        for start in range(added, end, BLOCK):
            number = start + tl.arange(0, BLOCK)[:, None]
            top = tl.maximum(top, tl.max(tl.load(tops_at[None, :] + number, mask=number < end, other=float("-inf")), 0))
        highest = tl.where(top == float("-inf"), 0.0, top)
        weight = power_of_two(first_top - highest)
        total, merged = tl.load(totals_at) * weight, tl.load(values_at) * weight[:, None]
        for start in range(added, end, LOADED):
            tops, totals, values = (), (), ()
            for offset in tl.static_range(LOADED):
                number = start + offset + one
                there = number < end
                tops += (tl.load(tops_at + number, mask=there, other=float("-inf")),)
                totals += (tl.load(totals_at + number, mask=there, other=0.0),)
                place = (number.to(tl.int64) * (TILE_ROWS * RANK))[:, None]
                values += (tl.load(values_at + place, mask=there[:, None], other=0.0),)
            for offset in tl.static_range(LOADED):
                weight = power_of_two(tops[offset] - highest)
                total += totals[offset] * weight
                merged += values[offset] * weight[:, None]
        merged = merged * (out_scale / tl.where(total == 0.0, 1.0, total))[:, None]
        tl.store(out + flat.to(tl.int64) * RANK + column[None, :], merged.to(out.dtype.element_ty))
        if LSE and tl.program_id(1) == 0:
            tl.store(lse + flat + one, log2_sum(highest, total) * LN_2)


def launch_merge(
    partials: MLAPartials, out: Tensor, lse: Tensor | None, schedule: MLASchedule, out_scale: float
) -> None:
    """Merge the rows of ``out`` ``[rows, heads, rank]`` and ``lse`` whose tiles are split; others are not written."""
    _, heads, rank = out.shape
    shape, configuration = schedule.shape, schedule.configuration
    columns = min(configuration.merge_columns, rank)
    if configuration.split:
        columns = rank if shape.rows * heads >= _MANY_ROWS else min(_SPLIT_COLUMNS, rank)
        _merge_splits[(shape.rows * heads, rank // columns)](
            partials.values,
            partials.weights,
            partials.weights.shape[-1],
            out,
            partials.weights if lse is None else lse,
            schedule.numbers,
            out_scale,
            QUERIES=shape.queries,
            HEADS=heads,
            RANK=rank,
            TILE=configuration.tile,
            TILE_ROWS=schedule.tile_rows,
            STEP=configuration.step,
            SPLIT=configuration.split,
            GROWS=configuration.grows,
            COLUMNS=columns,
            BLOCK=_SPLIT_TOPS,
            LOADED=_LOADED_SPLITS,
            LSE=lse is not None,
            OVERLAP=configuration.overlap,
            num_warps=max(columns // 128, 1),
            **({"launch_pdl": True} if configuration.overlap else {}),
        )
        return
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
        LSE=lse is not None,
        OVERLAP=configuration.overlap,
        num_warps=configuration.merge_warps,
        **({"launch_pdl": True} if configuration.overlap else {}),
    )
