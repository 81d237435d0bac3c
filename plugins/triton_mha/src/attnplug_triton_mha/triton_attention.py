"""Triton attention kernel for MHA and GQA over a paged cache, for decode, verify and extend.

It runs the schedule of ``triton_plan``.

Decode is memory-bound: a key and a value of 64 columns are 256 bytes in 16 bits, and an H200 reads 4.2 TB/s. With few
requests it is latency-bound: loads that depend on each other take 0.3 to 0.8 µs each. Hence:

- A program loads everything that it starts with, including its first page number, from one record, and then its rows.
  On SM 90 it uses programmatic dependent launch: it reads the record and prefetches cache rows to L2 before it waits
  for the previous kernel, which writes queries and new rows.
- A tile holds the (query token, head) rows of one KV head's group, so the cache is read once for all of them. Tensor
  cores take at least 16 rows, some of which may be empty.
- Split tiles are merged by a separate kernel, or by the program that finishes last (``triton_merge``).
- Tiles with many rows have two loops: steps that every row sees entirely need no mask. So do tiles with a draft tree:
  only steps that reach new rows test the tree's bits.
- A quantized row consists of several tensors (see ``triton_rows``), and so do queries and sums: tuples of one, two or
  four. A layer's key scale is part of the logits' scale; its value scale is applied to the result.
- Row scales are applied to logits, and to weights before the second product. ``top`` is the largest logit plus the
  logarithm of its value's scale, so that fp16 weights do not become subnormal if values are small.
- With ``SPLIT``, a program computes splits at absolute positions one by one, each independently of the others. The
  program of a tile's first split adds up all of its splits; others store each split (``triton_splits``).
- Memory behind a request's last row may hold anything, even NaN. It is not loaded (zeros take its place, because zero
  times NaN is NaN), and its logits are -inf.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_triton_mha.triton_merge import LOG2_E, finish, load_sinks, merge_parts, store_partial
from attnplug_triton_mha.triton_plan import RECORD
from attnplug_triton_mha.triton_products import (
    add_values,
    finite_rows,
    join_columns,
    logits_of,
    queries_for_products,
    zero_sums,
)
from attnplug_triton_mha.triton_rows import (
    FP8_ROWS,
    NVFP4,
    SMALLEST_SCALE,
    columns,
    decode,
    load,
    load_group_scales,
    load_step_scales,
    log2_near,
    prefetch,
    rows_at,
)
from attnplug_triton_mha.triton_splits import SHORT_SPLITS, add_split, split_rows, splits_before, to_power_of_two

_SMALL_TILE = tl.constexpr(32)
"""Maximum rows of a tile that sums weights over tokens only after the last step, and masks every step."""


@triton.jit
def _by_tree(bits, place):
    """Return the visibility of cache rows by the tree's bits; ``place`` is negative before the new rows."""
    bit = tl.minimum(tl.maximum(place, 0), 63).to(tl.int64)
    return (place < 0)[None, :] | (((bits[:, None] >> bit[None, :]) & 1) != 0)


