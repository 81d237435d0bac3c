"""Triton kernels for MLA prefill as MHA: ragged attention over up-projected rows, and the order of its tiles.

A tile is a block of query rows of one sequence and one head. It loops over the keys of its sequence by TMA loads, first
over steps that all its rows see whole, then over steps that need a mask. Rows behind a sequence's last key belong to
another sequence: their logits are -inf, and their values zero, since zero times NaN is NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _lens(indptr, sequence, live):
    return tl.load(indptr + sequence + 1, mask=live, other=0) - tl.load(indptr + sequence, mask=live, other=0)


@triton.jit(do_not_specialize=["sequences", "count"])
def order_tiles(
    tiles, query_indptr, kv_indptr, sequences, count,
    TILE: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """Write ``tiles`` ``[count, 2]``: sequence and block of each tile, in descending order of keys, then -1.

    Long tiles start first, so that the last ones to finish are short. A program writes one sequence's tiles. The index
    of a tile is the number of tiles with more keys, in units of ``TILE``, over all sequences.
    """
    me = tl.program_id(0)
    start, stop = tl.load(query_indptr + me), tl.load(query_indptr + me + 1)
    keys = tl.load(kv_indptr + me + 1) - tl.load(kv_indptr + me)
    blocks = tl.cdiv(stop - start, TILE)
    before = (keys - (stop - start)) // TILE if CAUSAL else keys // TILE
    for block in range(blocks):
        # Keys of this tile, rounded: with a causal mask, each block sees one unit more than the previous one.
        units = before + block + 1 if CAUSAL else before
        place = 0 if CAUSAL else block
        for first in range(0, sequences, BLOCK):
            other = first + tl.arange(0, BLOCK)
            live = other < sequences
            rows, kv_rows = _lens(query_indptr, other, live), _lens(kv_indptr, other, live)
            theirs = tl.cdiv(rows, TILE)
            if CAUSAL:
                shift = (kv_rows - rows) // TILE
                # Block b of the other sequence has shift + b + 1 units. Equal ones are ordered by sequence.
                smallest = units - shift - (other < me).to(tl.int32)
                ahead = theirs - tl.minimum(tl.maximum(smallest, 0), theirs)
            else:
                theirs_units = kv_rows // TILE
                more = (theirs_units > units) | ((theirs_units == units) & (other < me))
                ahead = tl.where(more, theirs, 0)
            place += tl.sum(tl.where(live, ahead, 0))
        tl.store(tiles + 2 * place, me)
        tl.store(tiles + 2 * place + 1, block)
    if me == 0:
        total = 0
        for first in range(0, sequences, BLOCK):
            other = first + tl.arange(0, BLOCK)
            total += tl.sum(tl.cdiv(_lens(query_indptr, other, other < sequences), TILE))
        for first in range(total, count, FILL):
            unused = first + tl.arange(0, FILL)
            tl.store(tiles + 2 * unused, -1, mask=unused < count)


@triton.jit
def _attend_steps(
    top, total, sums, queries, rope_queries, keys, rope_keys, values, kv_head, key_start, start, stop, kv_len, seen,
    scale,
    NOPE: tl.constexpr, ROPE: tl.constexpr, V_DIM: tl.constexpr, STEP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    position = tl.arange(0, STEP)
    for first in tl.range(start, stop, STEP):
        at = key_start + first
        logits = tl.dot(queries, keys.load([at, kv_head, 0]).reshape(STEP, NOPE).T)
        if ROPE > 0:
            logits = tl.dot(rope_queries, rope_keys.load([at, kv_head, 0]).reshape(STEP, ROPE).T, logits)
        value_rows = values.load([at, kv_head, 0]).reshape(STEP, V_DIM)
        if MASKED:
            token = first + position
            logits = tl.where(token[None, :] < seen[:, None], logits, float("-inf"))
            value_rows = tl.where((token < kv_len)[:, None], value_rows, 0.0)
        higher = tl.maximum(top, tl.max(logits, 1) * scale)
        base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        weights, kept = tl.exp2(logits * scale - base[:, None]), tl.exp2(top - base)
        total = total * kept + tl.sum(weights, 1)
        sums = tl.dot(weights.to(value_rows.dtype), value_rows, sums * kept[:, None])
        top = higher
    return top, total, sums


@triton.jit(do_not_specialize=["out_row"])
def attend_ragged(
    queries, rope_queries, keys, rope_keys, values, out, lse, tiles, query_indptr, kv_indptr, scale, out_row,
    HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, V_DIM: tl.constexpr, V_COLUMNS: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, CAUSAL: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Attend with one tile of query rows. ``queries``, ``keys`` and ``values`` are descriptors ``[rows, heads, dim]``.

    ``NOPE``, ``ROPE`` and ``V_DIM`` are widths of blocks, powers of two; columns behind a descriptor's last are zeros.
    """
    head, me = tl.program_id(0), tl.program_id(1)
    sequence, block = tl.load(tiles + 2 * me), tl.load(tiles + 2 * me + 1)
    if sequence >= 0:
        start, key_start = tl.load(query_indptr + sequence), tl.load(kv_indptr + sequence)
        new = tl.load(query_indptr + sequence + 1) - start
        kv_len = tl.load(kv_indptr + sequence + 1) - key_start
        row = block * TILE + tl.arange(0, TILE)
        q_rows = queries.load([start + block * TILE, head, 0]).reshape(TILE, NOPE)
        rope_rows = q_rows
        if ROPE > 0:
            rope_rows = rope_queries.load([start + block * TILE, head, 0]).reshape(TILE, ROPE)
        if CAUSAL:
            before = kv_len - new
            seen = tl.minimum(before + row + 1, kv_len)
            end = tl.maximum(tl.minimum(before + (block + 1) * TILE, kv_len), 0)
            clear = tl.maximum(tl.minimum(before + block * TILE + 1, kv_len), 0) // STEP * STEP
        else:
            seen = tl.zeros([TILE], tl.int32) + kv_len
            end = kv_len
            clear = kv_len // STEP * STEP
        top = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        sums = tl.zeros([TILE, V_DIM], tl.float32)
        top, total, sums = _attend_steps(
            top, total, sums, q_rows, rope_rows, keys, rope_keys, values, head, key_start, 0, clear, kv_len, seen,
            scale, NOPE, ROPE, V_DIM, STEP, False,
        )  # fmt: skip
        top, total, sums = _attend_steps(
            top, total, sums, q_rows, rope_rows, keys, rope_keys, values, head, key_start, clear, end, kv_len, seen,
            scale, NOPE, ROPE, V_DIM, STEP, True,
        )  # fmt: skip
        live = row < new
        total = tl.where(total == 0, 1.0, total)  # no key is seen: zeros, and a log-sum-exp of -inf
        result = sums / total[:, None]
        column = tl.arange(0, V_DIM)
        place = (start + row).to(tl.int64) * out_row + head * V_COLUMNS
        mask = live[:, None] & (column < V_COLUMNS)[None, :]
        tl.store(out + place[:, None] + column[None, :], result.to(out.dtype.element_ty), mask=mask)
        if LSE:
            tl.store(lse + (start + row).to(tl.int64) * HEADS + head, (top + tl.log2(total)) * _LN_2, mask=live)
