"""MHA and GQA over a paged cache: one kernel for decode, verify and extend, which runs what ``triton_plan`` scheduled.

Decode waits for bytes: a key and a value of 64 columns are 256 bytes in 16 bits, and an H200 reads 4.2 TB/s. With few
requests it waits for neither bytes nor arithmetic, but for loads that depend on each other (0.3 to 0.8 µs each). Hence:

- A program finds everything that it starts with, its first page included, in a record of its own: one load, then rows.
  On SM 90 it is launched while the previous kernel still runs. It reads the record and asks for its cache rows to be
  brought to L2, and only then waits for the previous kernel, which makes queries and new rows.
- Rows (query token, head of the group) of one KV head fill one tile. The cache is read once for all of them. Tensor
  cores take 16 rows at least, so some of them may be empty.
- The program that finishes a tile's last part merges all of them (``_merge``). There is no second kernel.
- Tiles of many rows divide their steps: those that every row sees whole need no mask. So do tiles of a tree: steps
  that reach new rows test its bits, and others do not.
- Anything may follow a request's rows, even NaN. It is neither loaded (zeros take its place, since zero times NaN is
  NaN) nor seen (its logits are -inf).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_triton_mha.triton_plan import RECORD

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)
_LINE = tl.constexpr(128)
"""Bytes that a prefetch brings to L2."""
_LOW = tl.constexpr(32)
"""Tiles of up to so many rows add up their weights over tokens after the last step, and mask every step."""


@triton.jit
def _prefetch(rows, there, WIDTH: tl.constexpr):
    """Ask for rows of ``WIDTH`` bytes, given by their addresses, to be brought to L2. It is a hint; nothing waits."""
    LINES: tl.constexpr = (WIDTH + _LINE - 1) // _LINE
    SIDE: tl.constexpr = 1 if LINES == 1 else (2 if LINES == 2 else 4)
    line = tl.arange(0, SIDE)
    at = rows.to(tl.int64)[:, None] + line[None, :] * _LINE
    asked = (there[:, None] & (line < LINES)[None, :]).to(tl.int32)
    tl.inline_asm_elementwise(
        "{ .reg .pred asked; setp.ne.s32 asked, $2, 0; @asked prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r", [at, asked], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _load(at, column, COLUMN_STRIDE: tl.constexpr, DIM: tl.constexpr, there, MASKED: tl.constexpr):
    """Rows ``[STEP, padded width]`` from their addresses; zeros for columns past ``DIM``, and if masked for rows that
    are not there."""
    at = at[:, None] + column[None, :] * COLUMN_STRIDE
    if MASKED:
        if column.shape[0] == DIM:
            return tl.load(at, mask=there[:, None], other=0.0)
        return tl.load(at, mask=there[:, None] & (column < DIM)[None, :], other=0.0)
    if column.shape[0] == DIM:
        return tl.load(at)
    return tl.load(at, mask=(column < DIM)[None, :], other=0.0)


@triton.jit
def _rows_at(cache, page, token, first, STEP: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
             SLOT_STRIDE: tl.constexpr, FAR: tl.constexpr):  # fmt: skip
    """Addresses of a step's rows. ``page`` is one for all, if a step lies in one page, or one for each token."""
    at = cache + page.to(tl.int64) * PAGE_STRIDE
    if FAR:
        return at + (token % PAGE_SIZE).to(tl.int64) * SLOT_STRIDE
    if PAGE_SIZE % STEP == 0:
        return at + first % PAGE_SIZE * SLOT_STRIDE + tl.arange(0, STEP) * SLOT_STRIDE
    return at + token % PAGE_SIZE * SLOT_STRIDE


@triton.jit
def _finite(rows):
    """Which rows hold neither a NaN nor an infinity."""
    return tl.min((tl.abs(rows.to(tl.float32)) < float("inf")).to(tl.int32), 1) > 0


@triton.jit
def _by_tree(bits, place):
    """Which of some cache rows each row sees, by the bits of its tree; ``place`` is negative before the new rows."""
    bit = tl.minimum(tl.maximum(place, 0), 63).to(tl.int64)
    return (place < 0)[None, :] | (((bits[:, None] >> bit[None, :]) & 1) != 0)


