"""Products of up to 64 rows with a large matrix, streamed through shared memory to the tensor cores.

As in ``tiled_gemm`` the matrix is the first factor. Its tiles are copied asynchronously several iterations ahead,
without registers, so that a program has more of it in flight than those kernels can hold, and reads the input less
often. A gate and a residual need no launches of their own here either. A norm does: with this many rows, every program
would compute it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_engine.kernels.gemm_epilogue import finish


@triton.jit(do_not_specialize=["rows", "columns"])
def _streamed_gemm(
    out, x, weight, bias, onto, rows, columns, out_stride, x_stride, onto_stride,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, ONTO: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``BLOCK_N`` columns of the result, as in ``skinny_gemm``. Rows of the gate and of ``up`` alternate in one
    tile."""
    PARTS: tl.constexpr = 2 if GATED else 1
    if EARLY:
        gdc_launch_dependents()
    first = tl.program_id(0) * BLOCK_N
    line = tl.arange(0, PARTS * BLOCK_N)
    place = first + line // PARTS
    lines = weight + (place + line % PARTS * columns).to(tl.int64)[:, None] * K
    exists = (place < columns)[:, None]
    row = tl.arange(0, ROWS)
    inputs = x + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * x_stride  # rows behind the last repeat it
    total = tl.zeros([PARTS * BLOCK_N, ROWS], tl.float32)
    if EARLY:
        gdc_wait()
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK_K)[None, :]
        if K % BLOCK_K == 0:
            weights = tl.load(lines + column, mask=exists, other=0.0, eviction_policy="evict_first")
            values = tl.load(inputs + column)
        else:
            there = column < K
            weights = tl.load(lines + column, mask=exists & there, other=0.0, eviction_policy="evict_first")
            values = tl.load(inputs + column, mask=there, other=0.0)
        total = tl.dot(weights, tl.trans(values), acc=total)
    total_up = total
    if GATED:
        total, total_up = tl.split(tl.permute(total.reshape(BLOCK_N, 2, ROWS), (0, 2, 1)))
    finish(
        total, total_up, total, out, bias, onto, first + tl.arange(0, BLOCK_N), row, rows, columns, out_stride,
        onto_stride, 0.0, K, GATED, False, BIAS, ONTO,
    )  # fmt: skip
