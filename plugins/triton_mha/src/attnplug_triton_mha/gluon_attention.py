"""Attention kernel in Gluon for extends on SM 90: tiles of 128 rows, with warps for loads and warps for products.

With head dim 64, the exponentials of a step take a multiprocessor as long as its two products, so they have to run at
the same time. In ``triton_attention`` a warp group waits for its logits, computes weights, and waits for their product
with the values. That reaches 390 TFLOP/s with head dim 64 and 450 with 128 on an H200, and this kernel 460 to 510 and
590 to 650 (one prompt of 8192 to 32000 tokens):

- One warp copies keys and values of each step by TMA, page by page, ahead of the other warps. It looks up pages, too.
- Two warp groups have 64 rows each. A group starts the next step's logits before it computes the weights of a step. The
  groups start logits in turn, so that one computes weights while products of the other run.
- A logit takes one multiply-add, one maximum, one exponential, one addition and half a conversion.
- Columns are in chunks of 64, as TMA and wgmma swizzle them: one for head dim 64, two for 128, three for 192.

No product is under way from one round of the loop to the next: ptxas would then run them one by one.

The kernel replaces ``triton_attention`` for bfloat16 caches without draft trees, with the same schedule and the same
partial results. It does not run with levels of invariance beyond ``run``. Triton's interpreter does not run Gluon:
tests on a CPU use ``attnplug_testing.gluon_interpreter``, which has no layouts, and compile the kernel.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_triton_mha.triton_merge import LN_2, LOG2_E
from attnplug_triton_mha.triton_plan import RECORD

CHUNK = tl.constexpr(64)
"""Columns that are copied and multiplied at once: 128 bytes, the widest swizzle of TMA and wgmma."""
MAX_BOX = tl.constexpr(64)
"""Maximum rows that are copied at once. A step is a multiple of it."""
GROUP_ROWS = tl.constexpr(64)
"""Rows of a warp group: the height of a wgmma."""
_PRODUCER_REGISTERS = tl.constexpr(24)
_GROUP_REGISTERS = tl.constexpr(240)

# The name in newer versions, and the one in Triton 3.6.
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


def swizzled_rows(rows: Tensor, box: int = MAX_BOX.value) -> TensorDescriptor:
    """Return a descriptor of ``rows`` ``[rows, columns]`` that copies ``box`` rows and a chunk of columns at a time."""
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [box, CHUNK.value], layout)


@gluon.jit
def _copy_rows(
    descriptor, buffers, full, stage, rows, column, CHUNKS: gl.constexpr, BOXES: gl.constexpr, BOX: gl.constexpr
):  # fmt: skip
    """Start the copies of a step: ``CHUNKS`` chunks of columns from each of ``BOXES`` ranges of rows."""
    mbarrier.expect(full.index(stage), CHUNKS * BOXES * BOX * CHUNK * 2)
    for box in gl.static_range(BOXES):
        for chunk in gl.static_range(CHUNKS):
            to = buffers.index(stage * CHUNKS + chunk)
            if BOXES > 1:
                to = to.slice(box * BOX, BOX, dim=0)
            _copy(descriptor, [rows[box], column + chunk * CHUNK], full.index(stage), to)


@gluon.jit
def _produce(
    arguments, DIM: gl.constexpr, V_DIM: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr,
    PAGE_SIZE: gl.constexpr, K_PAGE: gl.constexpr, V_PAGE: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Copy the rows of all steps to shared memory, ``STAGES`` steps ahead at most.

    Rows behind the last one may be anything; consumers do not use them.
    """
    (
        keys, values, key_buffers, value_buffers, k_full, k_empty, v_full, v_empty, table, table_column, k_row, v_row,
        k_column, v_column, start, end,
    ) = arguments  # fmt: skip
    BOX: gl.constexpr = PAGE_SIZE if PAGE_SIZE > 0 and PAGE_SIZE < MAX_BOX else MAX_BOX
    BOXES: gl.constexpr = STEP // BOX
    if OVERLAP:
        gdc_wait()
    stage, phase = 0, 1
    for first in range(start, gl.maximum(end, start + 1), STEP):
        k_rows, v_rows = (), ()
        for box in gl.static_range(BOXES):
            token = first + box * BOX
            if PAGE_SIZE > 0:
                page = gl.load(table + token // PAGE_SIZE * table_column, mask=token < end, other=0)
                k_rows += (page * K_PAGE + k_row + token % PAGE_SIZE,)
                v_rows += (page * V_PAGE + v_row + token % PAGE_SIZE,)
            else:
                k_rows += (k_row + token,)
                v_rows += (v_row + token,)
        mbarrier.wait(k_empty.index(stage), phase)
        _copy_rows(keys, key_buffers, k_full, stage, k_rows, k_column, DIM // CHUNK, BOXES, BOX)
        mbarrier.wait(v_empty.index(stage), phase)
        _copy_rows(values, value_buffers, v_full, stage, v_rows, v_column, V_DIM // CHUNK, BOXES, BOX)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _start_logits(q_shared, me: gl.constexpr, key_buffers, stage, zeros, CHUNKS: gl.constexpr):
    """Start the product of a group's queries and a step's keys; return the accumulator."""
    logits = zeros
    for chunk in gl.static_range(CHUNKS):
        keys = key_buffers.index(stage * CHUNKS + chunk).permute((1, 0))
        logits = warpgroup_mma(q_shared.index(me * CHUNKS + chunk), keys, logits, use_acc=chunk > 0, is_async=True)
    return logits


@gluon.jit
def _start_values(weights, value_buffers, stage, sums, CHUNKS: gl.constexpr):
    """Start the product of weights and a step's values, added to ``sums``; return the accumulators."""
    started = ()
    for chunk in gl.static_range(CHUNKS):
        started += (warpgroup_mma(weights, value_buffers.index(stage * CHUNKS + chunk), sums[chunk], is_async=True),)
    return started


@gluon.jit
def _start_in_turn(q_shared, me: gl.constexpr, key_buffers, stage, zeros, turns, turn, CHUNKS: gl.constexpr):
    """Start logits after the other group has started its own; otherwise both groups' products compete in every step."""
    mbarrier.wait(turns.index(me), (turn + 1 - me) & 1)
    started = _start_logits(q_shared, me, key_buffers, stage, zeros, CHUNKS)
    mbarrier.arrive(turns.index(1 - me), count=1)
    return started


@gluon.jit
def _wait_for_values(started, CHUNKS: gl.constexpr):
    sums = warpgroup_mma_wait(0, deps=started)
    if CHUNKS == 1:
        sums = (sums,)
    return sums


@gluon.jit
def _weigh(
    logits, top, scale, cap, token, seen, own,
    MASKED: gl.constexpr, WINDOW: gl.constexpr, CAPPED: gl.constexpr,
):  # fmt: skip
    """Return the largest logit so far, the factor of earlier sums, and a step's weights ``2 ** (logit - top)``."""
    if CAPPED:
        # cap * tanh(logits / cap) by exponentials; if they overflow, tanh is 1 or -1.
        logits = cap - 2 * cap / (1.0 + gl.exp2(logits * (2.0 * LOG2_E * scale)))
        scale = 1.0
    if MASKED:
        visible = token[None, :] < seen[:, None]
        if WINDOW > 0:
            visible = visible & (token[None, :] > (own - WINDOW)[:, None])
        logits = gl.where(visible, logits, float("-inf"))
    higher = gl.maximum(top, gl.max(logits, 1) * scale)
    base = gl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    return higher, gl.exp2(top - base), gl.exp2(logits * scale - base[:, None])


@gluon.jit
def _scaled(sums, factor, LAYOUT: gl.constexpr):
    by = gl.convert_layout(factor, gl.SliceLayout(1, LAYOUT), assert_trivial=True)[:, None]
    scaled = ()
    for chunk in gl.static_range(len(sums)):
        scaled += (sums[chunk] * by,)
    return scaled


@gluon.jit
def _clear_rows(buffers, stage, rows, CHUNKS: gl.constexpr, COPY: gl.constexpr):
    """Set the rows of a step from ``rows`` on to zero: they may be NaN, and zero times NaN is NaN.

    Both groups do so without waiting for each other: other rows are written as they were, so a group's product sees the
    same bits before and after the other group's stores.
    """
    for chunk in gl.static_range(CHUNKS):
        buffer = buffers.index(stage * CHUNKS + chunk)
        row = gl.arange(0, buffer.shape[0], gl.SliceLayout(1, COPY))
        values = buffer.load(COPY)
        buffer.store(gl.where((row < rows)[:, None], values, 0.0))
    fence_async_shared()
    _barrier()


@gluon.jit
def _denominator(top, total, sinks, head, live, SINKS: gl.constexpr):
    if SINKS:
        sink = gl.load(sinks + head, mask=live, other=0.0).to(gl.float32) * LOG2_E
        total += gl.exp2(sink - gl.where(top == float("-inf"), 0.0, top))
    return gl.where(total == 0.0, 1.0, total)


@gluon.jit
def _store_lse(lse, at, top, total, live):
    base = gl.where(top == float("-inf"), 0.0, top)
    log2 = gl.where(total == 0.0, float("-inf"), base + gl.log2(gl.where(total == 0.0, 1.0, total)))
    gl.store(lse + at, log2 * LN_2, mask=live)


@gluon.jit
def _consume(
    me: gl.constexpr, arguments, HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, V_DIM: gl.constexpr,
    TILE: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr, CAPPED: gl.constexpr,
    SINKS: gl.constexpr, LSE: gl.constexpr, SPLITS: gl.constexpr, SEPARATE_MERGE: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Attend with rows ``me * GROUP_ROWS`` and following of a tile."""
    (
        q, out, lse, sinks, partials, partial_weights, counters, q_shared, key_buffers, value_buffers, k_full, k_empty,
        v_full, v_empty, turns, begin, prefix, kv_len, new, tile, start, end, part, parts, first_place, totals_at,
        kv_head, q_row, q_head, scale, cap,
    ) = arguments  # fmt: skip
    K_CHUNKS: gl.constexpr = DIM // CHUNK
    V_CHUNKS: gl.constexpr = V_DIM // CHUNK
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    TYPE: gl.constexpr = q.dtype.element_ty
    first_row = tile * TILE + me * GROUP_ROWS
    copied = first_row + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, COPY))
    column = gl.arange(0, CHUNK, gl.SliceLayout(0, COPY))
    copied_head, copied_live = kv_head * GROUP + copied % GROUP, copied < new * GROUP
    out_row = (begin + copied // GROUP).to(gl.int64) * HEADS + copied_head
    if OVERLAP:
        gdc_wait()
    q_at = q + (begin + copied // GROUP).to(gl.int64) * q_row + copied_head * q_head
    for chunk in gl.static_range(K_CHUNKS):
        rows = gl.load(q_at[:, None] + (chunk * CHUNK + column)[None, :], mask=copied_live[:, None], other=0.0)
        q_shared.index(me * K_CHUNKS + chunk).store(rows)
    fence_async_shared()
    _barrier()

    row = first_row + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, LOGITS))
    own = prefix + row // GROUP
    seen = gl.minimum(own + 1, kv_len)
    position = gl.arange(0, STEP, gl.SliceLayout(0, LOGITS))
    zeros = gl.full([GROUP_ROWS, STEP], 0.0, gl.float32, LOGITS)
    sums = ()
    for _ in gl.static_range(V_CHUNKS):
        sums += (gl.full([GROUP_ROWS, CHUNK], 0.0, gl.float32, SUMS),)
    top = gl.full([GROUP_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, LOGITS))
    # Every row of the group sees all cache rows before ``middle``.
    middle = start
    if WINDOW == 0:
        clear = gl.minimum(prefix + first_row // GROUP + 1, end)
        middle = start + gl.maximum(clear - start, 0) // STEP * STEP
    stop = gl.maximum(end, start + 1)  # without cache rows, one step of masked rows
    last = start + (stop - start - 1) // STEP * STEP
    total = gl.full([GROUP_ROWS], 0.0, gl.float32, gl.SliceLayout(1, LOGITS))
    mbarrier.wait(k_full.index(0), 0)
    logits = _start_in_turn(q_shared, me, key_buffers, 0, zeros, turns, 0, K_CHUNKS)
    logits = warpgroup_mma_wait(0, deps=(logits,))
    mbarrier.arrive(k_empty.index(0), count=1)
    stage, phase, turn = 0, 0, 1
    for masked in gl.static_range(2):  # a loop of steps that every row sees entirely, then one with a mask
        loop_start = gl.minimum(middle, last) if masked else start
        for first in range(loop_start, last if masked else gl.minimum(middle, last), STEP):
            v_stage, v_phase = stage, phase
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
            mbarrier.wait(k_full.index(stage), phase)
            next_logits = _start_in_turn(q_shared, me, key_buffers, stage, zeros, turns, turn, K_CHUNKS)
            turn += 1
            top, kept, weights = _weigh(
                logits, top, scale, cap, first + position, seen, own, masked == 1, WINDOW, CAPPED
            )  # fmt: skip
            total = total * kept + gl.sum(weights, 1)
            sums = _scaled(sums, kept, SUMS)
            weights = gl.convert_layout(weights.to(TYPE), WEIGHTS)
            mbarrier.wait(v_full.index(v_stage), v_phase)
            started = _start_values(weights, value_buffers, v_stage, sums, V_CHUNKS)
            logits = warpgroup_mma_wait(V_CHUNKS, deps=(next_logits,))
            mbarrier.arrive(k_empty.index(stage), count=1)
            sums = _wait_for_values(started, V_CHUNKS)
            mbarrier.arrive(v_empty.index(v_stage), count=1)
    top, kept, weights = _weigh(logits, top, scale, cap, last + position, seen, own, True, WINDOW, CAPPED)
    total = total * kept + gl.sum(weights, 1)
    sums = _scaled(sums, kept, SUMS)
    weights = gl.convert_layout(weights.to(TYPE), WEIGHTS)
    mbarrier.wait(v_full.index(stage), phase)
    if end - last < STEP:
        _clear_rows(value_buffers, stage, end - last, V_CHUNKS, COPY)
    sums = _wait_for_values(_start_values(weights, value_buffers, stage, sums, V_CHUNKS), V_CHUNKS)

    live = row < new * GROUP
    if not SPLITS or parts == 1:
        head = kv_head * GROUP + row % GROUP
        results = _scaled(sums, 1.0 / _denominator(top, total, sinks, head, live, SINKS), SUMS)
        for chunk in gl.static_range(V_CHUNKS):
            result = gl.convert_layout(results[chunk].to(TYPE), COPY)
            at = out_row[:, None] * V_DIM + (chunk * CHUNK + column)[None, :]
            gl.store(out + at, result, mask=copied_live[:, None])
        if LSE:
            _store_lse(lse, (begin + row // GROUP).to(gl.int64) * HEADS + head, top, total, live)
    else:
        at_row = (first_place + part) * TILE + me * GROUP_ROWS
        partial_row = at_row + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, LOGITS))
        gl.store(partial_weights + partial_row, top, mask=live)
        gl.store(totals_at + partial_row, total, mask=live)
        partial_row = at_row + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, COPY))
        for chunk in gl.static_range(V_CHUNKS):
            at = partial_row[:, None] * V_DIM + (chunk * CHUNK + column)[None, :]
            gl.store(partials + at, gl.convert_layout(sums[chunk], COPY), mask=copied_live[:, None])
        if not SEPARATE_MERGE:
            # Each group counts and merges its own rows, as the tiles of ``triton_attention`` do.
            _barrier()
            counter = counters + first_place * (TILE // GROUP_ROWS) + me
            if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == parts - 1:
                _merge(
                    out, lse, sinks, partials, partial_weights, totals_at, first_place * TILE + me * GROUP_ROWS, parts,
                    out_row, copied_head, copied_live, column, V_DIM, TILE, SINKS, LSE, COPY,
                )  # fmt: skip
                gl.store(counter, 0)


@gluon.jit
def _merge(
    out, lse, sinks, partials, partial_weights, totals_at, first_row, parts, out_row, head, live, column,
    V_DIM: gl.constexpr, TILE: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Merge a group's rows of all parts, in their order. Loads bypass the L1 cache, which is not coherent."""
    ROW: gl.constexpr = gl.SliceLayout(1, COPY)
    row = first_row + gl.arange(0, GROUP_ROWS, ROW)
    top = gl.full([GROUP_ROWS], float("-inf"), gl.float32, ROW)
    total = gl.full([GROUP_ROWS], 0.0, gl.float32, ROW)
    sums = ()
    for _ in gl.static_range(V_DIM // CHUNK):
        sums += (gl.full([GROUP_ROWS, CHUNK], 0.0, gl.float32, COPY),)
    for part in range(parts):
        at = row + part * TILE
        part_top = gl.load(partial_weights + at, mask=live, other=float("-inf"), cache_modifier=".cg")
        part_total = gl.load(totals_at + at, mask=live, other=0.0, cache_modifier=".cg")
        higher = gl.maximum(top, part_top)
        base = gl.where(higher == float("-inf"), 0.0, higher)
        kept, factor = gl.exp2(top - base), gl.exp2(part_top - base)
        total = total * kept + part_total * factor
        added = ()
        for chunk in gl.static_range(V_DIM // CHUNK):
            values_at = partials + at[:, None] * V_DIM + (chunk * CHUNK + column)[None, :]
            values = gl.load(values_at, mask=live[:, None], other=0.0, cache_modifier=".cg")
            added += (sums[chunk] * kept[:, None] + values * factor[:, None],)
        sums, top = added, higher
    results = _scaled(sums, 1.0 / _denominator(top, total, sinks, head, live, SINKS), COPY)
    for chunk in gl.static_range(V_DIM // CHUNK):
        at = out_row[:, None] * V_DIM + (chunk * CHUNK + column)[None, :]
        gl.store(out + at, results[chunk].to(out.dtype.element_ty), mask=live[:, None])
    if LSE:
        _store_lse(lse, out_row, top, total, live)


@gluon.jit
def _consume_second(
    arguments, HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, V_DIM: gl.constexpr, TILE: gl.constexpr,
    STEP: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr, CAPPED: gl.constexpr, SINKS: gl.constexpr,
    LSE: gl.constexpr, SPLITS: gl.constexpr, SEPARATE_MERGE: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    _consume(
        1, arguments, HEADS, GROUP, DIM, V_DIM, TILE, STEP, STAGES, WINDOW, CAPPED, SINKS, LSE, SPLITS,
        SEPARATE_MERGE, OVERLAP,
    )  # fmt: skip


@gluon.jit
def _consume_first(
    arguments, HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, V_DIM: gl.constexpr, TILE: gl.constexpr,
    STEP: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr, CAPPED: gl.constexpr, SINKS: gl.constexpr,
    LSE: gl.constexpr, SPLITS: gl.constexpr, SEPARATE_MERGE: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    _consume(
        0, arguments, HEADS, GROUP, DIM, V_DIM, TILE, STEP, STAGES, WINDOW, CAPPED, SINKS, LSE, SPLITS,
        SEPARATE_MERGE, OVERLAP,
    )  # fmt: skip


@gluon.jit
def attend_tile(
    q, keys, values, table, table_column, out, lse, sinks, partials, partial_weights, counters, q_row, q_head, head,
    begin, prefix, kv_len, new, tile, start, end, part, parts, first_place, totals_at, k_row, v_row, k_column, v_column,
    scale, cap,
    HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, V_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr,
    K_PAGE: gl.constexpr, V_PAGE: gl.constexpr, WINDOW: gl.constexpr, CAPPED: gl.constexpr, SINKS: gl.constexpr,
    LSE: gl.constexpr, TILE: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr,
    SEPARATE_MERGE: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Attend with a tile of one KV head's group to cache rows from ``start`` to ``end``.

    ``keys`` and ``values`` are descriptors of two dimensions. The head's first row and column are ``k_row`` and
    ``k_column``; a page has ``K_PAGE`` rows. If ``PAGE_SIZE`` is 0, rows are contiguous, and there is no ``table``.
    Without ``SPLITS``, a tile has one part.
    """
    K_CHUNKS: gl.constexpr = DIM // CHUNK
    V_CHUNKS: gl.constexpr = V_DIM // CHUNK
    GROUPS: gl.constexpr = TILE // GROUP_ROWS
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    TYPE: gl.constexpr = q.dtype.element_ty
    q_shared = gl.allocate_shared_memory(TYPE, [GROUPS * K_CHUNKS, GROUP_ROWS, CHUNK], SHARED)
    key_buffers = gl.allocate_shared_memory(TYPE, [STAGES * K_CHUNKS, STEP, CHUNK], SHARED)
    value_buffers = gl.allocate_shared_memory(TYPE, [STAGES * V_CHUNKS, STEP, CHUNK], SHARED)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=GROUPS)
        mbarrier.init(v_empty.index(stage), count=GROUPS)
    for group in gl.static_range(GROUPS):
        mbarrier.init(turns.index(group), count=1)
    fence_async_shared()
    produced = (
        keys, values, key_buffers, value_buffers, k_full, k_empty, v_full, v_empty, table, table_column, k_row, v_row,
        k_column, v_column, start, end,
    )  # fmt: skip
    consumed = (
        q, out, lse, sinks, partials, partial_weights, counters, q_shared, key_buffers, value_buffers, k_full, k_empty,
        v_full, v_empty, turns, begin, prefix, kv_len, new, tile, start, end, part, parts, first_place, totals_at, head,
        q_row, q_head, scale, cap,
    )  # fmt: skip
    # Constants are not part of these tuples: they would become variables.
    gl.warp_specialize(
        [
            (
                _consume_first,
                (
                    consumed, HEADS, GROUP, DIM, V_DIM, TILE, STEP, STAGES, WINDOW, CAPPED, SINKS, LSE, SPLITS,
                    SEPARATE_MERGE, OVERLAP,
                ),
            ),
            (
                _consume_second,
                (
                    consumed, HEADS, GROUP, DIM, V_DIM, TILE, STEP, STAGES, WINDOW, CAPPED, SINKS, LSE, SPLITS,
                    SEPARATE_MERGE, OVERLAP,
                ),
            ),
            (_produce, (produced, DIM, V_DIM, STEP, STAGES, PAGE_SIZE, K_PAGE, V_PAGE, OVERLAP)),
        ],
        [4, 1],
        [_GROUP_REGISTERS, _PRODUCER_REGISTERS],
    )  # fmt: skip


# As in ``triton_attention``: integers that change from batch to batch are not specialized.
@gluon.jit(do_not_specialize=["table_row", "partial_rows"])
def attend_extend(
    q, keys, values, page_table, out, lse, sinks, records, partials, partial_weights, counters, partial_rows, q_row,
    q_head, table_row, table_column, scale, cap,
    HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, V_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr,
    K_PAGE: gl.constexpr, V_PAGE: gl.constexpr, K_HEAD: gl.constexpr, V_HEAD: gl.constexpr,
    WINDOW: gl.constexpr, CAPPED: gl.constexpr,
    SINKS: gl.constexpr, LSE: gl.constexpr, TILE: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr,
    SEPARATE_MERGE: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Attend with the part of a tile that a record describes.

    The next head's keys are ``K_HEAD`` columns further.
    """
    if OVERLAP:
        gdc_launch_dependents()  # the next kernel may start; it waits for this grid before it reads the output
    kv_head, me = gl.program_id(0), gl.program_id(1)
    record = records + me * RECORD
    request, new, begin, prefix = gl.load(record), gl.load(record + 1), gl.load(record + 2), gl.load(record + 3)
    kv_len, tile, start, end = gl.load(record + 4), gl.load(record + 5), gl.load(record + 6), gl.load(record + 7)
    part, parts, place = gl.load(record + 8), gl.load(record + 9), gl.load(record + 10)
    if new > 0:
        attend_tile(
            q, keys, values, page_table + request.to(gl.int64) * table_row, table_column, out, lse, sinks, partials,
            partial_weights, counters, q_row, q_head, kv_head, begin, prefix, kv_len, new, tile, start, end, part,
            parts, kv_head.to(gl.int64) * (partial_rows // TILE) + place,
            partial_weights + partial_rows.to(gl.int64) * gl.num_programs(0), 0, 0, kv_head * K_HEAD,
            kv_head * V_HEAD, scale, cap, HEADS, GROUP, DIM, V_DIM, PAGE_SIZE, K_PAGE,
            V_PAGE, WINDOW, CAPPED, SINKS, LSE, TILE, STEP, STAGES, True, SEPARATE_MERGE, OVERLAP,
        )  # fmt: skip
    elif OVERLAP and me == 0:
        gdc_wait()  # also without work: the next kernel waits only for this one
