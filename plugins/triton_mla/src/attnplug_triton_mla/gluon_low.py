"""MLA kernel in Gluon for tiles of 16 rows on SM 90: each of four warps processes a quarter of the latent columns.

It replaces ``triton_attention``. Memory traffic and FLOPs are the same, but there is less waiting. There, every warp
has a share of a step's tokens when logits are computed, and a share of the columns when values are added up. So
all warps read all queries from shared memory at every step, synchronise to find the largest logit, and pass weights
through shared memory: five or six barriers. Here warp w has quarter w of the latent in both products:

- Its logits are sums over its own columns, of queries that it keeps in 36 registers. The four partial logits are added
  up through shared memory (8 KiB), and then every warp has all logits. Each warp computes the largest one, the weights
  and their sums for itself, and the weights are in registers as the second product needs them.
- A step's partial logits are computed beside the weights and values of the step before it, which do not wait for them.
  There are two barriers per step: when its rows have come, and between writing and reading partial logits. Before the
  second, the values of the step before are loaded into registers, so that other warps do not wait for their sums.
- Queries and the first steps' rows are requested together, right after the wait for the previous kernel. Page numbers
  are looked up before that, and later two steps ahead.
- All quarters of some rows are requested, then those of the next rows; a row's rope is requested by neighbouring lanes.
  Quarter by quarter, one request of 65536 tokens took 2.5 % longer, and with its rope in pieces of 32 bytes 5 %.

Steps have 32 rows, in three buffers: with more of them in flight, long streams get slower. At 64 requests
``triton_attention``, with its steps of 64 rows, streams 5 % faster.

Every request has the same number of rows here, and parts are always left to the merging kernel. Triton's interpreter
does not run Gluon: tests on a CPU use ``attnplug_testing.gluon_interpreter``, which has no layouts, and compile the
kernel.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_triton_mla.gluon_tools import begin_stretch, copy, log2_sum, next_tile, rows_of_part, slot_of_part
from attnplug_triton_mla.triton_merge import LN_2


@gluon.jit
def _rows_of(COPY: gl.constexpr, SIZE: gl.constexpr):
    return gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(2, COPY)))


@gluon.jit
def _copy_async(to, at, there, offset, COPY: gl.constexpr):
    """Copy quarters ``[4, rows, columns]`` from ``at + offset`` to shared memory; zeros for masked elements."""
    COLUMNS: gl.constexpr = to.shape[2]
    quarter = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, COPY)))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(1, COPY)))
    place = (offset + quarter * COLUMNS)[:, None, None] + column[None, None, :]
    copy(to, at[None, :, None] + place, mask=there[None, :, None])


@gluon.jit
def _page_of(
    table, table_column, token, end_token, COPY: gl.constexpr, STEP: gl.constexpr, PAGE_SIZE: gl.constexpr
):  # fmt: skip
    """Return the page of the step that starts at ``token``, or the page of each of its rows (slots, if pages have one
    row)."""
    if PAGE_SIZE % STEP != 0:
        token += _rows_of(COPY, STEP)
    return gl.load(table + token // PAGE_SIZE * table_column, mask=token < end_token, other=-1)


@gluon.jit
def _copy_rows_async(
    to, cache, page, token, end_token, offset,
    COPY: gl.constexpr, PAGE_SIZE: gl.constexpr, PAGE_STRIDE: gl.constexpr, SLOT_STRIDE: gl.constexpr,
    SELECTED: gl.constexpr,
):  # fmt: skip
    STEP: gl.constexpr = to.shape[1]
    row = _rows_of(COPY, STEP)
    there = token + row < end_token
    if SELECTED:
        at = cache + (page // PAGE_SIZE).to(gl.int64) * PAGE_STRIDE + page % PAGE_SIZE * SLOT_STRIDE
        there = there & (page >= 0)
    elif PAGE_SIZE % STEP == 0:
        at = cache + page.to(gl.int64) * PAGE_STRIDE + token % PAGE_SIZE * SLOT_STRIDE + row * SLOT_STRIDE
    else:
        at = cache + page.to(gl.int64) * PAGE_STRIDE + (token + row) % PAGE_SIZE * SLOT_STRIDE
    _copy_async(to, at, there, offset, COPY)


@gluon.jit
def _copy_step_async(
    rows, rope, cache, page, rope_page, token, end_token, COPY: gl.constexpr, COPY_ROPE: gl.constexpr,
    RANK: gl.constexpr, ROPE: gl.constexpr, PAGE_SIZE: gl.constexpr, PAGE_STRIDE: gl.constexpr,
    SLOT_STRIDE: gl.constexpr, SELECTED: gl.constexpr,
):  # fmt: skip
    _copy_rows_async(rows, cache, page, token, end_token, 0, COPY, PAGE_SIZE, PAGE_STRIDE, SLOT_STRIDE, SELECTED)
    if ROPE > 0:
        _copy_rows_async(
            rope, cache, rope_page, token, end_token, RANK, COPY_ROPE, PAGE_SIZE, PAGE_STRIDE, SLOT_STRIDE, SELECTED
        )  # fmt: skip
    async_copy.commit_group()


@gluon.jit
def _partial_logits(own_q, own_q_rope, rows, rope, OWN: gl.constexpr, ROPE: gl.constexpr):
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, OWN, 2)
    nothing = gl.full([4, own_q.shape[1], rows.shape[1]], 0.0, gl.float32, OWN)
    dot = mma_v2(own_q, rows.permute((0, 2, 1)).load(RIGHT), nothing)
    if ROPE > 0:
        dot = mma_v2(own_q_rope, rope.permute((0, 2, 1)).load(RIGHT), dot)
    return dot


@gluon.jit
def _logits_of(dots, token, seen, scale, table, table_column, end_token, SELECTED: gl.constexpr):
    """Return the sum of all warps' partial logits; -inf for masked tokens."""
    visible = token[None, :] < seen[:, None]
    if SELECTED:
        chosen = gl.load(table + token * table_column, mask=token < end_token, other=-1)
        visible = visible & (chosen >= 0)[None, :]
    logits = gl.sum(dots, 0) * scale
    return gl.where(visible, logits, float("-inf"))


