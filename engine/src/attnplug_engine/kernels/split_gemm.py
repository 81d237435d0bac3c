"""Products of 9 to 64 rows with a matrix of few rows. Its columns are divided among programs (split-K).

A matrix of few rows has few blocks of 64, and with smaller blocks all programs together read the input more often than
the matrix. So a program multiplies some columns of a block. Partial sums go to scratch memory in float32, and the
program that finishes a block last adds them in the order of their columns: results are deterministic.

The matrix is the first factor of the tensor cores. Its tiles and those of the input are copied asynchronously. It has
16-bit elements, or fp8 codes, which are converted to the dtype of the input in registers: scaling the input to fp8
instead is at most 8 % faster (H200), and rounds it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_engine.kernels import launch_options, shared_memory
from attnplug_engine.kernels.gemm_epilogue import finish_part
from attnplug_engine.kernels.quantized_tiles import prefetch
from attnplug_engine.kernels.scaled_rows import multiplies_fp8

FEWEST, MOST = 9, 64
"""Rows of the input."""
LEAST_BLOCK = 16
"""Smallest number of matrix rows in a block."""


@dataclass(frozen=True, slots=True)
class SplitConfig:
    """Tile sizes and launch parameters: matrix rows of a block, columns of a tile (128 of codes), parts of the columns,
    warps, and tiles that are copied ahead.

    ``prefetch`` is the maximum number of cache lines (128 bytes) of each matrix row that a program prefetches before it
    waits for its input.
    """

    block_n: int
    block_k: int
    parts: int
    warps: int
    stages: int
    prefetch: int = 0

    def prefetched(self, columns: int, element: int) -> int:
        """Return the number of cache lines, a power of two or 0, that all parts of ``columns`` columns have."""
        parts, size = divided(columns, self.parts, self.block_k)
        smallest = (columns - (parts - 1) * size) * element // 128  # the last part
        lines = min(self.prefetch, smallest)
        return 1 << lines.bit_length() - 1 if lines else 0

    def fitting_stages(self, rows: int, element: int, room: int) -> int:
        """Return the number of stages for which ``room`` bytes of shared memory are enough, at least 2. Matrix elements
        have ``element`` bytes."""
        padded: int = max(triton.next_power_of_2(rows), 16)
        stage = self.block_k * (element * self.block_n + 2 * padded)
        return max(min(self.stages, (room - 4096) // stage), 2)


Table = tuple[tuple[int, int, int, SplitConfig | None], ...]
"""Entries: maximum number of rows of the input, of the matrix, and of its columns; then a configuration, or None if
another kernel is faster. The first match applies. Measured with 16 and 64 rows on an H200
(``benchmarks/split_products_h200.py``)."""
PLAIN: Table = (
    (16, 2304, 2048, SplitConfig(64, 128, 4, 4, 6, prefetch=32)),
    (16, 2304, 8192, SplitConfig(64, 128, 4, 4, 6)),
)
"""Configurations for 16-bit elements. With 64 rows, (64, 128, 4, 4, 4) takes 0.91 to 0.96 of the library's time alone,
but a decode step of a 1.1B model takes 1.027 times as long with it: the library adds the residual in place (H200)."""
CODES: Table = (
    (16, 2304, 2048, None),
    (16, 4096, 2048, SplitConfig(64, 128, 4, 8, 4, prefetch=16)),
    (16, 2304, 8192, SplitConfig(64, 128, 16, 4, 3, prefetch=16)),
    (64, 2304, 2048, SplitConfig(64, 128, 4, 4, 4, prefetch=16)),
    (64, 4096, 2048, SplitConfig(128, 128, 4, 8, 4, prefetch=16)),
    (64, 2304, 8192, SplitConfig(64, 128, 8, 4, 4)),
)
"""Configurations for fp8 codes."""


def choose_split(
    x: Tensor, weight: Tensor, *, group: int | None = None, rows_per_scale: int = 1, normed: bool = False
) -> SplitConfig | None:
    """Return the configuration for these tensors; None if the kernel does not support them, or another is faster.

    Rows are bfloat16, or float16 in Triton's interpreter. A weight of another dtype has fp8 codes. A norm takes the
    programs longer than they save with 16-bit elements: 3072 × 2048 takes 12.2 instead of 7.8 µs with 16 rows, and 17.8
    instead of 8.2 with 64 (H200).
    """
    if x.dim() != 2 or (normed and weight.dtype == x.dtype):
        return None
    (rows, width), outputs, codes = x.shape, weight.shape[0], weight.dtype != x.dtype
    if not FEWEST <= rows <= MOST or (x.dtype, x.device.type) not in ((torch.bfloat16, "cuda"), (torch.float16, "cpu")):
        return None
    if not weight.is_contiguous() or width % (16 if codes else 8) or (codes and not multiplies_fp8(x.device)):
        return None
    found = (
        config
        for most, highest, widest, config in (CODES if codes else PLAIN)
        if rows <= most and outputs <= highest and width <= widest
    )
    config = next(found, None)
    if config is not None and group is not None and (group % 128 or rows_per_scale % config.block_n):
        return None
    return config


@triton.jit(do_not_specialize=["rows", "columns"])
def _split_gemm(
    out, x, weight, scales, bias, onto, gain, sums, counters, rows, columns, out_stride, x_stride,
    onto_stride, eps,
    K: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, ROWS_PER_SCALE: tl.constexpr,
    CODES: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    LINES: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, ONTO: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``PART`` columns of a block of ``BLOCK_N`` matrix rows, times ``ROWS`` rows of ``x``. Programs of a block are
    neighbours.

    All matrix rows of a block share their scales, unless there is one scale for all columns of a row.
    """
    WHOLE: tl.constexpr = K % PART == 0
    WIDTH: tl.constexpr = (K + GROUP - 1) // GROUP
    if EARLY:
        gdc_launch_dependents()
    block, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    begin = part * PART
    first = block * BLOCK_N
    number = first + tl.arange(0, BLOCK_N)
    line = tl.minimum(number, columns - 1)  # rows behind the last repeat it and are not stored
    matrix = weight + line.to(tl.int64)[:, None] * K + begin
    if EARLY and LINES > 0:
        prefetch(weight + begin, line, K * (1 if CODES else 2), LINES)
    factors = scales + first // ROWS_PER_SCALE * WIDTH
    if CODES and WIDTH > 1:
        factor = tl.load(factors + tl.minimum(begin // GROUP, WIDTH - 1))
    if EARLY:
        gdc_wait()
    row = tl.arange(0, ROWS)
    inputs = x + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * x_stride + begin
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for start in tl.range(0, PART, BLOCK_K, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK_K)
        following = tl.minimum(begin + start + BLOCK_K, K - 1)
        if WHOLE:
            weights = tl.load(matrix + column[None, :], eviction_policy="evict_first")
            values = tl.load(inputs + column[None, :])
        else:
            there = begin + column < K
            weights = tl.load(matrix + column[None, :], mask=there[None, :], other=0.0, eviction_policy="evict_first")
            values = tl.load(inputs + column[None, :], mask=there[None, :], other=0.0)
        if NORM:
            wide = values.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            if WHOLE:
                wide *= tl.load(gain + begin + column).to(tl.float32)[None, :]
            else:
                wide *= tl.load(gain + begin + column, mask=there, other=0.0).to(tl.float32)[None, :]
            values = wide.to(values.dtype)
        if CODES:
            # Not directly: Triton then converts float16 to bfloat16 by an instruction at a quarter of the rate.
            weights = weights.to(tl.float16).to(tl.float32).to(values.dtype)
            own = tl.dot(weights, tl.trans(values))
            if WIDTH > 1:
                own *= factor
                factor = tl.load(factors + tl.minimum(following // GROUP, WIDTH - 1))
            total += own
        else:
            total = tl.dot(weights, tl.trans(values), acc=total)
    if CODES and WIDTH == 1:
        total *= tl.load(scales + line // ROWS_PER_SCALE)[:, None]
    finish_part(
        total, squares, sums, counters, block, out, bias, onto, number, row, rows, columns, out_stride, onto_stride,
        eps, K, PARTS, NORM, BIAS, ONTO,
    )  # fmt: skip


def arrival_counters(outputs: int, device: torch.device) -> Tensor:
    """Return zeroed arrival counters of a matrix with ``outputs`` rows.

    A call leaves them zero. Calls with the same counters must not run at the same time, so each matrix has its own.
    Calls of one stream run one after another. In two-batch overlap, a layer's second half waits for its first one.
    """
    return torch.zeros(triton.cdiv(outputs, LEAST_BLOCK), dtype=torch.int32, device=device)


def divided(width: int, parts: int, block_k: int) -> tuple[int, int]:
    """Return the number of parts with columns, up to ``parts``, and a part's columns, a multiple of ``block_k``."""
    size = triton.cdiv(triton.cdiv(width, parts), block_k) * block_k
    return triton.cdiv(width, size), size


def scratch(programs: int, block_n: int, rows: int, x: Tensor) -> Tensor:
    """Return memory for the partial sums of all programs, on the device of ``x``."""
    return torch.empty(programs * (block_n + 1) * rows, dtype=torch.float32, device=x.device)


def split_gemm(
    x: Tensor,
    weight: Tensor,
    config: SplitConfig,
    counters: Tensor,
    *,
    scales: Tensor | None = None,
    group: int | None = None,
    rows_per_scale: int = 1,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    onto: Tensor | None = None,
) -> Tensor:
    """Return ``x [rows, K]`` times ``weight [N, K]`` transposed: ``[rows, N]`` like ``x``.

    ``counters`` are ``arrival_counters`` of the weight. ``scales``, ``group`` and ``rows_per_scale`` belong to a weight
    of fp8 codes, see ``quantized_gemm``. ``norm`` is the weight and epsilon of an RMS norm of ``x``. The result is
    added to ``onto [rows, N]``.
    """
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    (rows, width), outputs = x.shape, weight.shape[0]
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    onto = onto if onto is None or onto.stride(1) == 1 else onto.contiguous()
    gain, eps = (x, 0.0) if norm is None else norm
    parts, size = divided(width, config.parts, config.block_k)
    padded, blocks = max(triton.next_power_of_2(rows), 16), triton.cdiv(outputs, config.block_n)
    sums = scratch(blocks * parts, config.block_n, padded, x) if parts > 1 else x
    _split_gemm[(blocks * parts,)](
        out, x, weight, x if scales is None else scales,
        x if bias is None else bias,
        x if onto is None else onto,
        gain, sums, counters, rows, outputs,
        out.stride(0), x.stride(0),
        0 if onto is None else onto.stride(0),
        eps,
        K=width,
        PART=size,
        PARTS=parts,
        GROUP=triton.next_power_of_2(width) if group is None else group,
        ROWS_PER_SCALE=rows_per_scale,
        CODES=scales is not None,
        ROWS=padded,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        STAGES=config.fitting_stages(rows, weight.element_size(), shared_memory(x.device)),
        LINES=config.prefetched(width, weight.element_size()),
        NORM=norm is not None,
        BIAS=bias is not None,
        ONTO=onto is not None,
        num_warps=config.warps,
        **launch_options(x.device),
    )  # fmt: skip
    return out
