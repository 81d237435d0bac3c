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
