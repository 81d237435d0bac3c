"""MLA kernel in Gluon for tiles of 64 rows on SM 90, with two warp groups.

With 64 rows, a step of 64 cache rows is 8.9 MFLOP: 1.7 µs on a multiprocessor, at the 700 TFLOP/s that an H200 reaches
with large products. Those products use wgmma, which takes both factors from shared memory. Triton uses mma.sync for 16
and 32 rows, which reads queries into registers again and again, and takes four times as long. For 64 rows Triton uses
wgmma too, but both warp groups compute all logits, and the next rows are requested after the current step instead of
before it. Hence this kernel specifies layouts and copies explicitly, in Gluon:

- Queries and two steps' rows are in shared memory as wgmma reads them, 224 of its 227 KiB, copied there without
  registers.
- Each warp group has 32 of a step's 64 tokens when logits are computed, and half of the columns when values are added
  up. Weights pass between them through shared memory.
- A round starts two products, one after the other: a step's values, and the next step's logits. When the first is done,
  the step's rows are no longer needed. Those after the next are requested in their place, while the second runs.
- Two barriers of all warps per step are for the largest logit of a row. Sums of weights are added up after the loop.

No product is under way from one round of the loop to the next: ptxas would then run them one by one.

With ``SELECTED``, each row's slot is in the table, as in ``triton_attention``.

The kernel replaces ``triton_attention``, with the same schedule, parts and merge. Every request has the same number of
rows here, and parts are always left to the merging kernel. Triton's interpreter does not run Gluon: tests on a CPU use
``attnplug_testing.gluon_interpreter``, which has no layouts, and compile the kernel.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_triton_mla.gluon_tools import (
    barrier,
    begin_stretch,
    copy,
    log2_sum,
    next_tile,
    power_of_two,
    rows_of_part,
    slot_of_part,
    slot_of_split,
    splits_before,
    to_power_of_two,
)
from attnplug_triton_mla.triton_merge import LN_2


@gluon.jit
def _copy_async(to, to_rope, at, rope_at, there, column, rope_column, ROPE: gl.constexpr):
    """Copy rows to shared memory; zeros for masked rows, because zero times stale memory could be NaN."""
    copy(to, at[:, None] + column[None, :], mask=there[:, None])
    if ROPE > 0:
        copy(to_rope, rope_at[:, None] + rope_column[None, :], mask=there[:, None])


@gluon.jit
def _copy_step_async(
    to, to_rope, cache, table, table_column, page, first, end_token, slot, column, rope_column,
    RANK: gl.constexpr, ROPE: gl.constexpr, PAGE_SIZE: gl.constexpr, PAGE_STRIDE: gl.constexpr,
    SLOT_STRIDE: gl.constexpr, SELECTED: gl.constexpr,
):  # fmt: skip
    """Copy a step's rows from ``page`` (one page, or one per row). Returns the page or pages of the next step."""
    STEP: gl.constexpr = to.shape[0]
    token = first + slot
    there = token < end_token
    if SELECTED:
        there = there & (page >= 0)
        rows_at = cache + (page // PAGE_SIZE).to(gl.int64) * PAGE_STRIDE + page % PAGE_SIZE * SLOT_STRIDE
        next_at, ahead = table + (token + STEP) * table_column, token + STEP
    elif PAGE_SIZE % STEP == 0:
        rows_at = cache + page.to(gl.int64) * PAGE_STRIDE + (first % PAGE_SIZE + slot) * SLOT_STRIDE
        next_at, ahead = table + (first + STEP) // PAGE_SIZE * table_column, first + STEP
    else:
        rows_at = cache + page.to(gl.int64) * PAGE_STRIDE + token % PAGE_SIZE * SLOT_STRIDE
        next_at, ahead = table + (token + STEP) // PAGE_SIZE * table_column, token + STEP
    _copy_async(to, to_rope, rows_at, rows_at + RANK, there, column, rope_column, ROPE)
    async_copy.commit_group()
    return gl.load(next_at, mask=ahead < end_token, other=-1)


@gluon.jit
def _products(q, q_rope, rows, rope, nothing, ROPE: gl.constexpr):
    """Start the asynchronous products of queries and a step's rows; return the accumulator."""
    dot = warpgroup_mma(q, rows.permute((1, 0)), nothing, use_acc=False, is_async=True)
    if ROPE > 0:
        dot = warpgroup_mma(q_rope, rope.permute((1, 0)), dot, is_async=True)
    return dot


@gluon.jit
def _visible(token, seen, table, table_column, end_token, SELECTED: gl.constexpr):
    visible = token[None, :] < seen[:, None]
    if SELECTED:
        chosen = gl.load(table + token * table_column, mask=token < end_token, other=-1)
        visible = visible & (chosen >= 0)[None, :]
    return visible


@gluon.jit
def _weigh(dot, visible, scale, top, totals):
    """Return a step's weights, the running maximum of logits, sums of weights, and the factor of earlier sums."""
    logits = gl.where(visible, dot * scale, float("-inf"))
    higher = gl.maximum(top, gl.max(logits, 1))
    base = gl.where(higher == float("-inf"), 0.0, higher)
    weights, kept = gl.exp2(logits - base[:, None]), gl.exp2(top - base)
    return weights, higher, totals * kept[:, None] + weights, kept


@gluon.jit(do_not_specialize=["requests", "programs", "partial_slots", "table_row"])
def attend_wide(
    q, q_rope, cache, page_table, out, lse, partials, partial_weights, numbers, requests, programs, partial_slots,
    q_row, q_head, q_rope_row, q_rope_head, table_row, table_column, scale, out_scale,
    HEADS: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr, PAGE_SIZE: gl.constexpr, PAGE_STRIDE: gl.constexpr,
    SLOT_STRIDE: gl.constexpr, LSE: gl.constexpr, SEPARATE_Q_ROPE: gl.constexpr, OVERLAP: gl.constexpr,
    SELECTED: gl.constexpr, SPLIT: gl.constexpr, GROWS: gl.constexpr, TILE_ROWS: gl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()  # the next kernel may start; it waits for this grid before it reads the output
    TILE: gl.constexpr = 64
    STEP: gl.constexpr = 64
    ONE_PAGE: gl.constexpr = PAGE_SIZE % STEP == 0 and not SELECTED
    TABLE_PAGE: gl.constexpr = 1 if SELECTED else PAGE_SIZE
    TYPE: gl.constexpr = q.dtype.element_ty
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, STEP // 2, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, RANK // 2, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q_shared = gl.allocate_shared_memory(TYPE, [TILE, RANK], SHARED)
    q_rope_shared = gl.allocate_shared_memory(TYPE, [TILE, ROPE or 64], SHARED)
    rows_shared = gl.allocate_shared_memory(TYPE, [2, STEP, RANK], SHARED)
    rope_shared = gl.allocate_shared_memory(TYPE, [2, STEP, ROPE or 64], SHARED)
    weights_shared = gl.allocate_shared_memory(TYPE, [TILE, STEP], SHARED)

    slot = gl.arange(0, STEP, gl.SliceLayout(1, COPY))
    column = gl.arange(0, RANK, gl.SliceLayout(0, COPY))
    rope_column = gl.arange(0, ROPE or 64, gl.SliceLayout(0, COPY))
    (
        at, stop, _, lead, end, kv_len, prefix, begin, new, stored_at, units, request, tile_start, tile, first_page,
    ) = begin_stretch(numbers, requests)  # fmt: skip
    start = at
    while at < stop:
        taken, first_token, end_token = rows_of_part(
            at, stop, kv_len, prefix, new, units, tile_start, tile, HEADS, TILE, STEP, SPLIT, GROWS
        )
        table = page_table + request.to(gl.int64) * table_row
        if SELECTED and OVERLAP and at == start:
            gdc_wait()  # the previous kernel may have written the table

        q_number = tile * TILE + slot
        query, head = (begin + q_number // HEADS).to(gl.int64), q_number % HEADS
        q_at = q + query * q_row + head * q_head
        q_rope_at = q_at + RANK
        if SEPARATE_Q_ROPE:
            q_rope_at = q_rope + query * q_rope_row + head * q_rope_head
        if ONE_PAGE:
            page = first_page
        else:
            token = first_token + slot
            page = gl.load(table + token // TABLE_PAGE * table_column, mask=token < end_token, other=-1)
        if OVERLAP and at == start and not SELECTED:
            gdc_wait()  # for queries and cache rows; schedule and page table are older
        _copy_async(q_shared, q_rope_shared, q_at, q_rope_at, q_number < new * HEADS, column, rope_column, ROPE)

        row = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(1, LOGITS))
        seen = gl.minimum(prefix + row // HEADS + 1, kv_len)
        position = gl.arange(0, STEP, gl.SliceLayout(0, LOGITS))
        top = gl.full([TILE], float("-inf"), gl.float32, gl.SliceLayout(1, LOGITS))
        totals = gl.full([TILE, STEP], 0.0, gl.float32, LOGITS)
        sums = gl.full([TILE, RANK], 0.0, gl.float32, SUMS)
        nothing = gl.full([TILE, STEP], 0.0, gl.float32, LOGITS)
        page = _copy_step_async(
            rows_shared.index(0), rope_shared.index(0), cache, table, table_column, page, first_token, end_token,
            slot, column, rope_column, RANK, ROPE, PAGE_SIZE, PAGE_STRIDE, SLOT_STRIDE, SELECTED,
        )  # fmt: skip
        page = _copy_step_async(
            rows_shared.index(1), rope_shared.index(1), cache, table, table_column, page, first_token + STEP, end_token,
            slot, column, rope_column, RANK, ROPE, PAGE_SIZE, PAGE_STRIDE, SLOT_STRIDE, SELECTED,
        )  # fmt: skip
        async_copy.wait_group(1)
        fence_async_shared()  # wgmma reads through the async proxy, copies write through the generic one
        dot = _products(q_shared, q_rope_shared, rows_shared.index(0), rope_shared.index(0), nothing, ROPE)
        visible = _visible(first_token + position, seen, table, table_column, end_token, SELECTED)
        dot = warpgroup_mma_wait(0, deps=(dot,))
        weights, top, totals, kept = _weigh(dot, visible, scale, top, totals)
        weights_shared.store(weights.to(TYPE))
        buffer = 0
        # Each round adds a step's values and computes the next one's logits, one product after the other.
        for first in range(first_token, end_token - STEP, STEP):
            fence_async_shared()
            added = warpgroup_mma(weights_shared, rows_shared.index(buffer), sums, is_async=True)
            async_copy.wait_group(0)
            fence_async_shared()
            dot = _products(
                q_shared, q_rope_shared, rows_shared.index(1 - buffer), rope_shared.index(1 - buffer), nothing, ROPE
            )  # fmt: skip
            visible = _visible(first + STEP + position, seen, table, table_column, end_token, SELECTED)
            sums = warpgroup_mma_wait(2 if ROPE > 0 else 1, deps=(added,))
            barrier()  # no warp reads the step's rows and weights any more
            page = _copy_step_async(
                rows_shared.index(buffer), rope_shared.index(buffer), cache, table, table_column, page,
                first + 2 * STEP, end_token, slot, column, rope_column,
                RANK, ROPE, PAGE_SIZE, PAGE_STRIDE, SLOT_STRIDE, SELECTED,
            )  # fmt: skip
            dot = warpgroup_mma_wait(0, deps=(dot,))
            weights, top, totals, kept = _weigh(dot, visible, scale, top, totals)
            weights_shared.store(weights.to(TYPE))
            sums = sums * gl.convert_layout(kept, gl.SliceLayout(1, SUMS))[:, None]
            buffer = 1 - buffer
        fence_async_shared()
        added = warpgroup_mma(weights_shared, rows_shared.index(buffer), sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=(added,))
        async_copy.wait_group(0)  # before the next tile's queries and rows reuse the memory

        live = row < new * HEADS
        number = gl.arange(0, TILE, gl.SliceLayout(1, SUMS))
        place = number[:, None] * RANK + gl.arange(0, RANK, gl.SliceLayout(0, SUMS))[None, :]
        there = (tile * TILE + number < new * HEADS)[:, None]
        ends = taken == units
        if SPLIT > 0:
            top, by = to_power_of_two(top)
            total = gl.sum(totals, 1) * by
            sums = sums * gl.convert_layout(by, gl.SliceLayout(1, SUMS))[:, None]
            ends = (start <= tile_start) & (at + taken == tile_start + units)
            if (start <= tile_start) & (at > tile_start):
                # Add the split to those before it, which this program has computed. Threads load what they stored.
                own = (partial_slots - programs + gl.program_id(0)).to(gl.int64)
                weights_at = partial_weights + (row - tile * TILE) * partial_slots + own
                earlier = gl.load(weights_at, mask=live, other=float("-inf"))
                higher = gl.maximum(earlier, top)
                highest = gl.where(higher == float("-inf"), 0.0, higher)
                earlier_by, by = power_of_two(earlier - highest), power_of_two(top - highest)
                earlier_total = gl.load(weights_at + TILE_ROWS * partial_slots, mask=live, other=0.0)
                total = earlier_total * earlier_by + total * by
                earlier_sums = gl.load(partials + own * (TILE_ROWS * RANK) + place, mask=there, other=0.0)
                earlier_sums = earlier_sums * gl.convert_layout(earlier_by, gl.SliceLayout(1, SUMS))[:, None]
                sums = earlier_sums + sums * gl.convert_layout(by, gl.SliceLayout(1, SUMS))[:, None]
                top = higher
        if ends:
            if SPLIT == 0:
                total = gl.sum(totals, 1)
            factor = gl.convert_layout(out_scale / gl.where(total == 0.0, 1.0, total), gl.SliceLayout(1, SUMS))
            out_at = out + (begin * HEADS + tile * TILE).to(gl.int64) * RANK + place
            gl.store(out_at, (sums * factor[:, None]).to(TYPE), mask=there)
            if LSE:
                log2 = log2_sum(gl.where(top == float("-inf"), 0.0, top), total)
                gl.store(lse + begin * HEADS + row, log2 * LN_2, mask=live)
        else:
            if SPLIT > 0:
                first_slot = stored_at + tile * splits_before(units * STEP, SPLIT, GROWS)
                split_number = splits_before(first_token, SPLIT, GROWS)
                part = slot_of_split(
                    at, taken, stop, start, tile_start, split_number, first_slot, partial_slots, programs
                )
            else:
                total = gl.sum(totals, 1)
                part = slot_of_part(at, tile_start, programs)
            part = part.to(gl.int64)
            gl.store(partials + part * (TILE_ROWS * RANK) + place, sums, mask=there)
            weights_at = partial_weights + (row - tile * TILE) * partial_slots + part
            gl.store(weights_at, top, mask=live)
            gl.store(weights_at + TILE_ROWS * partial_slots, total, mask=live)

        at += taken
        if at < stop:
            at, end, kv_len, prefix, begin, new, stored_at, units, request, tile_start, tile, first_page = next_tile(
                at, end, kv_len, prefix, begin, new, stored_at, units, request, numbers, lead,
                page_table, table_row, table_column, HEADS, TILE, STEP, TABLE_PAGE,
            )  # fmt: skip
    if OVERLAP:
        gdc_wait()  # also without work: the next kernel waits only for this one