@triton.jit
def _attend_rows(
    top, total, sums, queries, key_rows, value_rows, token, seen, own, scale, cap,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr,
    prefix, bits, TREE: tl.constexpr,
):  # fmt: skip
    """One step: add its values to ``sums``, with weights ``2 ** (logit - top)``, and the weights to ``total``."""
    logits = tl.dot(queries, tl.trans(key_rows)) * scale
    if CAPPED:
        # cap * tanh(logits / cap), by exponentials: where they overflow, tanh is 1 or -1.
        logits = cap - 2 * cap / (1.0 + tl.exp2(logits * (2.0 * LOG2_E)))
    if MASKED:
        visible = token[None, :] < seen[:, None]
        if WINDOW > 0:
            visible = visible & (token[None, :] > (own - WINDOW)[:, None])
        if TREE:
            # Values that a row does not see may be anything. Without weight, a NaN would still get into the result.
            # Such a row of values becomes zeros, and whoever does see it gets NaN.
            whole = _finite(value_rows)
            value_rows = tl.where(whole[:, None], value_rows, 0.0)
            logits = tl.where(whole[None, :], logits, float("nan"))
            visible = visible & _by_tree(bits, token - prefix)
        logits = tl.where(visible, logits, float("-inf"))
    higher = tl.maximum(top, tl.max(logits, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights, kept = tl.exp2(logits - base[:, None]), tl.exp2(top - base)
    total = total * kept[:, None] + weights if TILE <= _LOW else total * kept + tl.sum(weights, 1)
    sums = tl.dot(weights.to(value_rows.dtype), value_rows, sums * kept[:, None])
    return higher, total, sums


@triton.jit
def _attend_steps(
    top, total, sums, page, start, stop, end, queries, seen, own, keys, values, table, table_column, scale, cap,
    DIM: tl.constexpr, V_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, K_PAGE: tl.constexpr, K_SLOT: tl.constexpr,
    K_COLUMN: tl.constexpr, V_PAGE: tl.constexpr, V_SLOT: tl.constexpr, V_COLUMN: tl.constexpr, FAR: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
    prefix, bits, TREE: tl.constexpr,
):  # fmt: skip
    column, v_column = tl.arange(0, queries.shape[1]), tl.arange(0, sums.shape[1])
    if FAR:
        column, v_column = column.to(tl.int64), v_column.to(tl.int64)
    position = tl.arange(0, STEP)
    # The few steps that reach a tree's rows are not pipelined: values in registers would take more shared memory.
    for first in tl.range(start, stop, STEP, num_stages=1 if TREE and MASKED else None):
        token = first + position
        there = token < end
        keys_at = _rows_at(keys, page, token, first, STEP, PAGE_SIZE, K_PAGE, K_SLOT, FAR)
        values_at = _rows_at(values, page, token, first, STEP, PAGE_SIZE, V_PAGE, V_SLOT, FAR)
        # The next step's pages, one step ahead: the compiler can prefetch rows only if their addresses are known.
        ahead = first + STEP if PAGE_SIZE % STEP == 0 else token + STEP
        page = tl.load(table + ahead // PAGE_SIZE * table_column, mask=ahead < end, other=0)
        key_rows = _load(keys_at, column, K_COLUMN, DIM, there, MASKED)
        value_rows = _load(values_at, v_column, V_COLUMN, V_DIM, there, MASKED)
        top, total, sums = _attend_rows(
            top, total, sums, queries, key_rows, value_rows, token, seen, own, scale, cap, WINDOW, CAPPED, MASKED, TILE,
            prefix, bits, TREE,
        )  # fmt: skip
    return top, total, sums, page


@triton.jit
def _finish(
    top, total, sums, out, lse, sinks, begin, query, head, live, v_column,
    HEADS: tl.constexpr, V_DIM: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Write a tile's result. Where no key is seen it is zero, and its log-sum-exp -inf."""
    base = tl.where(top == float("-inf"), 0.0, top)
    whole = total
    if SINKS:
        sink = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * LOG2_E
        whole += tl.exp2(sink - base)
    result = sums / tl.where(whole == 0.0, 1.0, whole)[:, None]
    row = (begin + query).to(tl.int64) * HEADS + head
    written = live[:, None] & (v_column < V_DIM)[None, :]
    tl.store(out + row[:, None] * V_DIM + v_column[None, :], result.to(out.dtype.element_ty), mask=written)
    if LSE:
        log2 = tl.where(total == 0.0, float("-inf"), base + tl.log2(tl.where(total == 0.0, 1.0, total)))
        tl.store(lse + row, log2 * LN_2, mask=live)


@triton.jit
def _merge(partials, partial_tops, partial_totals, place, first_row, parts, live, TILE: tl.constexpr,
           ROWS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Top, total and sums of ``parts`` partial results from ``place`` on, of ``ROWS`` rows each from
    ``first_row`` on, of which some are live.

    Always in the order of their cache rows, ``PARTS`` at once: the bits do not depend on who finished first, and loads
    that do not depend on each other wait together.
    """
    row, column = first_row + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        at = (place + part.to(tl.int64))[:, None] * TILE + row[None, :]
        there = (part < parts)[:, None] & live[None, :]
        tops = tl.load(partial_tops + at, mask=there, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(partial_totals + at, mask=there, other=0.0, cache_modifier=".cg")
        values_at = partials + at[:, :, None] * WIDTH + column[None, None, :]
        values = tl.load(values_at, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
        higher = tl.maximum(top, tl.max(tops, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        kept, factors = tl.exp2(top - base), tl.exp2(tops - base[None, :])
        total = total * kept + tl.sum(totals * factors, 0)
        sums = sums * kept[:, None] + tl.sum(values * factors[:, :, None], 0)
        top = higher
    return top, total, sums


# Numbers that change from batch to batch are not specialised: compiling again because one of them is 1 gains nothing.
@triton.jit(do_not_specialize=["table_row", "partial_rows", "tree_row"])
def attend(
    q, keys, values, page_table, out, lse, sinks, records, partials, partial_weights, counters, partial_rows,
    q_row, q_head, table_row, table_column, scale, cap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr, K_PAGE: tl.constexpr, K_SLOT: tl.constexpr, K_HEAD: tl.constexpr,
    K_COLUMN: tl.constexpr, V_PAGE: tl.constexpr, V_SLOT: tl.constexpr, V_HEAD: tl.constexpr, V_COLUMN: tl.constexpr,
    FAR: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, MERGE_ROWS: tl.constexpr, MERGE_PARTS: tl.constexpr,
    SINGLE: tl.constexpr, OVERLAP: tl.constexpr, PREFETCH: tl.constexpr,
    tree, tree_row, tree_column, TREE: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()  # the next kernel may start, and waits for our last store
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
            # Old rows are there already, and a hint has no result that could be wrong: new rows may be asked for too.
            BYTES: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth // 8
            for ahead in tl.static_range(PREFETCH):
                later = token + ahead * STEP
                at = start + ahead * STEP
                if ahead == 0:
                    its_page = page
                elif PAGE_SIZE % STEP == 0:
                    its_page = tl.load(table + at // PAGE_SIZE * table_column, mask=at < end, other=0)
                else:
                    its_page = tl.load(table + later // PAGE_SIZE * table_column, mask=later < end, other=0)
                keys_at = _rows_at(keys, its_page, later, at, STEP, PAGE_SIZE, K_PAGE, K_SLOT, FAR)
                values_at = _rows_at(values, its_page, later, at, STEP, PAGE_SIZE, V_PAGE, V_SLOT, FAR)
                _prefetch(keys_at, later < end, DIM * BYTES)
                _prefetch(values_at, later < end, V_DIM * BYTES)
        if OVERLAP:
            # Wait for the previous kernel, which may have written queries and cache rows, but not schedule or page
            # table. What depends on those alone is computed before.
            gdc_wait()
        column, v_column = tl.arange(0, WIDTH), tl.arange(0, V_WIDTH)
        q_at = q + (begin + query).to(tl.int64) * q_row + head * q_head
        asked = live[:, None] & (column < DIM)[None, :]
        queries = tl.load(q_at[:, None] + column[None, :], mask=asked)
        top = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE, STEP], tl.float32) if TILE <= _LOW else tl.zeros([TILE], tl.float32)
        sums = tl.zeros([TILE, V_WIDTH], tl.float32)
        bits = own
        if TREE:
            bits = tl.load(tree + request.to(tl.int64) * tree_row + query * tree_column, mask=live, other=0)
        if SINGLE and end - start <= STEP:
            # Ask for all rows at once, and only then look at any: the compiler puts whatever uses a load alone right
            # after it, so zeros for what is not there come later. A loop would wait for the queries first.
            there = token < end
            keys_at = _rows_at(keys, page, token, start, STEP, PAGE_SIZE, K_PAGE, K_SLOT, FAR)
            values_at = _rows_at(values, page, token, start, STEP, PAGE_SIZE, V_PAGE, V_SLOT, FAR)
            far_column, far_v_column = (column.to(tl.int64), v_column.to(tl.int64)) if FAR else (column, v_column)
            keys_there = there[:, None] & (column < DIM)[None, :]
            values_there = there[:, None] & (v_column < V_DIM)[None, :]
            key_rows = tl.load(keys_at[:, None] + far_column[None, :] * K_COLUMN, mask=keys_there)
            value_rows = tl.load(values_at[:, None] + far_v_column[None, :] * V_COLUMN, mask=values_there)
            queries = tl.where(asked, queries, 0.0)
            key_rows, value_rows = tl.where(keys_there, key_rows, 0.0), tl.where(values_there, value_rows, 0.0)
            top, total, sums = _attend_rows(
                top, total, sums, queries, key_rows, value_rows, token, seen, own, scale, cap,
                WINDOW, CAPPED, True, TILE, prefix, bits, TREE,
            )  # fmt: skip
        else:
            queries = tl.where(asked, queries, 0.0)
            middle = start
            if (TILE > _LOW or TREE) and WINDOW == 0:
                # Up to here, every row of the tile sees whole steps.
                clear = tl.minimum(prefix + (0 if TREE else tile * TILE // GROUP + 1), end)
                middle = start + tl.maximum(clear - start, 0) // STEP * STEP
                top, total, sums, page = _attend_steps(
                    top, total, sums, page, start, middle, end, queries, seen, own, keys, values, table, table_column,
                    scale, cap, DIM, V_DIM, PAGE_SIZE, K_PAGE, K_SLOT, K_COLUMN, V_PAGE, V_SLOT, V_COLUMN, FAR, TILE,
                    STEP, WINDOW, CAPPED, False, prefix, bits, TREE,
                )  # fmt: skip
            top, total, sums, page = _attend_steps(
                top, total, sums, page, middle, end, end, queries, seen, own, keys, values, table, table_column,
                scale, cap, DIM, V_DIM, PAGE_SIZE, K_PAGE, K_SLOT, K_COLUMN, V_PAGE, V_SLOT, V_COLUMN, FAR, TILE,
                STEP, WINDOW, CAPPED, True, prefix, bits, TREE,
            )  # fmt: skip
        if TILE <= _LOW:
            total = tl.sum(total, 1)
        if parts == 1:
            _finish(
                top, total, sums, out, lse, sinks, begin, query, head, live, v_column, HEADS, V_DIM, SINKS, LSE
            )  # fmt: skip
        else:
            first_place = kv_head.to(tl.int64) * (partial_rows // TILE) + place
            partial_row = (first_place + part) * TILE + tl.arange(0, TILE)
            tl.store(partials + partial_row[:, None] * V_WIDTH + v_column[None, :], sums, mask=live[:, None])
            totals = partial_weights + partial_rows.to(tl.int64) * tl.num_programs(0)
            tl.store(partial_weights + partial_row, top, mask=live)
            tl.store(totals + partial_row, total, mask=live)
            # The program that counts last finds all parts written: the barrier orders each program's own stores before
            # its count, and the count is a release and an acquire. The counter is reset to zero for the next call.
            tl.debug_barrier()
            counter = counters + first_place
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == parts - 1:
                for first_row in range(0, tl.minimum(new * GROUP - tile * TILE, TILE), MERGE_ROWS):
                    used = tile * TILE + first_row + tl.arange(0, MERGE_ROWS)
                    used_live = used < new * GROUP
                    whole_top, whole_total, whole_sums = _merge(
                        partials, partial_weights, totals, first_place, first_row, parts, used_live,
                        TILE, MERGE_ROWS, V_WIDTH, MERGE_PARTS,
                    )  # fmt: skip
                    _finish(
                        whole_top, whole_total, whole_sums, out, lse, sinks, begin, used // GROUP,
                        kv_head * GROUP + used % GROUP, used_live, v_column, HEADS, V_DIM, SINKS, LSE,
                    )  # fmt: skip
                tl.store(counter, 0)
    elif OVERLAP and me == 0:
        gdc_wait()  # also where nobody has work: the next kernel waits for this one alone
