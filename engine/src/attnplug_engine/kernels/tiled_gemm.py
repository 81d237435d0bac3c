"""Products of up to 16 rows with a large matrix on tensor cores, also bound by the time to read the matrix.

The matrix is the first factor, so that its rows fill a tile and the few rows of the input fill the other side. Each
warp multiplies a part of the columns, and the parts are summed at the end: a program has few rows of the matrix,
because otherwise there would be fewer programs than multiprocessors. As in ``skinny_gemm``, the first weights are
loaded before the kernel waits for its input, and a norm, a gate and a residual need no launches of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_engine.kernels.gemm_epilogue import finish


@triton.jit
def _weights(weight, number, pair, columns, PAIRS: tl.constexpr):
    """Load ``[warps, block_n, pairs]`` of the matrix, two elements in 32 bits. They are not read again in this step."""
    at = weight + number.to(tl.int64)[None, :, None] * PAIRS + pair[:, None, :]
    there = (number < columns)[None, :, None] & (pair < PAIRS)[:, None, :]
    return tl.load(at, mask=there, other=0, eviction_policy="evict_first")


@triton.jit
def _halves(pairs, TYPE: tl.constexpr):
    """Return both elements of each pair, of a 16-bit dtype."""
    return pairs.to(tl.int16).to(TYPE, bitcast=True), (pairs >> 16).to(tl.int16).to(TYPE, bitcast=True)


@triton.jit
def _onto(total, pairs, first, second):
    """Add the products of a matrix's pairs with both halves of the input ``[warps, pairs, rows]`` to ``total``."""
    even, odd = _halves(pairs, first.dtype)
    return tl.dot(odd, second, acc=tl.dot(even, first, acc=total))


@triton.jit(do_not_specialize=["rows", "columns"])
def _tiled_gemm(
    out, x, weight, bias, onto, gain, rows, columns, out_stride, x_stride, onto_stride, eps,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WARPS: tl.constexpr,
    BFLOAT16: tl.constexpr,
    GATED: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, ONTO: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``BLOCK_N`` columns of the result, as in ``skinny_gemm``; each warp has an equal part of every ``BLOCK_K`` input
    columns."""
    TYPE: tl.constexpr = tl.bfloat16 if BFLOAT16 else tl.float16
    PAIRS: tl.constexpr = K // 2
    BLOCK: tl.constexpr = BLOCK_K // 2
    PART: tl.constexpr = BLOCK // WARPS
    if EARLY:
        gdc_launch_dependents()
    number = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    place = tl.arange(0, WARPS)[:, None] * PART + tl.arange(0, PART)[None, :]
    upper = weight + columns.to(tl.int64) * PAIRS  # rows of ``up``; those before are rows of ``gate``
    ahead = _weights(weight, number, place, columns, PAIRS)
    if GATED:
        ahead_up = _weights(upper, number, place, columns, PAIRS)
    if EARLY:
        gdc_wait()
    row = tl.arange(0, ROWS)
    line = x + tl.minimum(row, rows - 1)[None, :, None] * x_stride  # rows behind the last repeat it and are not stored
    parts = tl.zeros([WARPS, BLOCK_N, ROWS], tl.float32)
    parts_up = tl.zeros([WARPS, BLOCK_N, ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for start in tl.static_range(0, PAIRS, BLOCK):
        pair = start + place
        held = ahead
        if GATED:
            held_up = ahead_up
        if start + BLOCK < PAIRS:
            ahead = _weights(weight, number, pair + BLOCK, columns, PAIRS)
            if GATED:
                ahead_up = _weights(upper, number, pair + BLOCK, columns, PAIRS)
        first, second = _halves(tl.load(line + pair[:, None, :], mask=(pair < PAIRS)[:, None, :], other=0), TYPE)
        if NORM:
            a, b = first.to(tl.float32), second.to(tl.float32)
            squares += tl.sum(tl.sum(a * a + b * b, 2), 0)
            there = pair < PAIRS
            first_gain = tl.load(gain + 2 * pair, mask=there, other=0.0).to(tl.float32)
            second_gain = tl.load(gain + 2 * pair + 1, mask=there, other=0.0).to(tl.float32)
            first = (a * first_gain[:, None, :]).to(TYPE)
            second = (b * second_gain[:, None, :]).to(TYPE)
        first, second = tl.permute(first, (0, 2, 1)), tl.permute(second, (0, 2, 1))
        parts = _onto(parts, held, first, second)
        if GATED:
            parts_up = _onto(parts_up, held_up, first, second)
    total, total_up = tl.sum(parts, 0), tl.sum(parts_up, 0)
    finish(
        total, total_up, squares, out, bias, onto, number, row, rows, columns, out_stride, onto_stride, eps,
        K, GATED, NORM, BIAS, ONTO,
    )  # fmt: skip
