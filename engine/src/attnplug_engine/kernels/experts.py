"""MLPs of routed experts in a few kernels. Launches do not depend on the number of tokens per expert.

A *pair* is a token and one of its experts, numbered ``token * k + place``. A program handles a block of pairs of one
expert and some of the expert's columns. ``_sort_pairs`` sorts the pairs by expert, ``_up_projection`` computes their
inner rows, ``_down_projection`` the outer ones, and ``_combine`` the sum over a token's experts, in the order in which
they were chosen. With very few tokens each pair is computed separately, by ``_up_one`` and by ``_down_one``, which also
sums: matrix-vector products, bound by memory bandwidth. A pair's result does not depend on the other pairs in its
block. The tile is chosen by the number of tokens; with ``invariant`` all tiles give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_engine.kernels import launch_options, one_instruction, shared_memory

MAX_RANKED_PAIRS = 4096
"""Most pairs that one kernel sorts, by comparing them all; torch sorts more."""


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """Tile of a program: pairs × columns, in steps of ``depth`` along the summed dimension."""

    pairs: int
    columns: int
    depth: int
    warps: int
    stages: int = 1
    flipped: bool = False
    """True if the weights are the first factor. The number of pairs then does not change the tensor-core instruction of
    a sum: on SM 90 it is ``wgmma`` for 64 columns or more, and ``mma`` for fewer rows of the first factor."""


@triton.jit(do_not_specialize=["count"])
def _sort_pairs(topk_ids, order, offsets, count, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
          EARLY: tl.constexpr):  # fmt: skip
    """Sort pairs by expert, and find where each expert's pairs begin: both by counting smaller ones."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    mine = tl.load(topk_ids + place, mask=place < count, other=0)
    rank = tl.zeros([BLOCK], tl.int32)
    below = tl.zeros([BLOCK], tl.int32)
    for start in range(0, count, CHUNK):
        every = start + tl.arange(0, CHUNK)
        other = tl.load(topk_ids + every, mask=every < count, other=EXPERTS)[None, :]
        earlier = (other == mine[:, None]) & (every[None, :] < place[:, None])
        rank += tl.sum(((other < mine[:, None]) | earlier).to(tl.int32), 1)
        below += tl.sum((other < place[:, None]).to(tl.int32), 1)  # here ``place`` is an expert's number
    tl.store(order + rank, place, mask=place < count)
    tl.store(offsets + place, below, mask=place <= EXPERTS)


@triton.jit
def _block(order, offsets, block, EXPERTS: tl.constexpr, PAIRS: tl.constexpr, BOUNDS: tl.constexpr):
    """Return a block's expert, its pairs ``[PAIRS]``, a mask of existing ones, and True if the block exists."""
    every = tl.arange(0, BOUNDS)
    start = tl.load(offsets + every, mask=every < EXPERTS, other=0)
    stop = tl.load(offsets + every + 1, mask=every < EXPERTS, other=0)
    blocks = (stop - start + PAIRS - 1) // PAIRS
    last = tl.cumsum(blocks, 0)
    expert = tl.sum((last <= block).to(tl.int32), 0)
    here = every == expert
    place = tl.sum(tl.where(here, start + (block - last + blocks) * PAIRS, 0), 0) + tl.arange(0, PAIRS)
    exists = place < tl.sum(tl.where(here, stop, 0), 0)
    pairs = tl.load(order + place, mask=exists, other=0)
    return expert.to(tl.int64), pairs.to(tl.int64), exists, expert < EXPERTS


@triton.jit
def _load(at, inside, WHOLE: tl.constexpr):
    return tl.load(at) if WHOLE else tl.load(at, mask=inside, other=0.0)


@triton.jit
def _zeros(PAIRS: tl.constexpr, COLUMNS: tl.constexpr, FLIPPED: tl.constexpr):
    return tl.zeros([COLUMNS, PAIRS], tl.float32) if FLIPPED else tl.zeros([PAIRS, COLUMNS], tl.float32)


@triton.jit
def _dot(rows, columns, total, FLIPPED: tl.constexpr):
    """Add ``rows [pairs, depth]`` times ``columns [depth, columns]`` to ``total``, which is transposed if
    ``FLIPPED``."""
    if FLIPPED:
        total = tl.dot(tl.trans(columns), tl.trans(rows), total, input_precision="ieee")
    else:
        total = tl.dot(rows, columns, total, input_precision="ieee")
    return total


