"""Epilogue of all skinny matrix products: the norm's factor, a bias, a gate, a residual."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finish(
    total, total_up, squares, out, bias, onto, number, row, rows, columns, out_stride, onto_stride, eps,
    K: tl.constexpr, GATED: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, ONTO: tl.constexpr,
):  # fmt: skip
    """Store ``total [block_n, rows]``; ``squares [rows]`` are the sums of squares of the norm."""
    exists = number < columns
    if NORM:
        factor = tl.rsqrt(squares / K + eps)[None, :]
        total *= factor
        total_up *= factor
    if BIAS:
        total += tl.load(bias + number, mask=exists, other=0.0).to(tl.float32)[:, None]
        if GATED:
            total_up += tl.load(bias + columns + number, mask=exists, other=0.0).to(tl.float32)[:, None]
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * total_up
    live = exists[:, None] & (row < rows)[None, :]
    if ONTO:
        total += tl.load(onto + row[None, :] * onto_stride + number[:, None], mask=live, other=0.0).to(tl.float32)
    tl.store(out + row[None, :] * out_stride + number[:, None], total.to(out.dtype.element_ty), mask=live)


@triton.jit
def finish_part(
    total, squares, sums, counters, block, out, bias, onto, number, row, rows, columns, out_stride, onto_stride, eps,
    K: tl.constexpr, PARTS: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, ONTO: tl.constexpr,
):  # fmt: skip
    """``finish`` for one of ``PARTS`` parts of the sum over K: the last program of a block adds all parts in order.

    ``sums`` has ``total`` and ``squares`` of every program. ``counters`` has a counter for each block: zero before and
    after.
    """
    if PARTS == 1:
        finish(
            total, total, squares, out, bias, onto, number, row, rows, columns, out_stride, onto_stride, eps,
            K, False, NORM, BIAS, ONTO,
        )  # fmt: skip
    else:
        BLOCK_N: tl.constexpr = total.shape[0]
        ROWS: tl.constexpr = total.shape[1]
        # The order of ``out``: sums need not be moved between threads for the result.
        place = tl.arange(0, ROWS)[None, :] * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
        lower = BLOCK_N * ROWS + tl.arange(0, ROWS)
        own = sums + tl.program_id(0) * ((BLOCK_N + 1) * ROWS)
        tl.store(own + place, total)
        if NORM:
            tl.store(own + lower, squares)
        # The barrier orders a program's stores before its count, which has acquire and release semantics. So the last
        # program to count reads what all have stored.
        tl.debug_barrier()
        if tl.atomic_add(counters + block, 1, sem="acq_rel", scope="gpu") == PARTS - 1:
            parts = sums + block * (PARTS * (BLOCK_N + 1) * ROWS)
            # Reads bypass the L1 cache, which is not coherent with other multiprocessors' writes.
            total = tl.load(parts + place, cache_modifier=".cg")
            if NORM:
                squares = tl.load(parts + lower, cache_modifier=".cg")
            for part in tl.static_range(1, PARTS):
                at = parts + part * ((BLOCK_N + 1) * ROWS)
                total += tl.load(at + place, cache_modifier=".cg")
                if NORM:
                    squares += tl.load(at + lower, cache_modifier=".cg")
            finish(
                total, total, squares, out, bias, onto, number, row, rows, columns, out_stride, onto_stride, eps,
                K, False, NORM, BIAS, ONTO,
            )  # fmt: skip
            tl.store(counters + block, 0)
