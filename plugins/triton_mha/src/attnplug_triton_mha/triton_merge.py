"""Merge of split-KV partial results in Triton.

A partial result is the sum of its values with weights ``2 ** (logit - top)``, the sum of the weights, and ``top``, the
largest logit in base 2. Splits are merged in the order of their cache rows, so results are deterministic.

There are three kernels:

- ``merge`` is a separate kernel with one row and some columns per program. One SM reads about 110 GB/s from L2: 132
  parts of 8 rows with 256 columns are 1 MB, which takes 10 µs on one SM and 0.1 µs on all of them. A program loads all
  parts at once if registers allow, because dependent loads would wait for each other. On SM 90 it uses programmatic
  dependent launch.
- ``merge_parts`` is fused into the attention kernel: the program that finishes a tile last merges it. It is used if few
  tiles are split (``configurations.MAX_FUSED_PARTS``), because a launch would not pay off, and if requests have
  different numbers of rows, which ``merge`` does not support.
- ``merge_splits`` adds up splits at absolute positions (``triton_splits``) in order. It loads several at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_triton_mha.planner import SeparateMerge, SplitKVSchedule
from attnplug_triton_mha.scratch import SplitPartials
from attnplug_triton_mha.triton_splits import power_of_two

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)
_LOADED_SPLITS = 16
"""Splits that ``merge_splits`` loads before it adds the first."""
_FEW = 32
"""Maximum splits for which a specialized path loads only this many: loading 256 takes longer."""


@triton.jit
def load_sinks(sinks, head, live, SINKS: tl.constexpr):
    """Load the heads' sink logits in base 2, for ``finish``; zeros for layers without sinks."""
    if SINKS:
        return tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * LOG2_E
    return tl.zeros(head.shape, tl.float32)


@triton.jit
def store_partial(
    partials, partial_weights, totals, place, top, total, sums, live, ROWS: tl.constexpr, V_WIDTH: tl.constexpr
):  # fmt: skip
    """Store partial result ``place``. Each has ``ROWS`` rows; further rows of the tile are not live."""
    partial_row = place * ROWS + tl.arange(0, sums.shape[0])
    tl.store(partials + partial_row[:, None] * V_WIDTH + tl.arange(0, V_WIDTH)[None, :], sums, mask=live[:, None])
    tl.store(partial_weights + partial_row, top, mask=live)
    tl.store(totals + partial_row, total, mask=live)


