"""Scores of every visible cache row for every new token of a sparse layer, run by a split-KV schedule.

The score of a row is the sum over heads of ``weight * relu(scale * q · key)``. All heads of a token share the keys, so
a product of keys ``[STEP, dim]`` with queries ``[dim, rows * heads]`` has them all. Keys are its rows: heads are then
columns, most of which a thread has in its own registers when it sums over them. ``TILE`` tokens of a request share one
read of its keys. For one token, 64 heads of 128 take 64 operations per byte of a 16-bit key: it is memory-bound.

A step also stores the maximum of every ``GROUP`` scores, by which ``triton_topk`` skips most of the scores.

Keys are ``[pages, page_size, dim]`` of 16 or 32 bits, or fp8 with a scale each: a page is then bytes, all keys first,
then all scales in float32. fp8 keys are multiplied as fp16; SM 80, which has no instruction that converts them, shifts
their bits into place. Queries are scaled to fit by a power of 2, which the weights compensate: relu commutes with
positive factors.

A token that sees no more than top-k rows needs no scores: it selects them all.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_sparse.index.index_plan import UNIT as _UNIT
from attnplug_sparse.index.tiling import ScoreConfig
from attnplug_sparse.index.triton_schedule import HEADER, RECORD, begin_stretch, next_tile, rows_of_part

UNIT = tl.constexpr(_UNIT)
LOWEST = tl.constexpr(-3.4e38)
"""Lower bound of all scores, except -inf of rows that are not seen."""
_ROWS = 32
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""The interpreter multiplies bfloat16 as the integers of the same bits, so it is given float32."""


@triton.jit(do_not_specialize=["requests", "rows", "topk", "width"], do_not_specialize_on_alignment=["counts"])
def _spread(numbers, infos, counts, requests, rows, topk, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    request = tl.zeros([ROWS], tl.int32)
    for first in range(0, requests, BLOCK):
        number = first + tl.arange(0, BLOCK)
        record = numbers + HEADER + number * RECORD
        there = number < requests
        begin, new = tl.load(record + 3, mask=there, other=0), tl.load(record + 4, mask=there, other=0)
        request += tl.sum((there & (begin + new <= row[:, None])).to(tl.int32), 1)
    owned = (row < rows) & (request < requests)
    record = numbers + HEADER + tl.where(owned, request, 0) * RECORD
    kv_len, prefix, begin = tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
    seen = tl.minimum(tl.minimum(prefix + row - begin + 1, kv_len), width)
    seen = tl.where(owned, tl.maximum(seen, 0), 0)
    tl.store(infos + 2 * row, tl.where(owned, request, 0), mask=row < rows)
    tl.store(infos + 2 * row + 1, seen, mask=row < rows)
    tl.store(counts + row, tl.minimum(seen, topk), mask=row < rows)


def launch_spread(numbers: Tensor, requests: int, infos: Tensor, counts: Tensor, topk: int, width: int) -> None:
    """Fill, from a filled schedule, ``infos`` ``[rows, 2]`` with each row's request and the number of cache rows it
    sees, at most ``width``, and ``counts`` ``[rows]`` with the number that it selects."""
    rows = len(counts)
    block = min(max(triton.next_power_of_2(requests), 16), 256)
    _spread[(triton.cdiv(rows, _ROWS),)](
        numbers, infos, counts, requests, rows, topk, width, ROWS=_ROWS, BLOCK=block
    )  # fmt: skip


@triton.jit
def _shifted(code):
    """Return e4m3 codes as fp16, times 2 ** -8: their bits in the place of fp16's, subnormals included."""
    size = (code & 127).to(tl.uint16)
    bits = tl.where(size == 127, 0x7E00, size << 7) | ((code & 128).to(tl.uint16) << 8)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True)


_VARIED = ("requests", "topk", "width", "table_row", "score_units", "group_units", "weights_row", "tree_row")