@triton.jit
def _activated(
    first, second, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, OFFSET: tl.constexpr
):  # fmt: skip
    """``silu(gate) * up``, squared ReLU, or with a ``LIMIT`` the clipped gate of ``ClippedGate``."""
    if LIMIT > 0:
        gate = tl.minimum(first, LIMIT)
        up = tl.minimum(tl.maximum(second, -LIMIT), LIMIT)
        result = gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + OFFSET)
    elif GATED:
        result = first / (1.0 + tl.exp(-first)) * second
    else:
        positive = tl.maximum(first, 0.0)
        result = positive * positive
    return result


@triton.jit
def _added(
    total, token, column, exists, shared, shared_row, gate, gate_row, onto, onto_row,
    SHARED: tl.constexpr, ONTO: tl.constexpr,
):  # fmt: skip
    """Add a token's weighted shared expert and its residual to its sum."""
    if SHARED:
        share = 1.0 / (1.0 + tl.exp(-tl.load(gate + token * gate_row)))
        total += share * tl.load(shared + token * shared_row + column, mask=exists, other=0.0).to(tl.float32)
    if ONTO:
        total += tl.load(onto + token * onto_row + column, mask=exists, other=0.0).to(tl.float32)
    return total


@triton.jit
def _up_projection(
    x, x_row, weight, weight_bias, inner, order, offsets,
    PER_TOKEN: tl.constexpr, EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr,
    PAIRS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BOUNDS: tl.constexpr, FLIPPED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Compute ``[pairs, WIDTH]`` of ``x [tokens, HIDDEN]`` and ``weight [EXPERTS, 1 or 2 * WIDTH, HIDDEN]``, with
    ``BIAS`` also of ``weight_bias [EXPERTS, 1 or 2 * WIDTH]``."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()  # not earlier: the next kernel reads the chosen experts before it waits
    expert, pairs, exists, has_work = _block(order, offsets, tl.program_id(1), EXPERTS, PAIRS, BOUNDS)
    if not has_work:
        return
    WHOLE: tl.constexpr = HIDDEN % DEPTH == 0
    PARTS: tl.constexpr = 2 if GATED else 1
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    rows_at = x + (pairs // PER_TOKEN)[:, None] * x_row + depth[None, :]
    first_at = weight + expert * (PARTS * WIDTH * HIDDEN)
    first_at += tl.minimum(column, WIDTH - 1)[None, :] * HIDDEN + depth[:, None]
    first = _zeros(PAIRS, COLUMNS, FLIPPED)
    second = _zeros(PAIRS, COLUMNS, FLIPPED)
    for start in range(0, HIDDEN, DEPTH):
        inside = start + depth < HIDDEN
        rows = _load(rows_at + start, inside[None, :], WHOLE)
        first = _dot(rows, _load(first_at + start, inside[:, None], WHOLE), first, FLIPPED)
        if GATED:
            columns = _load(first_at + WIDTH * HIDDEN + start, inside[:, None], WHOLE)
            second = _dot(rows, columns, second, FLIPPED)
    if FLIPPED:
        first, second = tl.trans(first), tl.trans(second)
    if BIAS:
        bias_at = weight_bias + expert * (PARTS * WIDTH) + tl.minimum(column, WIDTH - 1)
        first += tl.load(bias_at).to(tl.float32)[None, :]
        if GATED:
            second += tl.load(bias_at + WIDTH).to(tl.float32)[None, :]
    result = _activated(first, second, GATED, LIMIT, ALPHA, OFFSET).to(inner.dtype.element_ty)
    mask = exists[:, None] & (column < WIDTH)[None, :]
    tl.store(inner + pairs[:, None] * WIDTH + column[None, :], result, mask=mask)


@triton.jit
def _inner(
    x, weight, bias, column, GAP: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Compute some columns of one row. ``GAP`` is the distance in ``weight`` between its two halves."""
    WHOLE: tl.constexpr = HIDDEN % DEPTH == 0
    depth = tl.arange(0, DEPTH)
    first_at = weight + tl.minimum(column, WIDTH - 1)[:, None] * HIDDEN + depth[None, :]
    first = tl.zeros([COLUMNS, DEPTH], tl.float32)
    second = tl.zeros([COLUMNS, DEPTH], tl.float32)
    for start in tl.static_range(0, HIDDEN, DEPTH):
        inside = start + depth < HIDDEN
        columns = _load(first_at + start, inside[None, :], WHOLE).to(tl.float32)
        if WAIT and start == 0:
            gdc_wait()
            gdc_launch_dependents()
        row = _load(x + start + depth, inside, WHOLE).to(tl.float32)[None, :]
        first += columns * row
        if GATED:
            second += _load(first_at + GAP + start, inside[None, :], WHOLE).to(tl.float32) * row
    gate, up = tl.sum(first, 1), tl.sum(second, 1)
    if BIAS:
        bias_at = bias + tl.minimum(column, WIDTH - 1)
        gate += tl.load(bias_at).to(tl.float32)
        if GATED:
            up += tl.load(bias_at + WIDTH).to(tl.float32)
    return _activated(gate, up, GATED, LIMIT, ALPHA, OFFSET)


@triton.jit
def _up_one(
    x, x_row, weight, weight_bias, every_weight, inner, topk_ids,
    PER_TOKEN: tl.constexpr, EVERY: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Like ``_up_projection``, for one pair. A token's first ``EVERY`` pairs are with shared experts: parts of
    ``every_weight [1 or 2 * EVERY * WIDTH, HIDDEN]``, which can be read before experts are chosen."""
    PARTS: tl.constexpr = 2 if GATED else 1
    pair = tl.program_id(1).to(tl.int64)
    token, place = pair // (EVERY + PER_TOKEN), pair % (EVERY + PER_TOKEN)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = inner + pair * WIDTH + column
    row = x + token * x_row
    if place < EVERY:
        part = every_weight + place * (WIDTH * HIDDEN)
        result = _inner(
            row, part, part, column, EVERY * WIDTH * HIDDEN, HIDDEN, WIDTH,
            GATED, LIMIT, ALPHA, OFFSET, False, COLUMNS, DEPTH, EARLY,
        )  # fmt: skip
        tl.store(at, result.to(inner.dtype.element_ty), mask=column < WIDTH)
    else:
        if EARLY:
            gdc_wait()
            gdc_launch_dependents()  # not earlier: the next kernel reads the chosen experts before it waits
        expert = tl.load(topk_ids + token * PER_TOKEN + place - EVERY).to(tl.int64)
        part = weight + expert * (PARTS * WIDTH * HIDDEN)
        bias = weight_bias + expert * (PARTS * WIDTH)
        result = _inner(
            row, part, bias, column, WIDTH * HIDDEN, HIDDEN, WIDTH,
            GATED, LIMIT, ALPHA, OFFSET, BIAS, COLUMNS, DEPTH, False,
        )  # fmt: skip
        tl.store(at, result.to(inner.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def _down_projection(
    inner, weight, weight_bias, outer, order, offsets,
    EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr, PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BOUNDS: tl.constexpr, FLIPPED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute ``[pairs, HIDDEN]`` of ``inner [pairs, WIDTH]`` and ``weight [EXPERTS, HIDDEN, WIDTH]``, with ``BIAS``
    also of ``weight_bias [EXPERTS, HIDDEN]``."""
    expert, pairs, exists, has_work = _block(order, offsets, tl.program_id(1), EXPERTS, PAIRS, BOUNDS)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    if not has_work:
        return
    WHOLE: tl.constexpr = WIDTH % DEPTH == 0
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    rows_at = inner + pairs[:, None] * WIDTH + depth[None, :]
    columns_at = weight + expert * (HIDDEN * WIDTH)
    columns_at += tl.minimum(column, HIDDEN - 1)[None, :] * WIDTH + depth[:, None]
    total = _zeros(PAIRS, COLUMNS, FLIPPED)
    for start in range(0, WIDTH, DEPTH):
        inside = start + depth < WIDTH
        rows = _load(rows_at + start, inside[None, :], WHOLE)
        total = _dot(rows, _load(columns_at + start, inside[:, None], WHOLE), total, FLIPPED)
    if FLIPPED:
        total = tl.trans(total)
    if BIAS:
        total += tl.load(weight_bias + expert * HIDDEN + tl.minimum(column, HIDDEN - 1)).to(tl.float32)[None, :]
    mask = exists[:, None] & (column < HIDDEN)[None, :]
    tl.store(outer + pairs[:, None] * HIDDEN + column[None, :], total.to(outer.dtype.element_ty), mask=mask)


@triton.jit
def _down_one(
    inner, weight, weight_bias, every_weight, out, topk_ids, topk_weights, shared, shared_row, gate, gate_row, onto,
    onto_row, PER_TOKEN: tl.constexpr, EVERY: tl.constexpr, GATE: tl.constexpr, HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr, BIAS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SHARED: tl.constexpr,
    ONTO: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Like ``_down_projection``, for one token's pairs, and their sum as in ``_combine``. ``every_weight`` is
    ``[HIDDEN, EVERY * WIDTH]``; with ``GATE`` its pairs have the weight ``sigmoid(gate)``."""
    WHOLE: tl.constexpr = WIDTH % DEPTH == 0
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.minimum(column, HIDDEN - 1)
    depth = tl.arange(0, DEPTH)
    total = tl.zeros([COLUMNS, DEPTH], tl.float32)
    biases = tl.zeros([COLUMNS], tl.float32)
    for place in tl.static_range(EVERY + PER_TOKEN):
        if place < EVERY:
            share = 1.0 / (1.0 + tl.exp(-tl.load(gate + token * gate_row))) if GATE else 1.0
            columns_at = every_weight + place * WIDTH + row[:, None] * (EVERY * WIDTH) + depth[None, :]
        else:
            pair = token * PER_TOKEN + place - EVERY
            share = tl.load(topk_weights + pair)
            expert = tl.load(topk_ids + pair).to(tl.int64)
            columns_at = weight + expert * (HIDDEN * WIDTH) + row[:, None] * WIDTH + depth[None, :]
            if BIAS:
                biases += share * tl.load(weight_bias + expert * HIDDEN + row).to(tl.float32)
        inner_at = inner + (token * (EVERY + PER_TOKEN) + place) * WIDTH + depth
        for start in tl.static_range(0, WIDTH, DEPTH):
            inside = start + depth < WIDTH
            columns = _load(columns_at + start, inside[None, :], WHOLE).to(tl.float32)
            if EARLY and (place == 0 and start == 0):
                gdc_wait()  # for the inner rows; the choice is older
                gdc_launch_dependents()
            inner_row = _load(inner_at + start, inside, WHOLE).to(tl.float32)
            total += columns * (inner_row * share)[None, :]
    exists = column < HIDDEN
    total = tl.sum(total, 1) + biases
    total = _added(total, token, column, exists, shared, shared_row, gate, gate_row, onto, onto_row, SHARED, ONTO)
    tl.store(out + token * HIDDEN + column, total.to(out.dtype.element_ty), mask=exists)


@triton.jit
def _combine(
    outer, out, topk_weights, shared, shared_row, gate, gate_row, onto, onto_row,
    PER_TOKEN: tl.constexpr, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr, SHARED: tl.constexpr, ONTO: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Sum a token's experts with their weights."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = column < HIDDEN
    total = tl.zeros([COLUMNS], tl.float32)
    for place in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + place
        row = tl.load(outer + pair * HIDDEN + column, mask=exists, other=0.0).to(tl.float32)
        total += tl.load(topk_weights + pair) * row
    total = _added(total, token, column, exists, shared, shared_row, gate, gate_row, onto, onto_row, SHARED, ONTO)
    tl.store(out + token * HIDDEN + column, total.to(out.dtype.element_ty), mask=exists)


_ONE = ExpertTile(1, 2, 2048, 2), ExpertTile(1, 2, 512, 2)
_FLOAT32 = ExpertTile(16, 32, 32, 4, 2), ExpertTile(16, 32, 32, 4, 2)
_TILES_BY_LOAD = (
    (16, (ExpertTile(16, 64, 128, 4, 3), ExpertTile(16, 128, 128, 4, 3))),
    (32, (ExpertTile(32, 64, 128, 4, 3), ExpertTile(32, 128, 64, 4, 4))),
    (160, (ExpertTile(64, 128, 64, 4, 3), ExpertTile(64, 256, 64, 8, 3))),
)
"""Tiles of up and down projection, by the largest mean number of pairs per expert for which they are used."""
_LARGEST_TILES = ExpertTile(128, 128, 64, 8, 3), ExpertTile(128, 256, 64, 8, 3)
_INVARIANT = (
    (16, (ExpertTile(16, 64, 128, 4, 3, True), ExpertTile(16, 64, 128, 4, 3, True))),
    (32, (ExpertTile(32, 64, 128, 4, 3, True), ExpertTile(32, 64, 128, 4, 3, True))),
    (160, (ExpertTile(64, 128, 64, 8, 3, True), ExpertTile(64, 128, 64, 8, 3, True))),
)
"""The same if a pair's bits must not depend on the load: all have flipped factors, and sum in one order."""
_INVARIANT_LARGEST = ExpertTile(128, 128, 64, 8, 3, True), ExpertTile(128, 128, 64, 8, 3, True)
MAX_SEPARATE_TOKENS = 4
"""Most tokens for which each pair is computed separately. Like the tiles, measured on an H200."""


def tiles(
    tokens: int, per_token: int, experts: int, dtype: torch.dtype, *, invariant: bool = False
) -> tuple[ExpertTile, ExpertTile]:
    """Return the tiles of both products. They depend on shapes only, so that one graph serves every routing."""
    if tokens <= MAX_SEPARATE_TOKENS and not invariant:
        return _ONE
    if dtype == torch.float32:
        return _FLOAT32
    crowd = tokens * per_token / experts
    by_load, largest = (_INVARIANT, _INVARIANT_LARGEST) if invariant else (_TILES_BY_LOAD, _LARGEST_TILES)
    return next((pair for most, pair in by_load if crowd <= most), largest)


def _fitting(tile: ExpertTile, parts: int, length: int, x: Tensor) -> ExpertTile:
    """Return the tile, not deeper than the sum is long, with as many stages as fit into shared memory."""
    depth = min(tile.depth, max(triton.next_power_of_2(length), 16))
    stage = (tile.pairs + parts * tile.columns) * depth * x.element_size()
    return replace(tile, depth=depth, stages=max(min(tile.stages, (shared_memory(x.device) - 2048) // stage), 1))


def fused_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    gated: bool,
    clip: tuple[float, float, float] | None = None,
    biases: tuple[Tensor, Tensor] | None = None,
    shared: Tensor | None = None,
    gate: Tensor | None = None,
    onto: Tensor | None = None,
    every: tuple[Tensor, Tensor] | None = None,
    chosen_tiles: tuple[ExpertTile, ExpertTile] | None = None,
    ranked: int = MAX_RANKED_PAIRS,
    invariant: bool = False,
) -> Tensor:
    """Return the weighted sum of each token's experts, ``[tokens, hidden]``, like ``x``.

    ``topk_ids`` and ``topk_weights`` (float32) are ``[tokens, k]``; ``gate_up`` is ``[experts, 2 * width, hidden]``,
    half of it unless ``gated``; ``down`` is ``[experts, hidden, width]``. ``shared [tokens, hidden]`` is added with the
    weight ``sigmoid(gate)``, ``gate [tokens]`` float32, and ``onto [tokens, hidden]`` with the weight 1. ``clip`` are
    limit, alpha and offset of a ``ClippedGate``; ``biases`` those of both products, ``[experts, 2 * width]`` and
    ``[experts, hidden]``.

    ``every`` are the two matrices of a shared expert whose width is a multiple of a routed one's. It replaces
    ``shared`` up to ``MAX_SEPARATE_TOKENS`` tokens; without ``gate`` its weight is 1. With ``invariant`` a token's bits
    do not depend on the other tokens.
    """
    (tokens, hidden), per_token = x.shape, topk_ids.shape[1]
    experts, width = gate_up.shape[0], down.shape[2]
    pairs = tokens * per_token
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    shared_parts = 0 if every is None else every[1].shape[1] // width
    inner = torch.empty(pairs + tokens * shared_parts, width, dtype=x.dtype, device=x.device)
    counted = tokens if one_instruction(x.device) or not invariant else 1
    up_tile, down_tile = chosen_tiles or tiles(counted, per_token, experts, x.dtype, invariant=invariant)
    up_tile, down_tile = _fitting(up_tile, 2 if gated else 1, hidden, x), _fitting(down_tile, 1, width, x)
    assert every is None or up_tile.pairs == down_tile.pairs == 1, "pairs in blocks take the shared expert's result"
    if max(up_tile.pairs, down_tile.pairs) > 1:
        order, offsets = _sorted(topk_ids, experts, ranked)
    found = {"EXPERTS": experts, "BOUNDS": triton.next_power_of_2(experts)}
    shape = {"HIDDEN": hidden, "WIDTH": width, **launch_options(x.device)}
    up_bias, down_bias = (gate_up, down) if biases is None else biases
    limit, alpha, offset = clip or (0.0, 1.0, 0.0)
    form = {"GATED": gated, "LIMIT": limit, "ALPHA": alpha, "OFFSET": offset, "BIAS": biases is not None}
    columns = triton.cdiv(width, up_tile.columns)
    if up_tile.pairs == 1:
        _up_one[columns, pairs + tokens * shared_parts](
            x, x.stride(0), gate_up, up_bias, gate_up if every is None else every[0], inner, topk_ids,
            PER_TOKEN=per_token, EVERY=shared_parts, COLUMNS=up_tile.columns, DEPTH=up_tile.depth,
            num_warps=up_tile.warps, **form, **shape,
        )  # fmt: skip
    else:
        _up_projection[columns, min(pairs, pairs // up_tile.pairs + experts)](
            x, x.stride(0), gate_up, up_bias, inner, order, offsets,
            PER_TOKEN=per_token, PAIRS=up_tile.pairs, COLUMNS=up_tile.columns, DEPTH=up_tile.depth,
            FLIPPED=up_tile.flipped, num_warps=up_tile.warps, num_stages=up_tile.stages, **form, **found, **shape,
        )  # fmt: skip
    added = (
        x if shared is None else shared, 0 if shared is None else shared.stride(0),
        topk_weights if gate is None else gate, 0 if gate is None else gate.stride(0),
        x if onto is None else onto, 0 if onto is None else onto.stride(0),
    )  # fmt: skip
    adds = {"PER_TOKEN": per_token, "SHARED": shared is not None, "ONTO": onto is not None}
    columns, shape["BIAS"] = triton.cdiv(hidden, down_tile.columns), biases is not None
    if down_tile.pairs == 1:
        _down_one[columns, tokens](
            inner, down, down_bias, down if every is None else every[1], out, topk_ids, topk_weights, *added,
            EVERY=shared_parts, GATE=gate is not None, COLUMNS=down_tile.columns, DEPTH=down_tile.depth,
            num_warps=down_tile.warps, **adds, **shape,
        )  # fmt: skip
        return out
    outer = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
    _down_projection[columns, min(pairs, pairs // down_tile.pairs + experts)](
        inner, down, down_bias, outer, order, offsets,
        PAIRS=down_tile.pairs, COLUMNS=down_tile.columns, DEPTH=down_tile.depth, FLIPPED=down_tile.flipped,
        num_warps=down_tile.warps, num_stages=down_tile.stages, **found, **shape,
    )  # fmt: skip
    width_of_sum = min(1024, triton.next_power_of_2(hidden))
    _combine[tokens, triton.cdiv(hidden, width_of_sum)](
        outer, out, topk_weights, *added,
        HIDDEN=hidden, COLUMNS=width_of_sum, **adds, **launch_options(x.device),
    )  # fmt: skip
    return out


def _sorted(topk_ids: Tensor, experts: int, ranked: int) -> tuple[Tensor, Tensor]:
    """Return pairs sorted by expert, and where each expert's pairs begin: ``[experts + 1]`` int32."""
    pairs = topk_ids.numel()
    if pairs > ranked:
        ordered, order = topk_ids.flatten().sort(stable=True)
        bounds = torch.arange(experts + 1, dtype=topk_ids.dtype, device=topk_ids.device)
        return order, torch.searchsorted(ordered, bounds, out_int32=True)
    order, offsets = (torch.empty(size, dtype=torch.int32, device=topk_ids.device) for size in (pairs, experts + 1))
    block = 32
    _sort_pairs[triton.cdiv(max(pairs, experts + 1), block),](
        topk_ids, order, offsets, pairs, EXPERTS=experts, BLOCK=block, CHUNK=256, **launch_options(topk_ids.device)
    )
    return order, offsets