@triton.jit
def finish(
    top, total, sums, out, lse, sink, value_scale, row, live, column,
    V_DIM: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Write some columns of some (token, head) rows. A row that sees no key gets zero, and log-sum-exp -inf."""
    base = tl.where(top == float("-inf"), 0.0, top)
    whole = total
    if SINKS:
        whole += tl.exp2(sink - base)
    result = sums / tl.where(whole == 0.0, 1.0, whole)[:, None]
    if SCALED:
        result *= value_scale
    written = live[:, None] & (column < V_DIM)[None, :]
    tl.store(out + row[:, None] * V_DIM + column[None, :], result.to(out.dtype.element_ty), mask=written)
    if LSE:
        log2 = tl.where(total == 0.0, float("-inf"), base + tl.log2(tl.where(total == 0.0, 1.0, total)))
        tl.store(lse + row, log2 * LN_2, mask=live)


@triton.jit
def merge_parts(
    values_at, tops_at, totals_at, sinks, head, parts, place, live,
    TILE: tl.constexpr, V_WIDTH: tl.constexpr, PARTS: tl.constexpr, SINKS: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Merge the parts of some rows; return ``top``, ``total`` and ``sums`` of each row, and its sink.

    Addresses are those of the rows' first parts. ``PARTS`` parts are loaded at once. Loads bypass the L1 cache, which
    is not coherent with writes of other SMs.
    """
    top = tl.full([values_at.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([values_at.shape[0]], tl.float32)
    sums = tl.zeros(values_at.shape, tl.float32)
    sink = total
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        there = (part < parts)[:, None] & live[None, :]
        weights = (part * TILE)[:, None]
        part_tops, part_totals = tops_at[None, :] + weights, totals_at[None, :] + weights
        part_values = values_at[None, :, :] + (part * (TILE * V_WIDTH))[:, None, None]
        if WAIT and place >= 0:
            # Wait for parts and sinks; the schedule, which addresses depend on, is older. No place is negative, but the
            # condition keeps the compiler from moving address computation behind the wait.
            gdc_wait()
        sink = load_sinks(sinks, head, live, SINKS)  # in each round, to wait together with the other loads
        tops = tl.load(part_tops, mask=there, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(part_totals, mask=there, other=0.0, cache_modifier=".cg")
        values = tl.load(part_values, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
        higher = tl.maximum(top, tl.max(tops, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        kept, factors = tl.exp2(top - base), tl.exp2(tops - base[None, :])
        total = total * kept + tl.sum(totals * factors, 0)
        sums = sums * kept[:, None] + tl.sum(values * factors[:, :, None], 0)
        top = higher
    return top, total, sums, sink


# As in ``attend``: integers that change from batch to batch are not specialized.
@triton.jit(do_not_specialize=["partial_rows", "queries"])
def merge(
    partials, partial_weights, partial_rows, tiles, out, lse, sinks, value_scale, queries,
    HEADS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, V_DIM: tl.constexpr, V_WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, PARTS: tl.constexpr, FEW: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
    SCALED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merge some columns of one (token, head) row if its tile is split. Every block of columns writes the same LSE."""
    if OVERLAP:
        gdc_launch_dependents()
    flat = tl.program_id(0)
    token, head = flat // HEADS, flat % HEADS
    its_row = token % queries * GROUP + head % GROUP
    tile = tiles + (token // queries * ((queries * GROUP + TILE - 1) // TILE) + its_row // TILE) * 2
    parts, place = tl.load(tile), tl.load(tile + 1)
    one = tl.arange(0, 1)
    live = one == 0
    at = ((head // GROUP).to(tl.int64) * (partial_rows // TILE) + place) * TILE + its_row % TILE + one
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    values_at, tops_at = partials + at[:, None] * V_WIDTH + column[None, :], partial_weights + at
    totals_at = tops_at + partial_rows.to(tl.int64) * (HEADS // GROUP)
    if parts > 1:
        if parts > FEW:
            top, total, sums, sink = merge_parts(
                values_at, tops_at, totals_at, sinks, head + one, parts, place, live,
                TILE, V_WIDTH, PARTS, SINKS, OVERLAP,
            )  # fmt: skip
        else:
            top, total, sums, sink = merge_parts(
                values_at, tops_at, totals_at, sinks, head + one, parts, place, live,
                TILE, V_WIDTH, FEW, SINKS, OVERLAP,
            )  # fmt: skip
        out_row = flat.to(tl.int64) + one
        finish(top, total, sums, out, lse, sink, value_scale, out_row, live, column, V_DIM, SINKS, LSE, SCALED)
    if OVERLAP:
        gdc_wait()  # always: the next kernel waits for this one only


@triton.jit(do_not_specialize=["partial_rows", "queries"])
def merge_splits(
    partials, partial_weights, partial_rows, tiles, out, lse, sinks, value_scale, queries,
    HEADS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, TILE_ROWS: tl.constexpr, V_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, LOADED: tl.constexpr, SINKS: tl.constexpr,
    LSE: tl.constexpr, SCALED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add up the splits of some columns of one (token, head) row, if its tile is divided (see ``triton_splits``).

    The first partial result contains the tile's first splits, and each of the others one."""
    if OVERLAP:
        gdc_launch_dependents()
    flat = tl.program_id(0)
    token, head = flat // HEADS, flat % HEADS
    its_row = token % queries * GROUP + head % GROUP
    tile = tiles + (token // queries * ((queries * GROUP + TILE - 1) // TILE) + its_row // TILE) * 4
    end, place, added = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if OVERLAP:
        gdc_wait()  # always: the next kernel waits for this one only
    if end > 0:
        one = tl.arange(0, 1)
        live = one == 0
        first = ((head // GROUP).to(tl.int64) * (partial_rows // TILE_ROWS) + place) * TILE_ROWS + its_row % TILE + one
        tops_at = partial_weights + first
        totals_at = tops_at + partial_rows.to(tl.int64) * (HEADS // GROUP)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        values_at = partials + first[:, None] * V_WIDTH + column[None, :]
        first_top, top = tl.load(tops_at), tl.load(tops_at)
        for start in range(added, end, BLOCK):
            number = start + tl.arange(0, BLOCK)[:, None]
            tops = tl.load(tops_at[None, :] + number * TILE_ROWS, mask=number < end, other=float("-inf"))
            top = tl.maximum(top, tl.max(tops, 0))
        base = tl.where(top == float("-inf"), 0.0, top)
        weight = power_of_two(first_top - base)
        total, sums = tl.load(totals_at) * weight, tl.load(values_at) * weight[:, None]
        for start in range(added, end, LOADED):
            tops, totals, values = (), (), ()
            for offset in tl.static_range(LOADED):
                number = start + offset + one
                there, behind = number < end, number * TILE_ROWS
                tops += (tl.load(tops_at + behind, mask=there, other=float("-inf")),)
                totals += (tl.load(totals_at + behind, mask=there, other=0.0),)
                values += (tl.load(values_at + (behind * V_WIDTH)[:, None], mask=there[:, None], other=0.0),)
            for offset in tl.static_range(LOADED):
                weight = power_of_two(tops[offset] - base)
                total += totals[offset] * weight
                sums += values[offset] * weight[:, None]
        sink = load_sinks(sinks, head + one, live, SINKS)
        out_row = flat.to(tl.int64) + one
        finish(top, total, sums, out, lse, sink, value_scale, out_row, live, column, V_DIM, SINKS, LSE, SCALED)


def launch_merge(
    partials: SplitPartials,
    out: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None,
    schedule: SplitKVSchedule,
    merging: SeparateMerge,
    value_scale: float,
    scaled: bool,
) -> None:
    """Merge the rows of ``out`` ``[rows, heads, v_dim]`` and ``lse`` whose tiles are split; others are not written.

    ``scaled``: multiply them by ``value_scale``.
    """
    configuration, shape, config = schedule.configuration, schedule.layers, merging.config
    heads = shape.kv_heads * shape.group
    if configuration.split:
        merge_splits[schedule.rows * heads, triton.cdiv(shape.v_dim, config.columns)](
            partials.values,
            partials.weights,
            schedule.partial_rows,
            merging.tiles,
            out,
            partials.weights if lse is None else lse,
            partials.weights if sinks is None else sinks,
            value_scale,
            schedule.queries,
            HEADS=heads,
            GROUP=shape.group,
            TILE=configuration.tile,
            TILE_ROWS=schedule.tile_rows,
            V_DIM=shape.v_dim,
            V_WIDTH=shape.v_width,
            COLUMNS=config.columns,
            BLOCK=config.parts,
            LOADED=_LOADED_SPLITS,
            SINKS=sinks is not None,
            LSE=lse is not None,
            SCALED=scaled,
            OVERLAP=configuration.overlap,
            num_warps=config.warps,
            **configuration.compiler_options,
            **({"launch_pdl": True} if configuration.overlap else {}),
        )
        return
    merge[schedule.rows * heads, triton.cdiv(shape.v_dim, config.columns)](
        partials.values,
        partials.weights,
        schedule.partial_rows,
        merging.tiles,
        out,
        partials.weights if lse is None else lse,
        partials.weights if sinks is None else sinks,
        value_scale,
        schedule.queries,
        HEADS=heads,
        GROUP=shape.group,
        TILE=configuration.tile,
        V_DIM=shape.v_dim,
        V_WIDTH=shape.v_width,
        COLUMNS=config.columns,
        PARTS=config.parts,
        FEW=min(config.parts, _FEW),
        SINKS=sinks is not None,
        LSE=lse is not None,
        SCALED=scaled,
        OVERLAP=configuration.overlap,
        num_warps=config.warps,
        **({"launch_pdl": True} if configuration.overlap else {}),
    )