@triton.jit
def _attend_rows(
    top, total, sums, queries, key_rows, key_scales, value_rows, value_scales, token, seen, own, scale, cap,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr, FORMAT: tl.constexpr,
    PACK: tl.constexpr, prefix, bits, TREE: tl.constexpr, INVARIANT_SUM: tl.constexpr,
):  # fmt: skip
    """Add a step's values to ``sums``, with weights ``2 ** (logit - top)``, and its weights to ``total``.

    ``INVARIANT_SUM``: ``total`` ``[TILE, 16]`` is a product with ones, whose summation order does not depend on the
    tile."""
    # Large tiles, and all tiles at levels of invariance, scale the largest logit, and all others together with its
    # subtraction. That is written as an fma: the compiler would choose one with or without a mask in between.
    LATE_SCALE: tl.constexpr = PACK == 1 and (TILE > _SMALL_TILE or INVARIANT_SUM) and not CAPPED
    SCALE_FIRST: tl.constexpr = TILE <= _SMALL_TILE or INVARIANT_SUM
    product_scale, late_scale = (1.0, scale) if LATE_SCALE else (scale, 1.0)
    logits = logits_of(queries, decode(key_rows, key_scales, FORMAT), product_scale, SCALE_FIRST, PACK)
    if FORMAT == FP8_ROWS:
        logits = logits * key_scales[None, :]
    if CAPPED:
        # cap * tanh(logits / cap) by exponentials; if they overflow, tanh is 1 or -1.
        logits = cap - 2 * cap / (1.0 + tl.exp2(logits * (2.0 * LOG2_E)))
    if MASKED:
        visible = token[None, :] < seen[:, None]
        if WINDOW > 0:
            visible = visible & (token[None, :] > (own - WINDOW)[:, None])
        if TREE:
            # Hidden values may be NaN, and NaN times a zero weight is NaN. Such value rows become zeros, and queries
            # that do see them get NaN logits.
            whole, value_tensors = finite_rows(decode(value_rows, value_scales, FORMAT), PACK)
            if FORMAT == FP8_ROWS:
                whole = whole & (value_scales < float("inf"))
                value_scales = tl.where(whole, value_scales, 1.0)
            logits = tl.where(whole[None, :], logits, float("nan"))
            visible = visible & _by_tree(bits, token - prefix)
        logits = tl.where(visible, logits, float("-inf"))
    if FORMAT == FP8_ROWS:
        value_scales = tl.maximum(value_scales, SMALLEST_SCALE)
        higher = tl.maximum(top, tl.max(logits + log2_near(value_scales)[None, :], 1))
    else:
        higher = tl.maximum(top, tl.max(logits, 1) * late_scale)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights, kept = tl.exp2(tl.fma(logits, late_scale, -base[:, None])), tl.exp2(top - base)
    if INVARIANT_SUM:
        # Weights of rows with scales may exceed what fp16 holds.
        TYPE: tl.constexpr = tl.bfloat16 if FORMAT == FP8_ROWS else queries[0].dtype
        ones = tl.full([weights.shape[1], total.shape[1]], 1.0, TYPE)
        total = tl.dot(weights.to(TYPE), ones, total * kept[:, None])
    elif TILE <= _SMALL_TILE:
        total = total * kept[:, None] + weights
    else:
        total = total * kept + tl.sum(weights, 1)
    if FORMAT == FP8_ROWS:
        weights *= value_scales[None, :]
    if not (MASKED and TREE):
        value_tensors = decode(value_rows, value_scales, FORMAT)
    return higher, total, add_values(sums, kept, weights, value_tensors, PACK)


