"""Products of 3 to 16 rows with a matrix of few rows in fp8, on tensor cores: ``tiled_gemm`` for fp8 codes. From 9 rows
on ``split_gemm`` is faster, unless the matrix has at most 2048 columns.

Activations are not rounded to fp8: codes are decoded in registers to bfloat16. Each warp multiplies a part of the
columns, so a program of 16 matrix rows takes few iterations over K; its first codes are loaded before the kernel waits
for its input.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_engine.kernels import launch_options
from attnplug_engine.kernels.gemm_epilogue import finish
from attnplug_engine.kernels.gemm_tiles import GemmConfig, multiprocessors

FEWEST, MOST = 3, 16
"""Rows of activations."""
CONFIG = GemmConfig(16, 1024, 8, tiles=True)
"""The best on an H200 if all programs run at once (``benchmarks/quantized_products_h200.py``)."""


@triton.jit
def _codes(matrix, word, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Load ``[warps, block_n, words]`` of four codes each. They are not read again in this step."""
    at = matrix + word[:, None, :]
    if WORDS % BLOCK == 0:
        found = tl.load(at, eviction_policy="evict_first")
    else:
        found = tl.load(at, mask=(word < WORDS)[:, None, :], other=0, eviction_policy="evict_first")
    return found


@triton.jit
def _decoded(words, NATIVE: tl.constexpr):
    """Decode the four codes of each word to four tensors: bfloat16 if ``NATIVE``, two words at a time, else float32.

    A code's bits, shifted into a bfloat16, are its value times 2 ** -120. NaN would become 480, so the first tensor has
    NaN for words with a code that is NaN: a dot of the word is NaN then.
    """
    if NATIVE:
        a, b, c, d = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, c, d, e, f, g, h, scale, zero;
            prmt.b32 a, $4, $5, 0x4400;
            prmt.b32 b, $4, $5, 0x5511;
            prmt.b32 c, $4, $5, 0x6622;
            prmt.b32 d, $4, $5, 0x7733;
            shr.u32 e, a, 4;
            shr.u32 f, b, 4;
            shr.u32 g, c, 4;
            shr.u32 h, d, 4;
            and.b32 e, e, 0x07f007f0;
            and.b32 f, f, 0x07f007f0;
            and.b32 g, g, 0x07f007f0;
            and.b32 h, h, 0x07f007f0;
            lop3.b32 a, a, 0x80008000, e, 0xea;
            lop3.b32 b, b, 0x80008000, f, 0xea;
            lop3.b32 c, c, 0x80008000, g, 0xea;
            lop3.b32 d, d, 0x80008000, h, 0xea;
            mov.b32 scale, 0x7b807b80;
            mov.b32 zero, 0x80008000;
            fma.rn.bf16x2 $0, a, scale, zero;
            fma.rn.bf16x2 $1, b, scale, zero;
            fma.rn.bf16x2 $2, c, scale, zero;
            fma.rn.bf16x2 $3, d, scale, zero;
            }
            """,
            "=&r,=&r,=&r,=&r,r,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        a, b, c, d = _wide(words), _wide(words >> 8), _wide(words >> 16), _wide(words >> 24)
    # Of all codes, only NaN (0x7F) carries into its byte's sign bit. The mask is 0x80808080 as int32.
    nan = ((words & 0x7F7F7F7F) + 0x01010101) & -0x7F7F7F80
    return tl.where(nan != 0, float("nan"), a).to(a.dtype), b, c, d


@triton.jit
def _wide(code):
    """Decode the lowest byte to float32."""
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120


@triton.jit
def _quarter(words, shift: tl.constexpr, NATIVE: tl.constexpr):
    """Return one of the four elements of each 64-bit word."""
    return (words >> shift).to(tl.int16).to(tl.bfloat16 if NATIVE else tl.float16, bitcast=True)


@triton.jit(do_not_specialize=["rows", "columns"])
def _tiled_fp8_gemm(
    out, x, codes, scales, bias, onto, gain, rows, columns, out_stride, x_stride, onto_stride, eps,
    K: tl.constexpr, GROUP: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    PART: tl.constexpr, WARPS: tl.constexpr, NATIVE: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, ONTO: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``BLOCK_N`` columns of the result. ``codes`` are 32-bit words, ``x`` 64-bit words of four elements.

    A warp multiplies ``PART`` words of each block. All rows of a program share their scales, unless there is one scale
    for all columns of a row. Scales are multiplied into sums if a part has one, else into the input.
    """
    TYPE: tl.constexpr = tl.bfloat16 if NATIVE else tl.float32
    WORDS: tl.constexpr = K // 4
    BLOCK: tl.constexpr = WARPS * PART
    WIDTH: tl.constexpr = (K + GROUP - 1) // GROUP
    SUMS: tl.constexpr = WIDTH > 1 and PART == 32 and GROUP % 128 == 0
    if EARLY:
        gdc_launch_dependents()
    first = tl.program_id(0) * BLOCK_N
    number = first + tl.arange(0, BLOCK_N)
    warp = tl.arange(0, WARPS)
    place = warp[:, None] * PART + tl.arange(0, PART)[None, :]
    line = tl.minimum(number, columns - 1)  # rows behind the last repeat it and are not stored
    matrix = codes + line.to(tl.int64)[None, :, None] * WORDS
    factors = scales + first // ROWS_PER_SCALE * WIDTH
    ahead = _codes(matrix, place, WORDS, BLOCK)
    if EARLY:
        gdc_wait()
    row = tl.arange(0, ROWS)
    inputs = x + tl.minimum(row, rows - 1).to(tl.int64)[None, :, None] * x_stride
    parts = tl.zeros([WARPS, BLOCK_N, ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for start in tl.static_range(0, WORDS, BLOCK):
        word = start + place
        held = ahead
        values = tl.load(inputs + word[:, None, :], mask=(word < WORDS)[:, None, :], other=0)
        if start + BLOCK < WORDS:
            ahead = _codes(matrix, word + BLOCK, WORDS, BLOCK)
        if SUMS:
            factor = tl.load(factors + tl.minimum((start // PART + warp) * 128 // GROUP, WIDTH - 1))[:, None, None]
        elif WIDTH > 1:
            factor = tl.load(factors + tl.minimum(4 * word // GROUP, WIDTH - 1))[:, None, :]
        weights = _decoded(held, NATIVE)
        if NORM:
            a, b = _quarter(values, 0, NATIVE).to(tl.float32), _quarter(values, 16, NATIVE).to(tl.float32)
            c, d = _quarter(values, 32, NATIVE).to(tl.float32), _quarter(values, 48, NATIVE).to(tl.float32)
            squares += tl.sum(tl.sum(a * a + b * b + c * c + d * d, 2), 0)
        sums = tl.zeros([WARPS, BLOCK_N, ROWS], tl.float32) if SUMS else parts
        for quarter in tl.static_range(4):
            value = _quarter(values, 16 * quarter, NATIVE)
            if NORM:
                column = 4 * word + quarter
                value = value.to(tl.float32)
                value *= tl.load(gain + column, mask=column < K, other=0.0).to(tl.float32)[:, None, :]
            if WIDTH > 1 and not SUMS:
                value = value.to(tl.float32) * factor
            sums = tl.dot(weights[quarter], tl.permute(value.to(TYPE), (0, 2, 1)), acc=sums)
        parts = parts + sums * factor if SUMS else sums
    total = tl.sum(parts, 0)
    if WIDTH == 1:
        total *= tl.load(scales + line // ROWS_PER_SCALE)[:, None]
    finish(
        total, total, squares, out, bias, onto, number, row, rows, columns, out_stride, onto_stride, eps,
        K, False, NORM, BIAS, ONTO,
    )  # fmt: skip


def choose_tiled(x: Tensor, codes: Tensor, group: int | None, rows_per_scale: int, *, gated: bool) -> GemmConfig | None:
    """Return the configuration of ``tiled_fp8_gemm`` for ``x`` and ``codes``; None if it is not the kernel for them.

    More matrix rows than all multiprocessors take at once would run in two waves. Rows are bfloat16, or float16 in
    Triton's interpreter, which multiplies the bits of bfloat16.
    """
    if not FEWEST <= x.shape[0] <= MOST or gated or codes.shape[0] > CONFIG.block_n * multiprocessors(x.device):
        return None
    if x.dtype is not torch.bfloat16 and (x.dtype, x.device.type) != (torch.float16, "cpu"):
        return None
    if group is not None and (group % 4 or rows_per_scale % CONFIG.block_n):
        return None
    return CONFIG


def tiled_fp8_gemm(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    config: GemmConfig,
    *,
    group: int | None,
    rows_per_scale: int,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    onto: Tensor | None = None,
) -> Tensor:
    """Return ``x [rows, K]`` times a matrix in fp8; see ``quantized_gemm`` for the arguments."""
    if x.stride(1) != 1 or x.stride(0) % 4 or x.storage_offset() % 4:
        x = x.clone(memory_format=torch.contiguous_format)
    (rows, width), outputs = x.shape, codes.shape[0]
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    gain, eps = (x, 0.0) if norm is None else norm
    onto = onto if onto is None or onto.stride(1) == 1 else onto.contiguous()
    _tiled_fp8_gemm[(triton.cdiv(outputs, config.block_n),)](
        out, x.view(torch.int64), codes.view(torch.int32), scales,
        x if bias is None else bias,
        x if onto is None else onto,
        gain, rows, outputs,
        out.stride(0), x.stride(0) // 4,
        0 if onto is None else onto.stride(0),
        eps,
        K=width,
        GROUP=triton.next_power_of_2(width) if group is None else group,
        ROWS_PER_SCALE=rows_per_scale,
        ROWS=max(triton.next_power_of_2(rows), 8),
        BLOCK_N=config.block_n,
        PART=config.block_k // (4 * config.warps),
        WARPS=config.warps,
        NATIVE=x.dtype is torch.bfloat16,
        NORM=norm is not None,
        BIAS=bias is not None,
        ONTO=onto is not None,
        num_warps=config.warps,
        **launch_options(x.device),
    )  # fmt: skip
    return out
