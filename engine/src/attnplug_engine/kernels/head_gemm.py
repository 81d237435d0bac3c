"""Per-head matrix products in one launch, for absorbed MLA.

A library's batched product needs heads as the first dimension, which requires copies of queries and results.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_engine.kernels import launch_options


@triton.jit(do_not_specialize=["rows"])
def _by_head(
    out, x, weight, rows, out_stride, out_head_stride, x_stride, x_head_stride,
    W_HEAD: tl.constexpr, W_IN: tl.constexpr, W_OUT: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    COPIED: tl.constexpr, ROWS: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCK_OUT: tl.constexpr,
    BLOCK_COPIED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute a tile of one head's outputs. The first program of a head copies the inputs that are not multiplied."""
    head, block = tl.program_id(0), tl.program_id(1)
    number = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    place = tl.arange(0, BLOCK_IN)
    weights = tl.load(
        weight + head.to(tl.int64) * W_HEAD + number[:, None] * W_OUT + place[None, :] * W_IN,
        mask=(number < OUTPUTS)[:, None] & (place < INPUTS)[None, :],
        other=0.0,
    )
    if EARLY:  # the loads above depend on no other kernel
        gdc_launch_dependents()
        gdc_wait()  # in every program: the next kernel waits only for this one, and may read results of earlier ones
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    x += head * x_head_stride
    out += head * out_head_stride
    source = x + row.to(tl.int64)[:, None] * x_stride
    target = out + row.to(tl.int64)[:, None] * out_stride
    live = (row < rows)[:, None]
    values = tl.load(source + place[None, :], mask=live & (place < INPUTS)[None, :], other=0.0)
    total = tl.dot(values, tl.trans(weights))
    tl.store(target + number[None, :], total.to(out.dtype.element_ty), mask=live & (number < OUTPUTS)[None, :])
    if COPIED > 0:
        column = tl.arange(0, BLOCK_COPIED)
        mask = live & (column < tl.where(block == 0, COPIED, 0))[None, :]
        copied = tl.load(source + INPUTS + column[None, :], mask=mask, other=0.0)
        tl.store(target + OUTPUTS + column[None, :], copied, mask=mask)


def multiply_heads(x: Tensor, weight: Tensor, *, invariant: bool = False) -> Tensor:
    """Multiply ``x`` ``[rows, heads, inputs | others]`` by ``weight`` ``[heads, inputs, outputs]`` with any strides.

    Returns ``[rows, heads, outputs | others]``: columns behind a head's inputs are copied. With ``invariant`` the tile
    does not depend on the number of rows.
    """
    if x.stride(2) != 1:
        x = x.contiguous()
    rows, heads, width = x.shape
    inputs, outputs = weight.shape[1:]
    out = x.new_empty(rows, heads, outputs + width - inputs)
    # Even one row is padded to a tensor-core tile: reductions across threads would take twice as long.
    block_rows = 16 if invariant else min(max(triton.next_power_of_2(rows), 16), 32)
    block_in = triton.next_power_of_2(inputs)
    tile = 8_192 if invariant or rows <= block_rows else 16_384
    block_out = min(max(tile // block_in, 16), 128, max(triton.next_power_of_2(outputs), 16))
    _by_head[heads, triton.cdiv(outputs, block_out), triton.cdiv(rows, block_rows)](
        out, x, weight, rows, out.stride(0), out.stride(1), x.stride(0), x.stride(1),
        W_HEAD=weight.stride(0),
        W_IN=weight.stride(1),
        W_OUT=weight.stride(2),
        INPUTS=inputs,
        OUTPUTS=outputs,
        COPIED=width - inputs,
        ROWS=block_rows,
        BLOCK_IN=max(block_in, 16),
        BLOCK_OUT=block_out,
        BLOCK_COPIED=triton.next_power_of_2(max(width - inputs, 1)),
        **launch_options(x.device),
    )  # fmt: skip
    return out
