"""Triton MLA kernel over a paged cache, for decode, verify and extend. It runs the schedule of ``triton_schedule``.

Memory: a cache row is 1152 bytes in 16 bits (latent 512, rope 64) and is both key and value. An H200 reads 4.2 TB/s,
32 GB/s per SM, so a step of 64 rows takes 2.3 µs if all SMs read. Compute: M query rows take 2 * M * (576 + 512) FLOP
per cache row. At M = 16 a step is 2.2 MFLOP, a third of a microsecond. So decode with few heads is memory-bound. Small
batches are latency-bound: by instructions (1.5 µs per thousand, with one warp per scheduler) and by loads that depend
on each other (0.3 to 0.8 µs each). Hence:

- A program loads everything that it starts with, including its first page number, from one record, and then its rows.
  On SM 90 it uses programmatic dependent launch: it reads the record and computes addresses before it waits for the
  previous kernel.
- The latent part of a row is loaded in quarters. The four loads share addresses, so a thread has a quarter as many, and
  the four products of a step do not depend on each other. A step within one page looks that page up once.
- A quarter is loaded once and used as K, transposed, and as V. Rope is a separate product.
- fp8 rows are loaded as 16-bit pairs: ``ldmatrix`` transposes 16-bit matrices, while 8-bit ones would be read element
  by element. So the quarters of an fp8 row are the even and the odd columns of each half.
- ``fp8_per_token_head`` has a scale per row. It multiplies the logits of the row's column, and its logarithm is added
  before the weights are computed: weights times scales are then at most 1, and fp16 holds the small ones as well as
  without scales. The sum of weights is divided by the scales again. The rope product is in bfloat16.
- ``fp8_ds_mla`` has a scale per 128 values, i.e. several in a row. Values are multiplied by them and rounded to the
  type of the queries, as FlashMLA does it. The rope product is in that type, too.
- ``nvfp4`` rows are loaded by 16 bits too, as four e2m1 values each, so that quarter j has columns j, j + 4, ….
- Rows (query token, head) of a request fill one tile: a verify of 2 tokens with 8 heads reads the cache once. A tile
  has at most 32 rows, because queries are read from shared memory at every step, whose bandwidth is the next limit. On
  SM 90, more rows are for ``gluon_wide``, and few requests for ``gluon_low``.
- Every program has an equal share of the batch's work, whatever the lengths (see ``triton_schedule``). It writes its
  result directly to the output if its tile is not split.
- Memory behind a request's last row may hold anything, even NaN. It is not loaded (zeros take its place, because zero
  times NaN is NaN), and its logits are -inf.
- With ``SELECTED``, every query token is a request of its own, and the table holds the slots of its cache rows, one by
  one. The kernel just before may have written the table, so it is read after the wait. A slot of -1 is no row.
- With ``SPLIT``, a program computes splits at absolute positions one by one, each independently of the others, in one
  pipelined loop. If it started with a tile's first split, it adds up the tile's splits; otherwise it stores each.
  Weights are summed by a product with ones, whose summation order does not depend on the tile.
- With ``TREE``, a query sees the new rows whose bits are set. Only steps that reach new rows test the bits, in a second
  loop: steps before them are as fast as without a tree.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_sparse.index.triton_schedule import begin_stretch, next_tile, rows_of_part
from attnplug_sparse.index.triton_splits import power_of_two, split_rows, splits_before, to_power_of_two
from attnplug_triton_mha.triton_rows import fp16_of_pairs
from attnplug_triton_mla.triton_merge import LN_2, log2_sum, merge_tile, parts_of_tile, slot_of_part

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _load(at, column, there):
    return tl.load(at[:, None] + column[None, :], mask=there[:, None], other=0.0)


@triton.jit
def _load_quarters(at, column, there):
    QUARTER: tl.constexpr = column.shape[0]
    return (
        _load(at, column, there),
        _load(at + QUARTER, column, there),
        _load(at + 2 * QUARTER, column, there),
        _load(at + 3 * QUARTER, column, there),
    )


@triton.jit
def _even_and_odd(of):
    return tl.split(tl.reshape(of, [of.shape[0], of.shape[1] // 2, 2]))


@triton.jit
def _fp16_of_quads(quads, lower, upper, is_upper):
    """Convert the four e2m1 values of every 16 bits to fp16, times 2 ** -14 and a scale in fp16.

    The scale is ``upper`` where ``is_upper`` is 0xFFFF, and ``lower`` where it is 0. The exponent and mantissa bits of
    e2m1, moved to the lowest exponent bits of fp16, are the value times 2 ** -14, subnormals included. So no
    instruction for fp4 is needed.
    """
    if _INTERPRETED:
        scale = tl.where(is_upper != 0, upper, lower)
        return (
            _fp16_of_e2m1(quads) * scale,
            _fp16_of_e2m1(quads >> 4) * scale,
            _fp16_of_e2m1(quads >> 8) * scale,
            _fp16_of_e2m1(quads >> 12) * scale,
        )
    # The same for two elements at a time. Signs are applied to the scale: by one instruction together with their mask.
    return tl.inline_asm_elementwise(
        "{ .reg .b32 scale, size, sign;"
        "lop3.b32 scale, $5, $6, $7, 0xd8;"
        "shl.b32 size, $4, 9; shl.b32 sign, $4, 12;"
        "and.b32 size, size, 0x0e000e00; lop3.b32 sign, sign, 0x80008000, scale, 0x6a; mul.rn.f16x2 $0, size, sign;"
        "shl.b32 size, $4, 5; shl.b32 sign, $4, 8;"
        "and.b32 size, size, 0x0e000e00; lop3.b32 sign, sign, 0x80008000, scale, 0x6a; mul.rn.f16x2 $1, size, sign;"
        "shl.b32 size, $4, 1; shl.b32 sign, $4, 4;"
        "and.b32 size, size, 0x0e000e00; lop3.b32 sign, sign, 0x80008000, scale, 0x6a; mul.rn.f16x2 $2, size, sign;"
        "shr.b32 size, $4, 3;"
        "and.b32 size, size, 0x0e000e00; lop3.b32 sign, $4, 0x80008000, scale, 0x6a; mul.rn.f16x2 $3, size, sign; }",
        "=&r,=&r,=&r,=r,r,r,r,r", [quads, lower, upper, is_upper],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _fp16_of_e2m1(code):
    return (((code & 7) << 9) | ((code & 8) << 12)).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def _fp16_of_e4m3(code):
    """Convert e4m3 codes of numbers that are not negative to fp16, times 2 ** 7. SM 80 has no instruction for it."""
    bits = tl.where(code == 127, 0x7E00, code << 7).to(tl.uint16)  # NaN, or the number times 2 ** -8
    return bits.to(tl.float16, bitcast=True) * 32768.0


@triton.jit
def _for_groups(scales, COLUMNS: tl.constexpr):
    """Repeat the scale of each group for all of its columns: ``[rows, groups]`` to ``[rows, COLUMNS]``."""
    ROWS: tl.constexpr = scales.shape[0]
    repeated = tl.broadcast_to(tl.expand_dims(scales, 2), [ROWS, scales.shape[1], COLUMNS // scales.shape[1]])
    return tl.reshape(repeated, [ROWS, COLUMNS])


@triton.jit
def _load_latent(
    at, column, there, RANK: tl.constexpr, FORMAT: tl.constexpr, SCALE_AT: tl.constexpr, TYPE: tl.constexpr
):
    """Return the quarters ``[rows, RANK // 4]`` of the latent part, in ``TYPE``: fp16 for formats of 8 or 4 bits per
    value, but for ``fp8_ds_mla`` the type of the queries."""
    at_16_bits = at.to(tl.pointer_type(tl.uint16))
    if FORMAT == "plain":
        rows = _load_quarters(at, column, there)
    elif FORMAT == "nvfp4":
        # Scales are loaded by pairs: with a byte among its operands, a product reads shared memory byte by byte.
        pairs = _load((at + SCALE_AT).to(tl.pointer_type(tl.uint16)), tl.arange(0, RANK // 32), there)
        lower, upper = _fp16_of_e4m3(pairs & 127), _fp16_of_e4m3((pairs >> 8) & 127)
        is_upper = tl.where(column % 8 < 4, 0, 0xFFFF).to(tl.uint16)
        is_upper = tl.broadcast_to(is_upper[None, :], [there.shape[0], RANK // 4])
        quads = _load(at_16_bits, column, there)
        rows = _fp16_of_quads(quads, _for_groups(lower, RANK // 4), _for_groups(upper, RANK // 4), is_upper)
    else:
        rows_0, rows_1 = fp16_of_pairs(_load(at_16_bits, column, there))
        rows_2, rows_3 = fp16_of_pairs(_load(at_16_bits + RANK // 4, column, there))
        if FORMAT == "fp8_ds_mla":
            scales_at, group = (at + SCALE_AT).to(tl.pointer_type(tl.float32)), tl.arange(0, RANK // 256)
            lower = _for_groups(_load(scales_at, group, there), RANK // 4)
            upper = _for_groups(_load(scales_at + RANK // 256, group, there), RANK // 4)
            rows_0, rows_1 = (rows_0 * lower).to(TYPE), (rows_1 * lower).to(TYPE)
            rows_2, rows_3 = (rows_2 * upper).to(TYPE), (rows_3 * upper).to(TYPE)
        rows = rows_0, rows_1, rows_2, rows_3
    return rows


@triton.jit
def _load_query(at, column, there, RANK: tl.constexpr, FORMAT: tl.constexpr):
    """Return the quarters of queries in the order of the columns of ``_load_latent``."""
    if FORMAT == "plain":
        quarters = _load_quarters(at, column, there)
    elif FORMAT == "nvfp4":
        even, odd = _even_and_odd(_load(at, tl.arange(0, RANK), there))
        q_0, q_2 = _even_and_odd(even)
        q_1, q_3 = _even_and_odd(odd)
        quarters = q_0, q_1, q_2, q_3
    else:
        q_0, q_1 = _even_and_odd(_load(at, tl.arange(0, RANK // 2), there))
        q_2, q_3 = _even_and_odd(_load(at, tl.arange(RANK // 2, RANK), there))
        quarters = q_0, q_1, q_2, q_3
    return quarters


@triton.jit
def _largest(of):
    return tl.max(tl.abs(of.to(tl.float32)), 1)


@triton.jit
def _by_tree(bits, place):
    """Return the visibility of cache rows by the tree's bits; ``place`` is negative before the new rows."""
    bit = tl.minimum(tl.maximum(place, 0), 63).to(tl.int64)
    return (place < 0)[None, :] | (((bits[:, None] >> bit[None, :]) & 1) != 0)


@triton.jit
def _side_by_side(left, right):
    return tl.reshape(tl.permute(tl.join(left, right), 0, 2, 1), [left.shape[0], 2 * left.shape[1]])


@triton.jit
def _whole_rows(sum_0, sum_1, sum_2, sum_3, FORMAT: tl.constexpr):
    """Join the quarters of ``_load_latent`` to whole rows. Data moves between threads only once."""
    if FORMAT == "plain":
        rows = _side_by_side(_side_by_side(sum_0, sum_1), _side_by_side(sum_2, sum_3))
    elif FORMAT == "nvfp4":
        rows = tl.interleave(tl.interleave(sum_0, sum_2), tl.interleave(sum_1, sum_3))
    else:
        rows = _side_by_side(tl.interleave(sum_0, sum_1), tl.interleave(sum_2, sum_3))
    return rows


@triton.jit
def _store_part(
    partials, partial_weights, partial_slots, slot, top, total, sums, live, RANK: tl.constexpr, TILE_ROWS: tl.constexpr
):  # fmt: skip
    """Store a partial result of ``TILE_ROWS`` rows; further rows of the tile are not live."""
    number = tl.arange(0, sums.shape[0])
    slot = slot.to(tl.int64)
    values_at = partials + (slot * TILE_ROWS + number) * RANK
    tl.store(values_at[:, None] + tl.arange(0, RANK)[None, :], sums, mask=live[:, None])
    weights_at = partial_weights + number * partial_slots + slot
    tl.store(weights_at, top, mask=live)
    tl.store(weights_at + TILE_ROWS * partial_slots, total, mask=live)


# Integers that change from batch to batch are not specialized: another variant for the value 1 would gain nothing.
@triton.jit(do_not_specialize=["requests", "programs", "partial_slots", "table_row", "tree_row"])
def attend(
    q, q_rope, cache, page_table, out, lse, partials, partial_weights, numbers, requests, programs, partial_slots,
    q_row, q_head, q_rope_row, q_rope_head, table_row, table_column, scale, out_scale, rope_scale, counters,
    tree, tree_row, tree_column,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, MERGE_COLUMNS: tl.constexpr,
    LSE: tl.constexpr, SEPARATE_Q_ROPE: tl.constexpr, OVERLAP: tl.constexpr, TREE: tl.constexpr,
    SELECTED: tl.constexpr, FORMAT: tl.constexpr, SCALE_AT: tl.constexpr, ROPE_AT: tl.constexpr,
    SPLIT: tl.constexpr, GROWS: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()  # the next kernel may start; it waits for this grid before it reads the output
    ONE_PAGE: tl.constexpr = PAGE_SIZE % STEP == 0 and not SELECTED
    TABLE_PAGE: tl.constexpr = 1 if SELECTED else PAGE_SIZE
    TYPE: tl.constexpr = q.dtype.element_ty if FORMAT == "plain" or FORMAT == "fp8_ds_mla" else tl.float16
    TOKEN_SCALES: tl.constexpr = FORMAT == "fp8_per_token_head"
    COUNTED: tl.constexpr = tl.bfloat16 if TOKEN_SCALES else TYPE  # fp16 does not hold weights without scales
    # The rotary columns of these formats are in bfloat16, without scales.
    SEPARATE_K_ROPE: tl.constexpr = ROPE > 0 and (TOKEN_SCALES or FORMAT == "nvfp4" or FORMAT == "fp8_ds_mla")
    column, rope_column, position = tl.arange(0, RANK // 4), tl.arange(0, ROPE or 1), tl.arange(0, STEP)
    (
        at, stop, stretch, lead, end, kv_len, prefix, begin, new, stored_at, units, request, tile_start, tile,
        first_page,
    ) = begin_stretch(numbers, requests)  # fmt: skip
    start = at
    while at < stop:
        taken, first_token, end_token = rows_of_part(
            at, stop, kv_len, prefix, new, units, tile_start, tile, HEADS, TILE, STEP, 0, False
        )
        row = tile * TILE + tl.arange(0, TILE)
        live = row < new * HEADS
        query, head = row // HEADS, row % HEADS
        seen = tl.minimum(prefix + query + 1, kv_len)

        table = page_table + request.to(tl.int64) * table_row
        if SELECTED and OVERLAP and at == start:
            gdc_wait()
        if ONE_PAGE:
            page = first_page
        else:
            token = first_token + position
            page = tl.load(table + token // TABLE_PAGE * table_column, mask=token < end_token, other=-1)
        q_at = q + (begin + query).to(tl.int64) * q_row + head * q_head
        q_rope_at = q_at + RANK
        if SEPARATE_Q_ROPE:
            q_rope_at = q_rope + (begin + query).to(tl.int64) * q_rope_row + head * q_rope_head
        if OVERLAP and at == start and not SELECTED:
            # Wait for the previous kernel, and so for the one that it waited for: they may have written queries and
            # cache rows, but not schedule or page table. What depends on those alone is computed before: the condition
            # keeps the compiler from mixing.
            gdc_wait()
        by = scale
        q_0, q_1, q_2, q_3 = _load_query(q_at, column, live, RANK, FORMAT)
        if ROPE > 0:
            rope_part = _load(q_rope_at, rope_column, live)
        if q.dtype.element_ty != TYPE:
            # fp8 is one instruction from fp16, and seven from bf16. Each row of queries is first scaled to numbers up
            # to 2, by a power of 2, so that fp16 holds them as well as bf16 did.
            largest = tl.maximum(
                tl.maximum(_largest(q_0), _largest(q_1)), tl.maximum(_largest(q_2), _largest(q_3))
            )  # fmt: skip
            if ROPE > 0 and not SEPARATE_K_ROPE:
                largest = tl.maximum(largest, _largest(rope_part))
            power = tl.exp2(tl.floor(tl.log2(tl.maximum(largest, 1e-30))))[:, None]
            by = scale * power
            q_0, q_1 = (q_0 / power).to(TYPE), (q_1 / power).to(TYPE)
            q_2, q_3 = (q_2 / power).to(TYPE), (q_3 / power).to(TYPE)
            if ROPE > 0 and not SEPARATE_K_ROPE:
                rope_part = (rope_part / power).to(TYPE)
        if FORMAT == "fp8" and ROPE > 0:
            q_rope_0, q_rope_1 = _even_and_odd(rope_part)
        top = tl.full([TILE], float("-inf"), tl.float32)
        totals = tl.zeros([TILE, 16 if SPLIT > 0 else STEP], tl.float32)
        sum_0, sum_1 = tl.zeros([TILE, RANK // 4], tl.float32), tl.zeros([TILE, RANK // 4], tl.float32)
        sum_2, sum_3 = tl.zeros([TILE, RANK // 4], tl.float32), tl.zeros([TILE, RANK // 4], tl.float32)
        stop_token = end_token
        if SPLIT > 0:
            if stored_at >= 0:
                stop_token = first_token + taken * STEP  # splits without a visible row are merged, too
            whole_top, whole_total = top, tl.zeros([TILE], tl.float32)
            whole_0, whole_1, whole_2, whole_3 = sum_0, sum_1, sum_2, sum_3
            first_slot = stored_at + tile * splits_before(units * STEP, SPLIT, GROWS)
            split_slot = first_slot + splits_before(first_token, SPLIT, GROWS)
            split_end = first_token + split_rows(first_token, SPLIT, GROWS)
            ones = tl.full([STEP, 16], 1.0, COUNTED)
        middle = stop_token
        if TREE:
            # Same as without a tree up to here: steps in front of the new rows.
            bits = tl.load(tree + request.to(tl.int64) * tree_row + query * tree_column, mask=live, other=0)
            middle = first_token + tl.maximum(tl.minimum(prefix, end_token) - first_token, 0) // STEP * STEP
        for part in tl.static_range(1 + TREE):
            from_token, to_token = (first_token, middle) if part == 0 else (middle, stop_token)
            for first in tl.range(from_token, to_token, STEP, num_stages=None if part == 0 else 1):
                token = first + position
                there = token < end_token
                # The next step's pages, one step ahead: the compiler prefetches rows only if it knows their addresses.
                if ONE_PAGE:
                    slot_at = cache + page.to(tl.int64) * PAGE_STRIDE + first % PAGE_SIZE * SLOT_STRIDE
                    slot_at = slot_at + position * SLOT_STRIDE
                    ahead = first + STEP
                elif SELECTED:
                    there = there & (page >= 0)
                    slot_at = cache + (page // PAGE_SIZE).to(tl.int64) * PAGE_STRIDE + page % PAGE_SIZE * SLOT_STRIDE
                    ahead = token + STEP
                else:
                    slot_at = cache + page.to(tl.int64) * PAGE_STRIDE + token % PAGE_SIZE * SLOT_STRIDE
                    ahead = token + STEP
                page = tl.load(table + ahead // TABLE_PAGE * table_column, mask=ahead < end_token, other=-1)
                rows_0, rows_1, rows_2, rows_3 = _load_latent(slot_at, column, there, RANK, FORMAT, SCALE_AT, TYPE)
                dot_0, dot_1 = tl.dot(q_0, tl.trans(rows_0)), tl.dot(q_1, tl.trans(rows_1))
                dot_2, dot_3 = tl.dot(q_2, tl.trans(rows_2)), tl.dot(q_3, tl.trans(rows_3))
                if SEPARATE_K_ROPE:
                    rope_at = (slot_at + ROPE_AT).to(tl.pointer_type(tl.bfloat16))
                    rope = _load(rope_at, rope_column, there).to(rope_part.dtype)
                    dot_rope = tl.dot(rope_part, tl.trans(rope))
                elif FORMAT == "fp8" and ROPE > 0:
                    rope_at = slot_at.to(tl.pointer_type(tl.uint16)) + RANK // 2
                    rope_0, rope_1 = fp16_of_pairs(_load(rope_at, tl.arange(0, ROPE // 2), there))
                    dot_2, dot_3 = tl.dot(q_rope_0, tl.trans(rope_0), dot_2), tl.dot(q_rope_1, tl.trans(rope_1), dot_3)
                elif ROPE > 0:
                    dot_3 = tl.dot(rope_part, tl.trans(_load(slot_at + RANK, rope_column, there)), dot_3)
                # Scale each before they are added: a bare sum of products is one long chain to the compiler.
                logits = (dot_0 * by + dot_1 * by) + (dot_2 * by + dot_3 * by)
                if TOKEN_SCALES:
                    scales_at = (slot_at + SCALE_AT).to(tl.pointer_type(tl.float32))
                    token_scale = tl.load(scales_at, mask=there, other=1.0)
                    log2_scale = tl.log2(token_scale)
                    logits *= token_scale[None, :]
                if SEPARATE_K_ROPE:
                    logits += dot_rope * rope_scale
                visible = token[None, :] < seen[:, None]
                if SELECTED:
                    visible = visible & there[None, :]
                if TREE and part == 1:
                    # Hidden rows may contain NaN, and NaN with weight zero would still reach the result. A row with a
                    # NaN or an infinity has no finite logit: values are reloaded without such rows, and queries that
                    # see one get NaN.
                    whole = tl.max((tl.abs(logits) < float("inf")).to(tl.int32), 0) > 0
                    rows_0, rows_1, rows_2, rows_3 = _load_latent(
                        slot_at, column, there & whole, RANK, FORMAT, SCALE_AT, TYPE
                    )
                    if TOKEN_SCALES:
                        log2_scale = tl.where(whole, log2_scale, 0.0)
                    logits = tl.where(whole[None, :], logits, float("nan"))
                    visible = visible & _by_tree(bits, token - prefix)
                if TOKEN_SCALES:
                    logits += log2_scale[None, :]
                logits = tl.where(visible, logits, float("-inf"))
                higher = tl.maximum(top, tl.max(logits, 1))
                base = tl.where(higher == float("-inf"), 0.0, higher)
                weights, kept = tl.exp2(logits - base[:, None]), tl.exp2(top - base)[:, None]
                counted = weights * tl.exp2(-log2_scale)[None, :] if TOKEN_SCALES else weights
                # Without splits, summed over tokens once, after the loop.
                totals = tl.dot(counted.to(COUNTED), ones, totals * kept) if SPLIT > 0 else totals * kept + counted
                weights = weights.to(TYPE)
                sum_0, sum_1 = tl.dot(weights, rows_0, sum_0 * kept), tl.dot(weights, rows_1, sum_1 * kept)
                sum_2, sum_3 = tl.dot(weights, rows_2, sum_2 * kept), tl.dot(weights, rows_3, sum_3 * kept)
                top = higher
                if SPLIT > 0:  # noqa: SIM102
                    if first + STEP >= tl.minimum(split_end, stop_token):
                        # All columns of the totals are equal.
                        top, factor = to_power_of_two(top)
                        total = tl.max(totals, 1) * factor
                        by_factor = factor[:, None]
                        sum_0, sum_1, sum_2, sum_3 = (
                            sum_0 * by_factor, sum_1 * by_factor, sum_2 * by_factor, sum_3 * by_factor,
                        )  # fmt: skip
                        if at == tile_start:
                            higher = tl.maximum(whole_top, top)
                            highest = tl.where(higher == float("-inf"), 0.0, higher)
                            earlier, weight = power_of_two(whole_top - highest), power_of_two(top - highest)
                            whole_total = whole_total * earlier + total * weight
                            earlier, weight = earlier[:, None], weight[:, None]
                            whole_0, whole_1 = whole_0 * earlier + sum_0 * weight, whole_1 * earlier + sum_1 * weight
                            whole_2, whole_3 = whole_2 * earlier + sum_2 * weight, whole_3 * earlier + sum_3 * weight
                            whole_top = higher
                        else:
                            _store_part(
                                partials, partial_weights, partial_slots, split_slot, top, total,
                                _whole_rows(sum_0, sum_1, sum_2, sum_3, FORMAT), live, RANK, TILE_ROWS,
                            )  # fmt: skip
                        split_slot += 1
                        split_end += split_rows(split_end, SPLIT, GROWS)
                        top = tl.full([TILE], float("-inf"), tl.float32)
                        totals = tl.zeros([TILE, 16], tl.float32)
                        sum_0 = tl.zeros([TILE, RANK // 4], tl.float32)
                        sum_1 = tl.zeros([TILE, RANK // 4], tl.float32)
                        sum_2 = tl.zeros([TILE, RANK // 4], tl.float32)
                        sum_3 = tl.zeros([TILE, RANK // 4], tl.float32)

        if SPLIT > 0:
            top, total = whole_top, whole_total
            sums = _whole_rows(whole_0, whole_1, whole_2, whole_3, FORMAT)
        else:
            total, sums = tl.sum(totals, 1), _whole_rows(sum_0, sum_1, sum_2, sum_3, FORMAT)
        all_columns = tl.arange(0, RANK)[None, :]
        out_row = (begin * HEADS + row).to(tl.int64)
        out_at, lse_at = out + out_row * RANK, lse + out_row
        if taken == units:
            factor = out_scale / tl.where(total == 0.0, 1.0, total)
            result = (sums * factor[:, None]).to(out.dtype.element_ty)
            tl.store(out_at[:, None] + all_columns, result, mask=live[:, None])
            if LSE:
                log2 = log2_sum(tl.where(top == float("-inf"), 0.0, top), total)
                tl.store(lse_at, log2 * LN_2, mask=live)
        elif SPLIT > 0:
            if at == tile_start:
                _store_part(
                    partials, partial_weights, partial_slots, first_slot, top, total, sums, live, RANK, TILE_ROWS
                )  # fmt: skip
        else:
            slot = slot_of_part(at, tile_start, programs)
            _store_part(partials, partial_weights, partial_slots, slot, top, total, sums, live, RANK, TILE_ROWS)
            if MERGE_COLUMNS > 0:
                parts, first_slot, other_slots = parts_of_tile(tile_start, units, stretch, programs)
                counter = counters + other_slots
                # The last program to count sees all parts: the barrier orders a program's stores before its count,
                # which has acquire and release semantics. The counter is reset for the next call.
                tl.debug_barrier()
                if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == parts - 1:
                    merge_tile(
                        partials, partial_weights, partial_slots, out_at, lse_at, live, parts, first_slot, other_slots,
                        out_scale, RANK, TILE, MERGE_COLUMNS, LSE,
                    )  # fmt: skip
                    tl.store(counter, 0)

        at += taken
        if at < stop:
            at, end, kv_len, prefix, begin, new, stored_at, units, request, tile_start, tile, first_page = next_tile(
                at, end, kv_len, prefix, begin, new, stored_at, units, request, numbers, lead,
                page_table, table_row, table_column, HEADS, TILE, STEP, TABLE_PAGE,
            )  # fmt: skip
    if OVERLAP:
        gdc_wait()  # also without work: the next kernel waits only for this one