@triton.jit(do_not_specialize=_VARIED, do_not_specialize_on_alignment=["page_table"])
def score(
    q, weights, keys, page_table, tree, scores, groups, numbers, requests, topk, width, q_row, q_head, weights_row,
    table_row, table_column, tree_row, tree_column, score_units, group_units, scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, ALL_HEADS: tl.constexpr, ALL_DIMS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr,
    TREE: tl.constexpr, OVERLAP: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    """``ALL_HEADS`` and ``ALL_DIMS`` are HEADS and DIM, rounded up to sizes that ``tl.dot`` accepts."""
    if OVERLAP:
        gdc_launch_dependents()
    FLOAT8: tl.constexpr = keys.dtype.element_ty == tl.uint8
    ONE_PAGE: tl.constexpr = PAGE_SIZE % STEP == 0
    COLUMNS: tl.constexpr = TILE * ALL_HEADS
    column, position = tl.arange(0, COLUMNS), tl.arange(0, STEP)
    query, head, dim = column // ALL_HEADS, column % ALL_HEADS, tl.arange(0, ALL_DIMS)
    (
        at, stop, _, lead, end, kv_len, prefix, begin, new, stored_at, units, request, tile_start, tile, first_page,
    ) = begin_stretch(numbers, requests)  # fmt: skip
    start = at
    while at < stop:
        taken, first_token, end_token = rows_of_part(
            at, stop, kv_len, prefix, new, units, tile_start, tile, 1, TILE, STEP, 0, False
        )
        end_token = tl.minimum(end_token, width)
        if not TREE:
            last_seen = tl.minimum(prefix + tl.minimum(tile * TILE + TILE, new), kv_len)
            end_token = tl.where(last_seen <= topk, first_token, end_token)
        row = tile * TILE + tl.arange(0, TILE)
        seen = tl.minimum(prefix + row + 1, kv_len)
        table = page_table + request.to(tl.int64) * table_row
        if ONE_PAGE:
            page = first_page
        else:
            token = first_token + position
            page = tl.load(table + token // PAGE_SIZE * table_column, mask=token < end_token, other=0)
        if OVERLAP and at == start:
            gdc_wait()  # for queries and keys; schedule and page table are older
        live = (tile * TILE + query < new) & (head < HEADS)
        place = (begin + tile * TILE + query).to(tl.int64)
        by_head = tl.load(weights + place * weights_row + head, mask=live, other=0.0) * scale
        queries = tl.load(
            q + (place * q_row + head * q_head)[:, None] + dim[None, :], mask=live[:, None] & (dim < DIM)[None, :],
            other=0.0,
        )  # fmt: skip
        if FLOAT8 and q.dtype.element_ty != tl.float16:
            largest = tl.max(tl.abs(queries.to(tl.float32)), 1)
            power = tl.exp2(tl.floor(tl.log2(tl.maximum(largest, 1e-30))))
            queries, by_head = (queries / power[:, None]).to(tl.float16), by_head * power
        if _INTERPRETED and not FLOAT8:
            queries = queries.to(tl.float32)
        queries = tl.trans(queries)
        if TREE:
            bits = tl.load(
                tree + request.to(tl.int64) * tree_row + row * tree_column, mask=row < new, other=0
            )  # fmt: skip
        for first in tl.range(first_token, end_token, STEP):
            token = first + position
            there = token < end_token
            if ONE_PAGE:
                key_at = keys + page.to(tl.int64) * PAGE_STRIDE + (first % PAGE_SIZE + position) * SLOT_STRIDE
                ahead = first + STEP
            else:
                key_at = keys + page.to(tl.int64) * PAGE_STRIDE + token % PAGE_SIZE * SLOT_STRIDE
                ahead = token + STEP
            if FLOAT8:
                offset = first % PAGE_SIZE + position if ONE_PAGE else token % PAGE_SIZE
                factor_at = keys + page.to(tl.int64) * PAGE_STRIDE + PAGE_SIZE * DIM + offset * 4
                factor = tl.load(factor_at.to(tl.pointer_type(tl.float32)), mask=there, other=0.0)
            page = tl.load(table + ahead // PAGE_SIZE * table_column, mask=ahead < end_token, other=0)
            key = tl.load(key_at[:, None] + dim[None, :], mask=there[:, None] & (dim < DIM)[None, :], other=0)
            if FLOAT8 and CONVERTS:
                key = key.to(tl.float8e4nv, bitcast=True).to(tl.float16)
            elif FLOAT8:
                key, factor = _shifted(key), factor * 256.0
            elif _INTERPRETED:
                key = key.to(tl.float32)
            products = tl.dot(key, queries, input_precision="ieee")
            by_row = tl.maximum(products, 0.0) * by_head[None, :]
            found = tl.sum(tl.reshape(by_row, [STEP, TILE, ALL_HEADS]), 2)
            if FLOAT8:
                found = found * factor[:, None]
            visible = token[:, None] < seen[None, :]
            if TREE:
                beyond = tl.minimum(tl.maximum(token - prefix, 0), 63).to(tl.int64)
                known = (token < prefix)[:, None] | (((bits[None, :] >> beyond[:, None]) & 1) != 0)
                visible = visible & known
            found = tl.where(visible, tl.maximum(found, LOWEST), float("-inf"))  # not a NaN, either
            stored = (row < new)[None, :]
            at_row = (begin + row).to(tl.int64)[None, :]
            tl.store(scores + at_row * (score_units * UNIT) + token[:, None], found, mask=stored & there[:, None])
            best = tl.max(tl.reshape(found, [STEP // GROUP, GROUP, TILE]), 1)
            group = first // GROUP + tl.arange(0, STEP // GROUP)
            tl.store(
                groups + at_row * (group_units * UNIT) + group[:, None], best,
                mask=stored & (group * GROUP < end_token)[:, None],
            )  # fmt: skip
        at += taken
        if at < stop:
            at, end, kv_len, prefix, begin, new, stored_at, units, request, tile_start, tile, first_page = next_tile(
                at, end, kv_len, prefix, begin, new, stored_at, units, request, numbers, lead,
                page_table, table_row, table_column, 1, TILE, STEP, PAGE_SIZE,
            )  # fmt: skip
    if OVERLAP:
        gdc_wait()  # also without work: the next kernel waits for this one alone


def launch_score(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    page_size: int,
    page_table: Tensor,
    tree: Tensor | None,
    scores: Tensor,
    groups: Tensor,
    numbers: Tensor,
    *,
    tiles: ScoreConfig,
    programs: int,
    topk: int,
    width: int,
    group: int,
    scale: float,
) -> None:
    """Compute scores ``[rows, ≥ width]`` of index queries ``[rows, heads, dim]``, and the maximum of every ``group``.

    ``keys`` is ``[pages, page_size, dim]``, or bytes ``[pages, page_bytes]``. ``numbers`` is the schedule. Rows that
    need no scores are left unchanged.
    """
    _, heads, dim = q.shape
    all_heads = max(triton.next_power_of_2(heads), 16 // tiles.query_tile)
    score[(programs,)](
        q,
        weights,
        keys,
        page_table,
        numbers if tree is None else tree,
        scores,
        groups,
        numbers,
        page_table.shape[0],
        topk,
        width,
        q.stride(0),
        q.stride(1),
        weights.stride(0),
        page_table.stride(0),
        page_table.stride(1),
        *((0, 1) if tree is None else tree.stride()),
        scores.stride(0) // _UNIT,
        groups.stride(0) // _UNIT,
        scale,
        HEADS=heads,
        DIM=dim,
        ALL_HEADS=all_heads,
        ALL_DIMS=max(triton.next_power_of_2(dim), 16),
        PAGE_SIZE=page_size,
        PAGE_STRIDE=keys.stride(0),
        SLOT_STRIDE=dim if keys.dim() == 2 else keys.stride(1),
        TILE=tiles.query_tile,
        STEP=tiles.key_tile,
        GROUP=group,
        TREE=tree is not None,
        OVERLAP=tiles.overlap,
        CONVERTS=tiles.converts_fp8,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **({"launch_pdl": True} if tiles.overlap else {}),
    )