@triton.jit
def _attend_step(
    top, total, sums, page, scales, first, end, queries, seen, own, keys, key_scales, values, value_scales,
    table, table_column, scale, cap,
    DIM: tl.constexpr, V_DIM: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr,
    K_PAGE: tl.constexpr, K_SLOT: tl.constexpr, K_COLUMN: tl.constexpr, V_PAGE: tl.constexpr, V_SLOT: tl.constexpr,
    V_COLUMN: tl.constexpr, KS_PAGE: tl.constexpr, KS_SLOT: tl.constexpr, KS_COLUMN: tl.constexpr,
    VS_PAGE: tl.constexpr, VS_SLOT: tl.constexpr, VS_COLUMN: tl.constexpr, INT64: tl.constexpr, PAIRS: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
    FORMAT: tl.constexpr, PACK: tl.constexpr, prefix, bits, TREE: tl.constexpr, INVARIANT_SUM: tl.constexpr,
):  # fmt: skip
    """Load a step's rows and attend to them.

    Takes the ``page`` of the step and the ``scales`` of its keys and values, if rows have one each. Returns those of
    the next step: the compiler can prefetch rows only if their addresses are known. Scales that are not loaded a step
    ahead would be copied to shared memory, one by one.
    """
    column, v_column = columns(WIDTH, PACK, INT64), columns(V_WIDTH, PACK, INT64)
    token = first + tl.arange(0, STEP)
    there = token < end
    keys_at = rows_at(keys, page, token, first, STEP, PAGE_SIZE, K_PAGE, K_SLOT, INT64)
    values_at = rows_at(values, page, token, first, STEP, PAGE_SIZE, V_PAGE, V_SLOT, INT64)
    k_scales, v_scales = scales
    if FORMAT >= NVFP4:
        key_scales_at = rows_at(key_scales, page, token, first, STEP, PAGE_SIZE, KS_PAGE, KS_SLOT, INT64)
        value_scales_at = rows_at(value_scales, page, token, first, STEP, PAGE_SIZE, VS_PAGE, VS_SLOT, INT64)
        k_scales = load_group_scales(key_scales_at, there, KS_COLUMN, DIM, WIDTH)
        v_scales = load_group_scales(value_scales_at, there, VS_COLUMN, V_DIM, V_WIDTH)
    ahead = first + STEP if PAGE_SIZE % STEP == 0 else token + STEP
    page = tl.load(table + ahead // PAGE_SIZE * table_column, mask=ahead < end, other=0)
    scales = load_step_scales(
        key_scales, value_scales, page, token + STEP, first + STEP, STEP, PAGE_SIZE, KS_PAGE, KS_SLOT, VS_PAGE,
        VS_SLOT, INT64, FORMAT,
    )  # fmt: skip
    key_rows = load(keys_at, column, there, K_COLUMN, DIM, PACK, PAIRS, MASKED, True)
    value_rows = load(values_at, v_column, there, V_COLUMN, V_DIM, PACK, PAIRS, MASKED, True)
    if FORMAT == FP8_ROWS and MASKED:
        v_scales = tl.where(there, v_scales, 1.0)
    top, total, sums = _attend_rows(
        top, total, sums, queries, key_rows, k_scales, value_rows, v_scales, token, seen, own, scale, cap,
        WINDOW, CAPPED, MASKED, TILE, FORMAT, PACK, prefix, bits, TREE, INVARIANT_SUM,
    )  # fmt: skip
    return top, total, sums, page, scales


@triton.jit
def _attend_steps(
    top, total, sums, page, scales, start, stop, end, queries, seen, own, keys, key_scales, values, value_scales,
    table, table_column, scale, cap,
    DIM: tl.constexpr, V_DIM: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr,
    K_PAGE: tl.constexpr, K_SLOT: tl.constexpr, K_COLUMN: tl.constexpr, V_PAGE: tl.constexpr, V_SLOT: tl.constexpr,
    V_COLUMN: tl.constexpr, KS_PAGE: tl.constexpr, KS_SLOT: tl.constexpr, KS_COLUMN: tl.constexpr,
    VS_PAGE: tl.constexpr, VS_SLOT: tl.constexpr, VS_COLUMN: tl.constexpr, INT64: tl.constexpr, PAIRS: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
    FORMAT: tl.constexpr, PACK: tl.constexpr, prefix, bits, TREE: tl.constexpr,
):  # fmt: skip
    # The few steps that reach a tree's rows are not pipelined: values in registers would take more shared memory.
    for first in tl.range(start, stop, STEP, num_stages=1 if TREE and MASKED else None):
        top, total, sums, page, scales = _attend_step(
            top, total, sums, page, scales, first, end, queries, seen, own, keys, key_scales, values, value_scales,
            table, table_column, scale, cap, DIM, V_DIM, WIDTH, V_WIDTH, PAGE_SIZE, K_PAGE, K_SLOT, K_COLUMN,
            V_PAGE, V_SLOT, V_COLUMN, KS_PAGE, KS_SLOT, KS_COLUMN, VS_PAGE, VS_SLOT, VS_COLUMN, INT64, PAIRS,
            TILE, STEP, WINDOW, CAPPED, MASKED, FORMAT, PACK, prefix, bits, TREE, False,
        )  # fmt: skip
    return top, total, sums, page, scales


@triton.jit
def _attend_range(
    top, total, sums, page, scales, start, stop, end, queries, seen, own, keys, key_scales, values, value_scales,
    table, table_column, scale, cap, tile,
    DIM: tl.constexpr, V_DIM: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr,
    K_PAGE: tl.constexpr, K_SLOT: tl.constexpr, K_COLUMN: tl.constexpr, V_PAGE: tl.constexpr, V_SLOT: tl.constexpr,
    V_COLUMN: tl.constexpr, KS_PAGE: tl.constexpr, KS_SLOT: tl.constexpr, KS_COLUMN: tl.constexpr,
    VS_PAGE: tl.constexpr, VS_SLOT: tl.constexpr, VS_COLUMN: tl.constexpr, INT64: tl.constexpr, PAIRS: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    FORMAT: tl.constexpr, PACK: tl.constexpr, prefix, bits, TREE: tl.constexpr, UNMASKED_LOOP: tl.constexpr,
):  # fmt: skip
    """Attend to cache rows from ``start`` to ``stop``. ``UNMASKED_LOOP``: a first loop runs steps without a mask."""
    middle = start
    if UNMASKED_LOOP and WINDOW == 0:
        middle = _steps_seen_by_all(start, stop, tile, prefix, TILE, STEP, GROUP, TREE)
        top, total, sums, page, scales = _attend_steps(
            top, total, sums, page, scales, start, middle, end, queries, seen, own, keys, key_scales, values,
            value_scales, table, table_column, scale, cap, DIM, V_DIM, WIDTH, V_WIDTH, PAGE_SIZE, K_PAGE, K_SLOT,
            K_COLUMN, V_PAGE, V_SLOT, V_COLUMN, KS_PAGE, KS_SLOT, KS_COLUMN, VS_PAGE, VS_SLOT, VS_COLUMN,
            INT64, PAIRS, TILE, STEP, WINDOW, CAPPED, False, FORMAT, PACK, prefix, bits, TREE,
        )  # fmt: skip
    return _attend_steps(
        top, total, sums, page, scales, middle, stop, end, queries, seen, own, keys, key_scales, values, value_scales,
        table, table_column, scale, cap, DIM, V_DIM, WIDTH, V_WIDTH, PAGE_SIZE, K_PAGE, K_SLOT, K_COLUMN,
        V_PAGE, V_SLOT, V_COLUMN, KS_PAGE, KS_SLOT, KS_COLUMN, VS_PAGE, VS_SLOT, VS_COLUMN,
        INT64, PAIRS, TILE, STEP, WINDOW, CAPPED, True, FORMAT, PACK, prefix, bits, TREE,
    )  # fmt: skip


@triton.jit
def _steps_seen_by_all(
    start, stop, tile, prefix, TILE: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr, TREE: tl.constexpr
):  # fmt: skip
    """Return the end of the steps from ``start`` on whose cache rows every row of the tile sees."""
    clear = tl.minimum(prefix + (0 if TREE else tile * TILE // GROUP + 1), stop)
    return start + tl.maximum(clear - start, 0) // STEP * STEP


@triton.jit
def _attend_splits(
    top, total, whole_rows, split_top, split_total, sums, page, scales, number, split_end, start, stop, end, part,
    first_place, totals, partials, partial_weights, live, queries, seen, own, keys, key_scales, values, value_scales,
    table, table_column, scale, cap,
    DIM: tl.constexpr, V_DIM: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr,
    K_PAGE: tl.constexpr, K_SLOT: tl.constexpr, K_COLUMN: tl.constexpr, V_PAGE: tl.constexpr, V_SLOT: tl.constexpr,
    V_COLUMN: tl.constexpr, KS_PAGE: tl.constexpr, KS_SLOT: tl.constexpr, KS_COLUMN: tl.constexpr,
    VS_PAGE: tl.constexpr, VS_SLOT: tl.constexpr, VS_COLUMN: tl.constexpr, INT64: tl.constexpr, PAIRS: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
    FORMAT: tl.constexpr, PACK: tl.constexpr, prefix, bits, TREE: tl.constexpr, SPLIT: tl.constexpr,
    SHORT: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """Attend to the splits of cache rows from ``start`` to ``stop``; one that does not end there is continued later.

    One pipelined loop over the steps of all splits: the next split's rows are in flight when a split ends.
    """
    for first in tl.range(start, stop, STEP, num_stages=1 if TREE and MASKED else None):
        split_top, split_total, sums, page, scales = _attend_step(
            split_top, split_total, sums, page, scales, first, end, queries, seen, own, keys, key_scales, values,
            value_scales, table, table_column, scale, cap, DIM, V_DIM, WIDTH, V_WIDTH, PAGE_SIZE, K_PAGE, K_SLOT,
            K_COLUMN, V_PAGE, V_SLOT, V_COLUMN, KS_PAGE, KS_SLOT, KS_COLUMN, VS_PAGE, VS_SLOT, VS_COLUMN, INT64,
            PAIRS, TILE, STEP, WINDOW, CAPPED, MASKED, FORMAT, PACK, prefix, bits, TREE, True,
        )  # fmt: skip
        if first + STEP >= tl.minimum(split_end, end):
            # All columns of the total are equal.
            whole_top, whole_total, split_sums = to_power_of_two(
                split_top, tl.max(split_total, 1), join_columns(sums, PACK)
            )
            if part == 0:
                top, total, whole_rows = add_split(top, total, whole_rows, whole_top, whole_total, split_sums)
            else:
                store_partial(
                    partials, partial_weights, totals, first_place + number, whole_top, whole_total, split_sums, live,
                    TILE_ROWS, V_WIDTH,
                )  # fmt: skip
            number += 1
            split_end += split_rows(split_end, SPLIT, SHORT)
            split_top = tl.full([TILE], float("-inf"), tl.float32)
            split_total = tl.zeros([TILE, 16], tl.float32)
            sums = zero_sums(TILE, V_WIDTH, PACK)
    return top, total, whole_rows, split_top, split_total, sums, page, scales, number, split_end


# Integers that change from batch to batch are not specialized: another variant for the value 1 would gain nothing.
@triton.jit(do_not_specialize=["table_row", "partial_rows", "tree_row"])
def attend(
    q, keys, key_scales, values, value_scales, page_table, out, lse, sinks, records, partials, partial_weights,
    counters, partial_rows, q_row, q_head, table_row, table_column, scale, cap, value_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr, K_PAGE: tl.constexpr, K_SLOT: tl.constexpr, K_HEAD: tl.constexpr,
    K_COLUMN: tl.constexpr, V_PAGE: tl.constexpr, V_SLOT: tl.constexpr, V_HEAD: tl.constexpr, V_COLUMN: tl.constexpr,
    KS_PAGE: tl.constexpr, KS_SLOT: tl.constexpr, KS_HEAD: tl.constexpr, KS_COLUMN: tl.constexpr,
    VS_PAGE: tl.constexpr, VS_SLOT: tl.constexpr, VS_HEAD: tl.constexpr, VS_COLUMN: tl.constexpr,
    FORMAT: tl.constexpr, INT64: tl.constexpr, PAIRS: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, SEPARATE_MERGE: tl.constexpr,
    MERGE_ROWS: tl.constexpr, MERGE_PARTS: tl.constexpr, SINGLE: tl.constexpr, OVERLAP: tl.constexpr,
    PREFETCH: tl.constexpr, tree, tree_row, tree_column, TREE: tl.constexpr, SPLIT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()  # the next kernel may start; it waits for this grid before it reads the output
    # Bits per column and bytes of scales.
    BITS: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth if FORMAT < NVFP4 else 4
    K_SCALES: tl.constexpr = DIM // 16 if FORMAT >= NVFP4 else (4 if FORMAT == FP8_ROWS else 0)
    V_SCALES: tl.constexpr = V_DIM // 16 if FORMAT >= NVFP4 else K_SCALES
    PACK: tl.constexpr = 4 if FORMAT >= NVFP4 else (2 if FORMAT > 0 else 1)
    kv_head, me = tl.program_id(0), tl.program_id(1)
    record = records + me * RECORD
    request, new, begin, prefix = tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
    kv_len, tile, start, end = tl.load(record + 4), tl.load(record + 5), tl.load(record + 6), tl.load(record + 7)
    part, parts, place, first_page = (
        tl.load(record + 8), tl.load(record + 9), tl.load(record + 10), tl.load(record + 11),
    )  # fmt: skip
    if new > 0:
        keys += kv_head.to(tl.int64) * K_HEAD
        values += kv_head.to(tl.int64) * V_HEAD
        key_scales += kv_head.to(tl.int64) * KS_HEAD
        value_scales += kv_head.to(tl.int64) * VS_HEAD
        row = tile * TILE + tl.arange(0, TILE)
        live = row < new * GROUP
        query, head = row // GROUP, kv_head * GROUP + row % GROUP
        own = prefix + query
        seen = tl.minimum(own + 1, kv_len)
        table = page_table + request.to(tl.int64) * table_row
        token = start + tl.arange(0, STEP)
        if PAGE_SIZE % STEP == 0:
            page = first_page
        else:
            page = tl.load(table + token // PAGE_SIZE * table_column, mask=token < end, other=0)
        if PREFETCH > 0:
            # A hint cannot give a wrong result, so rows that are not written yet may be prefetched, too.
            for ahead in tl.static_range(PREFETCH):
                later = token + ahead * STEP
                at = start + ahead * STEP
                if ahead == 0:
                    its_page = page
                elif PAGE_SIZE % STEP == 0:
                    its_page = tl.load(table + at // PAGE_SIZE * table_column, mask=at < end, other=0)
                else:
                    its_page = tl.load(table + later // PAGE_SIZE * table_column, mask=later < end, other=0)
                keys_at = rows_at(keys, its_page, later, at, STEP, PAGE_SIZE, K_PAGE, K_SLOT, INT64)
                values_at = rows_at(values, its_page, later, at, STEP, PAGE_SIZE, V_PAGE, V_SLOT, INT64)
                prefetch(keys_at, later < end, DIM * BITS // 8 + K_SCALES)
                prefetch(values_at, later < end, V_DIM * BITS // 8 + V_SCALES)
        if OVERLAP:
            # Wait for the previous kernel, which may write queries and cache rows. Schedule and page table are older.
            gdc_wait()
        column, v_column = tl.arange(0, WIDTH), tl.arange(0, V_WIDTH)
        q_at = q + (begin + query).to(tl.int64) * q_row + head * q_head
        asked = live[:, None] & (column < DIM)[None, :]
        q_rows = tl.load(q_at[:, None] + column[None, :], mask=asked)
        top = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE, STEP], tl.float32) if TILE <= _SMALL_TILE else tl.zeros([TILE], tl.float32)
        sums = zero_sums(TILE, V_WIDTH, PACK)
        bits = own
        if TREE:
            bits = tl.load(tree + request.to(tl.int64) * tree_row + query * tree_column, mask=live, other=0)
        scales = load_step_scales(
            key_scales, value_scales, page, token, start, STEP, PAGE_SIZE, KS_PAGE, KS_SLOT, VS_PAGE, VS_SLOT, INT64,
            FORMAT,
        )  # fmt: skip
        first_place = kv_head.to(tl.int64) * (partial_rows // TILE_ROWS) + place
        totals = partial_weights + partial_rows.to(tl.int64) * tl.num_programs(0)
        if SPLIT > 0:
            SHORT: tl.constexpr = 0 if WINDOW else SHORT_SPLITS
            queries, by = queries_for_products(q_rows, asked, scale, PACK)
            whole_rows = tl.zeros([TILE, V_WIDTH], tl.float32)
            total = tl.zeros([TILE], tl.float32)
            before = 0
            if WINDOW > 0:
                before = tl.maximum(prefix + tile * TILE // GROUP - WINDOW + 1, 0) // SPLIT
            number = splits_before(start, SPLIT, SHORT) - before
            split_end = start + split_rows(start, SPLIT, SHORT)
            split_top = tl.full([TILE], float("-inf"), tl.float32)
            split_total = tl.zeros([TILE, 16], tl.float32)
            middle = start
            if TILE > _SMALL_TILE and WINDOW == 0:
                middle = _steps_seen_by_all(start, end, tile, prefix, TILE, STEP, GROUP, TREE)
                (
                    top, total, whole_rows, split_top, split_total, sums, page, scales, number, split_end
                ) = _attend_splits(
                    top, total, whole_rows, split_top, split_total, sums, page, scales, number, split_end, start,
                    middle, end, part, first_place, totals, partials, partial_weights, live, queries, seen, own, keys,
                    key_scales, values, value_scales, table, table_column, by, cap, DIM, V_DIM, WIDTH, V_WIDTH,
                    PAGE_SIZE, K_PAGE, K_SLOT, K_COLUMN, V_PAGE, V_SLOT, V_COLUMN, KS_PAGE, KS_SLOT, KS_COLUMN,
                    VS_PAGE, VS_SLOT, VS_COLUMN, INT64, PAIRS, TILE, STEP, WINDOW, CAPPED, False, FORMAT, PACK,
                    prefix, bits, TREE, SPLIT, SHORT, TILE_ROWS,
                )  # fmt: skip
            top, total, whole_rows, split_top, split_total, sums, page, scales, number, split_end = _attend_splits(
                top, total, whole_rows, split_top, split_total, sums, page, scales, number, split_end, middle, end,
                end, part, first_place, totals, partials, partial_weights, live, queries, seen, own, keys, key_scales,
                values, value_scales, table, table_column, by, cap, DIM, V_DIM, WIDTH, V_WIDTH, PAGE_SIZE, K_PAGE,
                K_SLOT, K_COLUMN, V_PAGE, V_SLOT, V_COLUMN, KS_PAGE, KS_SLOT, KS_COLUMN, VS_PAGE, VS_SLOT, VS_COLUMN,
                INT64, PAIRS, TILE, STEP, WINDOW, CAPPED, True, FORMAT, PACK, prefix, bits, TREE, SPLIT, SHORT,
                TILE_ROWS,
            )  # fmt: skip
        elif SINGLE and end - start <= STEP:
            # Issue all loads before any of them is used. The compiler places the first use of a load right behind it,
            # so zeros for missing rows are filled in later. A loop would wait for the queries first.
            there = token < end
            keys_at = rows_at(keys, page, token, start, STEP, PAGE_SIZE, K_PAGE, K_SLOT, INT64)
            values_at = rows_at(values, page, token, start, STEP, PAGE_SIZE, V_PAGE, V_SLOT, INT64)
            k_column, few_v_column = columns(WIDTH, PACK, INT64), columns(V_WIDTH, PACK, INT64)
            key_rows = load(keys_at, k_column, there, K_COLUMN, DIM, PACK, PAIRS, True, False)
            value_rows = load(values_at, few_v_column, there, V_COLUMN, V_DIM, PACK, PAIRS, True, False)
            k_scales, v_scales = scales
            if FORMAT == FP8_ROWS:
                v_scales = tl.where(there, v_scales, 1.0)
            if FORMAT >= NVFP4:
                key_scales_at = rows_at(key_scales, page, token, start, STEP, PAGE_SIZE, KS_PAGE, KS_SLOT, INT64)
                value_scales_at = rows_at(value_scales, page, token, start, STEP, PAGE_SIZE, VS_PAGE, VS_SLOT, INT64)
                k_scales = load_group_scales(key_scales_at, there, KS_COLUMN, DIM, WIDTH)
                v_scales = load_group_scales(value_scales_at, there, VS_COLUMN, V_DIM, V_WIDTH)
            queries, by = queries_for_products(q_rows, asked, scale, PACK)
            keys_there = there[:, None] & (k_column < DIM // PACK)[None, :]
            values_there = there[:, None] & (few_v_column < V_DIM // PACK)[None, :]
            key_rows, value_rows = tl.where(keys_there, key_rows, 0), tl.where(values_there, value_rows, 0)
            top, total, sums = _attend_rows(
                top, total, sums, queries, key_rows, k_scales, value_rows, v_scales, token, seen, own, by, cap,
                WINDOW, CAPPED, True, TILE, FORMAT, PACK, prefix, bits, TREE, False,
            )  # fmt: skip
        else:
            queries, by = queries_for_products(q_rows, asked, scale, PACK)
            top, total, sums, page, scales = _attend_range(
                top, total, sums, page, scales, start, end, end, queries, seen, own, keys, key_scales, values,
                value_scales, table, table_column, by, cap, tile, DIM, V_DIM, WIDTH, V_WIDTH, PAGE_SIZE, K_PAGE, K_SLOT,
                K_COLUMN, V_PAGE, V_SLOT, V_COLUMN, KS_PAGE, KS_SLOT, KS_COLUMN, VS_PAGE, VS_SLOT, VS_COLUMN, INT64,
                PAIRS, TILE, STEP, GROUP, WINDOW, CAPPED, FORMAT, PACK, prefix, bits, TREE, TILE > _SMALL_TILE or TREE,
            )  # fmt: skip
        if SPLIT == 0:
            whole_rows = join_columns(sums, PACK)
            if TILE <= _SMALL_TILE:
                total = tl.sum(total, 1)
        if parts == 1:
            out_row = (begin + query).to(tl.int64) * HEADS + head
            sink = load_sinks(sinks, head, live, SINKS)
            finish(
                top,
                total,
                whole_rows,
                out,
                lse,
                sink,
                value_scale,
                out_row,
                live,
                v_column,
                V_DIM,
                SINKS,
                LSE,
                PACK > 1,
            )
        elif SPLIT > 0:
            if part == 0:
                store_partial(
                    partials, partial_weights, totals, first_place, top, total, whole_rows, live, TILE_ROWS, V_WIDTH
                )  # fmt: skip
        else:
            store_partial(
                partials, partial_weights, totals, first_place + part, top, total, whole_rows, live, TILE_ROWS, V_WIDTH
            )  # fmt: skip
            if not SEPARATE_MERGE:
                # The last program to count sees all parts: the barrier orders a program's stores before its count,
                # which has acquire and release semantics. The counter is reset for the next call.
                tl.debug_barrier()
                counter = counters + first_place
                if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == parts - 1:
                    for first_row in range(0, tl.minimum(new * GROUP - tile * TILE, TILE), MERGE_ROWS):
                        used = tile * TILE + first_row + tl.arange(0, MERGE_ROWS)
                        used_live = used < new * GROUP
                        used_head = kv_head * GROUP + used % GROUP
                        used_at = first_place * TILE + first_row + tl.arange(0, MERGE_ROWS)
                        whole_top, whole_total, whole_sums, sink = merge_parts(
                            partials + used_at[:, None] * V_WIDTH + v_column[None, :], partial_weights + used_at,
                            totals + used_at, sinks, used_head, parts, place, used_live,
                            TILE, V_WIDTH, MERGE_PARTS, SINKS, False,
                        )  # fmt: skip
                        out_row = (begin + used // GROUP).to(tl.int64) * HEADS + used_head
                        finish(
                            whole_top, whole_total, whole_sums, out, lse, sink, value_scale, out_row, used_live,
                            v_column, V_DIM, SINKS, LSE, PACK > 1,
                        )  # fmt: skip
                    tl.store(counter, 0)
    elif OVERLAP and me == 0:
        gdc_wait()  # also without work: the next kernel waits only for this one