@gluon.jit
def _add_step(logits, values, top, total, sums, TYPE: gl.constexpr, OWN: gl.constexpr):
    """Add a step's values to the sums; ``top`` is the running maximum of logits, ``total`` the sum of weights."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OWN, 2)
    higher = gl.maximum(top, gl.max(logits, 1))
    base = gl.where(higher == float("-inf"), 0.0, higher)
    weights, kept = gl.exp2(logits - base[:, None]), gl.exp2(top - base)
    total = total * kept + gl.sum(weights, 1)
    own = gl.expand_dims(gl.convert_layout(weights.to(TYPE), gl.SliceLayout(0, LEFT)), 0)
    own = gl.broadcast(own, gl.full([4, logits.shape[0], logits.shape[1]], 0.0, TYPE, LEFT))[0]
    sums = sums * gl.convert_layout(kept, gl.SliceLayout(0, gl.SliceLayout(2, OWN)))[None, :, None]
    return higher, total, mma_v2(own, values, sums)


@gluon.jit(do_not_specialize=["requests", "programs", "partial_slots", "table_row"])
def attend_low(
    q, q_rope, cache, page_table, out, lse, partials, partial_weights, numbers, requests, programs, partial_slots,
    q_row, q_head, q_rope_row, q_rope_head, table_row, table_column, scale, out_scale,
    HEADS: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr, PAGE_SIZE: gl.constexpr, PAGE_STRIDE: gl.constexpr,
    SLOT_STRIDE: gl.constexpr, STEP: gl.constexpr, BUFFERS: gl.constexpr, LSE: gl.constexpr,
    SEPARATE_Q_ROPE: gl.constexpr, OVERLAP: gl.constexpr, SELECTED: gl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()  # the next kernel may start; it waits for this grid before it reads the output
    TILE: gl.constexpr = 16
    QUARTER: gl.constexpr = RANK // 4
    ROPE_QUARTER: gl.constexpr = ROPE // 4 or 16
    ONE_PAGE: gl.constexpr = PAGE_SIZE % STEP == 0 and not SELECTED
    TABLE_PAGE: gl.constexpr = 1 if SELECTED else PAGE_SIZE
    TYPE: gl.constexpr = q.dtype.element_ty
    # The lanes of a warp go along the quarters of rows, then to their next quarters, then to the next rows.
    COPY: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 256 // QUARTER, QUARTER // 8], [1, 4, 1], [2, 0, 1])
    COPY_ROPE: gl.constexpr = gl.BlockedLayout([1, 1, 8], [4, 4, 2], [1, 4, 1], [2, 0, 1])
    # In OWN each warp has one quarter; in ALL every warp has all four.
    OWN: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    ALL: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OWN, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, OWN, 2)
    LOGITS: gl.constexpr = gl.SliceLayout(0, ALL)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    SHARED_ROPE: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [2, 1, 0])
    SHARED_LOGITS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [2, 1, 0])
    q_shared = gl.allocate_shared_memory(TYPE, [4, TILE, QUARTER], SHARED)
    q_rope_shared = gl.allocate_shared_memory(TYPE, [4, TILE, ROPE_QUARTER], SHARED_ROPE)
    rows_shared = gl.allocate_shared_memory(TYPE, [BUFFERS, 4, STEP, QUARTER], SHARED)
    rope_shared = gl.allocate_shared_memory(TYPE, [BUFFERS, 4, STEP, ROPE_QUARTER], SHARED_ROPE)
    logits_shared = gl.allocate_shared_memory(gl.float32, [4, TILE, STEP], SHARED_LOGITS)
    (
        at, stop, _, lead, end, kv_len, prefix, begin, new, stored_at, units, request, tile_start, tile, first_page,
    ) = begin_stretch(numbers, requests)  # fmt: skip
    start = at
    while at < stop:
        taken, first_token, end_token = rows_of_part(
            at, stop, kv_len, prefix, new, units, tile_start, tile, HEADS, TILE, STEP, 0, False
        )
        table = page_table + request.to(gl.int64) * table_row
        if SELECTED and OVERLAP and at == start:
            gdc_wait()  # the previous kernel may have written the table
        pages, rope_pages = (), ()
        for number in gl.static_range(BUFFERS + 2):
            token = first_token + number * STEP
            if ONE_PAGE:
                page = first_page
                if number > 0:
                    page = _page_of(table, table_column, token, end_token, COPY, STEP, TABLE_PAGE)
                rope_page = page
            else:
                page = _page_of(table, table_column, token, end_token, COPY, STEP, TABLE_PAGE)
                rope_page = _page_of(table, table_column, token, end_token, COPY_ROPE, STEP, TABLE_PAGE)
            pages += (page,)
            rope_pages += (rope_page,)
        number = tile * TILE + _rows_of(COPY, TILE)
        q_at = q + (begin + number // HEADS).to(gl.int64) * q_row + number % HEADS * q_head
        rope_number = tile * TILE + _rows_of(COPY_ROPE, TILE)
        rope_query, rope_head = (begin + rope_number // HEADS).to(gl.int64), rope_number % HEADS
        if SEPARATE_Q_ROPE:
            q_rope_at = q_rope + rope_query * q_rope_row + rope_head * q_rope_head
        else:
            q_rope_at = q + RANK + rope_query * q_row + rope_head * q_head
        if OVERLAP and at == start and not SELECTED:
            gdc_wait()  # for queries and cache rows; schedule and page table are older
        _copy_async(q_shared, q_at, number < new * HEADS, 0, COPY)
        if ROPE > 0:
            _copy_async(q_rope_shared, q_rope_at, rope_number < new * HEADS, 0, COPY_ROPE)
        for buffer in gl.static_range(BUFFERS):
            _copy_step_async(
                rows_shared.index(buffer), rope_shared.index(buffer), cache, pages[buffer], rope_pages[buffer],
                first_token + buffer * STEP, end_token,
                COPY, COPY_ROPE, RANK, ROPE, PAGE_SIZE, PAGE_STRIDE, SLOT_STRIDE, SELECTED,
            )  # fmt: skip
        page, page_behind = pages[BUFFERS], pages[BUFFERS + 1]
        rope_page, rope_page_behind = rope_pages[BUFFERS], rope_pages[BUFFERS + 1]

        row = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(1, LOGITS))
        seen = gl.minimum(prefix + row // HEADS + 1, kv_len)
        position = gl.arange(0, STEP, gl.SliceLayout(0, LOGITS))
        top = gl.full([TILE], float("-inf"), gl.float32, gl.SliceLayout(1, LOGITS))
        total = gl.full([TILE], 0.0, gl.float32, gl.SliceLayout(1, LOGITS))
        sums = gl.full([4, TILE, QUARTER], 0.0, gl.float32, OWN)
        async_copy.wait_group(BUFFERS - 1)
        own_q, own_q_rope = q_shared.load(LEFT), q_rope_shared.load(LEFT)
        dot = _partial_logits(own_q, own_q_rope, rows_shared.index(0), rope_shared.index(0), OWN, ROPE)
        logits_shared.store(dot)
        logits = _logits_of(
            logits_shared.load(ALL), first_token + position, seen, scale, table, table_column, end_token, SELECTED
        )  # fmt: skip
        buffer = 0
        for first in range(first_token, end_token - STEP, STEP):
            async_copy.wait_group(BUFFERS - 2)
            following = gl.where(buffer == BUFFERS - 1, 0, buffer + 1)
            rows, rope = rows_shared.index(following), rope_shared.index(following)
            dot = _partial_logits(own_q, own_q_rope, rows, rope, OWN, ROPE)
            logits_shared.store(dot)
            values = rows_shared.index(buffer).load(RIGHT)
            dots = logits_shared.load(ALL)
            # There was a barrier between these two, so no warp reads this step's rows any more.
            token = first + BUFFERS * STEP
            _copy_step_async(
                rows_shared.index(buffer), rope_shared.index(buffer), cache, page, rope_page, token, end_token,
                COPY, COPY_ROPE, RANK, ROPE, PAGE_SIZE, PAGE_STRIDE, SLOT_STRIDE, SELECTED,
            )  # fmt: skip
            top, total, sums = _add_step(logits, values, top, total, sums, TYPE, OWN)
            token += 2 * STEP
            page, page_behind = page_behind, _page_of(table, table_column, token, end_token, COPY, STEP, TABLE_PAGE)
            if ONE_PAGE:
                rope_page, rope_page_behind = page, page_behind
            else:
                rope_page = rope_page_behind
                rope_page_behind = _page_of(table, table_column, token, end_token, COPY_ROPE, STEP, TABLE_PAGE)
            logits = _logits_of(
                dots, first + STEP + position, seen, scale, table, table_column, end_token, SELECTED
            )  # fmt: skip
            buffer = following
        values = rows_shared.index(buffer).load(RIGHT)
        top, total, sums = _add_step(logits, values, top, total, sums, TYPE, OWN)
        async_copy.wait_group(0)

        live = row < new * HEADS
        number = gl.arange(0, TILE, gl.SliceLayout(0, gl.SliceLayout(2, OWN)))
        quarter = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, OWN)))
        column = gl.arange(0, QUARTER, gl.SliceLayout(0, gl.SliceLayout(1, OWN)))
        place = number[None, :, None] * RANK + (quarter * QUARTER)[:, None, None] + column[None, None, :]
        there = (tile * TILE + number < new * HEADS)[None, :, None]
        if taken == units:
            factor = out_scale / gl.where(total == 0.0, 1.0, total)
            factor = gl.convert_layout(factor, gl.SliceLayout(0, gl.SliceLayout(2, OWN)))[None, :, None]
            out_at = out + (begin * HEADS + tile * TILE).to(gl.int64) * RANK + place
            gl.store(out_at, (sums * factor).to(TYPE), mask=there)
            if LSE:
                log2 = log2_sum(gl.where(top == float("-inf"), 0.0, top), total)
                gl.store(lse + begin * HEADS + row, log2 * LN_2, mask=live)
        else:
            part = slot_of_part(at, tile_start, programs).to(gl.int64)
            gl.store(partials + part * (TILE * RANK) + place, sums, mask=there)
            weights_at = partial_weights + (row - tile * TILE) * partial_slots + part
            gl.store(weights_at, top, mask=live)
            gl.store(weights_at + TILE * partial_slots, total, mask=live)

        at += taken
        if at < stop:
            at, end, kv_len, prefix, begin, new, stored_at, units, request, tile_start, tile, first_page = next_tile(
                at, end, kv_len, prefix, begin, new, stored_at, units, request, numbers, lead,
                page_table, table_row, table_column, HEADS, TILE, STEP, TABLE_PAGE,
            )  # fmt: skip
    if OVERLAP:
        gdc_wait()  # also without work: the next kernel waits only for this one
