"""Products of few rows with a large fp8 matrix, bound by the time to read the codes: ``skinny_gemm`` for fp8.

Codes are converted to float32 in registers. Activations are not quantized: that is more exact than the tensor-core
products of ``quantized_gemm``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_engine.kernels import launch_options
from attnplug_engine.kernels.elementwise import rms_norm
from attnplug_engine.kernels.gemm_epilogue import finish
from attnplug_engine.kernels.gemm_tiles import GemmConfig
from attnplug_engine.kernels.preloaded_gemm import preloaded_gemm
from attnplug_engine.kernels.scaled_rows import multiplies_fp8
from attnplug_engine.kernels.skinny_gemm import _halves, _weights, aligned


@triton.jit
def _decode(words, CONVERT: tl.constexpr):
    """Return the four codes of each word in float32. ``CONVERT``: by instructions of SM 89, half a one per code."""
    if CONVERT:
        a, b, c, d = tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high, h0, h1, h2, h3;
            .reg .b32 first, second;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 first, low;
            cvt.rn.f16x2.e4m3x2 second, high;
            mov.b32 {h0, h1}, first;
            mov.b32 {h2, h3}, second;
            cvt.f32.f16 $0, h0;
            cvt.f32.f16 $1, h1;
            cvt.f32.f16 $2, h2;
            cvt.f32.f16 $3, h3;
            }
            """,
            "=f,=f,=f,=f,r", [words], dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        a, b, c, d = _shifted(words), _shifted(words >> 8), _shifted(words >> 16), _shifted(words >> 24)
    return a, b, c, d


@triton.jit
def _shifted(words):
    """Return the lowest code of each word in float32. Its bits, shifted into a float16, are its value / 256."""
    value = words & 0x7F
    bits = ((words & 0x80) << 8) | tl.where(value == 0x7F, 0x7FFF, value << 7)  # 0x7F is NaN
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _vector(pairs, start, BLOCK: tl.constexpr, WORDS: tl.constexpr):
    """Load a vector of 16-bit elements as pairs, two of each word's four: both ``[1, BLOCK]``.

    A thread gets the 16 columns of its 4 words: 4 pairs by each load.
    """
    word = start + tl.arange(0, BLOCK)[None, :]
    at, exists = pairs + word // 4 * 8 + word % 4, word < WORDS
    return tl.load(at, mask=exists, other=0), tl.load(at + 4, mask=exists, other=0)


@triton.jit
def _columns(low, high, BLOCK: tl.constexpr, BFLOAT16: tl.constexpr):
    """Return the elements of a ``_vector`` at each word's codes 0 to 3 in float32, each ``[1, BLOCK]``.

    Pairs change places within a thread only.
    """
    low_first, low_second = tl.split(low.reshape(1, BLOCK // 4, 2, 2))
    high_first, high_second = tl.split(high.reshape(1, BLOCK // 4, 2, 2))
    a, b = _halves(tl.permute(tl.join(low_first, high_first), (0, 1, 3, 2)).reshape(1, BLOCK), BFLOAT16)
    c, d = _halves(tl.permute(tl.join(low_second, high_second), (0, 1, 3, 2)).reshape(1, BLOCK), BFLOAT16)
    return a, b, c, d


@triton.jit
def _scales(
    scales, number, start, K: tl.constexpr, GROUP: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, BLOCK: tl.constexpr
):
    """Load the scales of words of the matrix rows ``number``: ``[len(number), BLOCK]``."""
    WIDTH: tl.constexpr = (K + GROUP - 1) // GROUP
    group = tl.minimum((start * 4 + tl.arange(0, BLOCK // 4) * 16) // GROUP, WIDTH - 1)
    found = tl.load(scales + (number // ROWS_PER_SCALE).to(tl.int64)[:, None] * WIDTH + group[None, :])
    return tl.broadcast_to(found[:, :, None], [number.shape[0], BLOCK // 4, 4]).reshape(number.shape[0], BLOCK)


@triton.jit
def _products(words, scale, a, b, c, d, e, f, g, h, ROWS: tl.constexpr, CONVERT: tl.constexpr):
    """Return the products of matrix rows with the rows ``a`` to ``d`` and, if there are two, ``e`` to ``h``:
    ``[block_n, ROWS]``.

    Both rows are multiplied before the first sum, which synchronizes warps: decoded codes need not be kept.
    """
    first, second, third, fourth = _decode(words, CONVERT)
    one = (first * a + second * b + third * c + fourth * d) * scale
    two = (first * e + second * f + third * g + fourth * h) * scale
    total = tl.sum(one, 1)[:, None]
    if ROWS == 2:
        total = tl.where((tl.arange(0, 2) == 0)[None, :], total, tl.sum(two, 1)[:, None])
    return total


@triton.jit(do_not_specialize=["rows", "columns"])
def _skinny_fp8_gemm(
    out, x, codes, scales, bias, onto, gain, rows, columns, out_stride, x_stride, onto_stride, eps,
    K: tl.constexpr, GROUP: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, SCALE_ROWS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BFLOAT16: tl.constexpr, CONVERT: tl.constexpr, GATED: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, ONTO: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``BLOCK_N`` columns of the result, like ``_skinny_gemm``. Codes are loaded as words of 32 bits.

    ``x`` and ``gain`` are pairs of 16-bit elements. ``SCALE_ROWS`` is 1 if all matrix rows of a program have the same
    scales, else ``BLOCK_N``. ``ROWS`` is 1 or 2.
    """
    WORDS: tl.constexpr = K // 4
    BLOCK: tl.constexpr = BLOCK_K // 4
    if EARLY:
        gdc_launch_dependents()
    first = tl.program_id(0) * BLOCK_N
    number = first + tl.arange(0, BLOCK_N)
    scaled = tl.minimum(first + tl.arange(0, SCALE_ROWS), columns - 1)
    place = tl.arange(0, BLOCK)
    upper = codes + columns.to(tl.int64) * WORDS  # rows of ``up``; those before are rows of ``gate``
    ahead = _weights(codes, number, place, columns, WORDS)
    scale_ahead = _scales(scales, scaled, 0, K, GROUP, ROWS_PER_SCALE, BLOCK)
    if GATED:
        ahead_up = _weights(upper, number, place, columns, WORDS)
        scale_up_ahead = _scales(scales, columns + scaled, 0, K, GROUP, ROWS_PER_SCALE, BLOCK)
    if NORM:
        gain_low, gain_high = _vector(gain, 0, BLOCK, WORDS)
    if EARLY:
        gdc_wait()
    row = tl.arange(0, ROWS)
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    total_up = tl.zeros([BLOCK_N, ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for start in tl.static_range(0, WORDS, BLOCK):
        words, scale, following = ahead, scale_ahead, start + BLOCK
        if GATED:
            words_up, scale_up = ahead_up, scale_up_ahead
        if NORM:
            gain_a, gain_b, gain_c, gain_d = _columns(gain_low, gain_high, BLOCK, BFLOAT16)
        if following < WORDS:
            ahead = _weights(codes, number, following + place, columns, WORDS)
            scale_ahead = _scales(scales, scaled, following, K, GROUP, ROWS_PER_SCALE, BLOCK)
            if GATED:
                ahead_up = _weights(upper, number, following + place, columns, WORDS)
                scale_up_ahead = _scales(scales, columns + scaled, following, K, GROUP, ROWS_PER_SCALE, BLOCK)
            if NORM:
                gain_low, gain_high = _vector(gain, following, BLOCK, WORDS)
        for index in tl.static_range(ROWS):
            # Rows behind the last repeat it and are not stored.
            low, high = _vector(x + tl.minimum(index, rows - 1) * x_stride, start, BLOCK, WORDS)
            a, b, c, d = _columns(low, high, BLOCK, BFLOAT16)
            if NORM:
                sums = tl.sum(tl.sum(a * a + b * b + c * c + d * d, 1), 0)
                squares = tl.where(row == index, squares + sums, squares)
                a *= gain_a
                b *= gain_b
                c *= gain_c
                d *= gain_d
            if index == 0:
                e, f, g, h = a, b, c, d
        total += _products(words, scale, e, f, g, h, a, b, c, d, ROWS, CONVERT)
        if GATED:
            total_up += _products(words_up, scale_up, e, f, g, h, a, b, c, d, ROWS, CONVERT)
    finish(
        total, total_up, squares, out, bias, onto, number, row, rows, columns, out_stride, onto_stride, eps,
        K, GATED, NORM, BIAS, ONTO,
    )  # fmt: skip


def skinny_fp8_gemm(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    config: GemmConfig,
    *,
    group: int | None,
    rows_per_scale: int,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    onto: Tensor | None = None,
) -> Tensor:
    """Return ``x [rows, K]`` times an fp8 matrix ``[N, K]`` transposed: ``[rows, N]`` like ``x``.

    See ``quantized_gemm`` for the arguments. ``K`` and ``group`` are multiples of 16.
    """
    if norm is not None and (norm[0].dtype is not x.dtype or norm[0].data_ptr() % 4):
        x, norm = rms_norm(x, *norm), None
    x = aligned(x)
    gain, eps = (x, 0.0) if norm is None else norm
    (rows, width), parts = x.shape, 2 if gated else 1
    outputs, block_n = codes.shape[0] // parts, config.block_n
    onto = onto if onto is None or onto.stride(1) == 1 else onto.contiguous()
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if config.preloads:
        preloaded_gemm(
            x, codes, config, out, bias=bias, norm=norm, gated=gated, onto=onto,
            scales=scales, group=group, rows_per_scale=rows_per_scale,
        )  # fmt: skip
        return out
    _skinny_fp8_gemm[(triton.cdiv(outputs, block_n),)](
        out, x.view(torch.int32), codes.view(torch.int32), scales,
        x if bias is None else bias,
        x if onto is None else onto,
        gain.view(torch.int32), rows, outputs,
        out.stride(0), x.stride(0) // 2,
        0 if onto is None else onto.stride(0),
        eps,
        K=width,
        GROUP=triton.next_power_of_2(width) if group is None else group,
        ROWS_PER_SCALE=rows_per_scale,
        SCALE_ROWS=block_n if rows_per_scale % block_n or (gated and outputs % block_n) else 1,
        ROWS=triton.next_power_of_2(rows),
        BLOCK_N=block_n,
        BLOCK_K=config.block_k,
        BFLOAT16=x.dtype is torch.bfloat16,
        CONVERT=x.is_cuda and multiplies_fp8(x.device),
        GATED=gated,
        NORM=norm is not None,
        BIAS=bias is not None,
        ONTO=onto is not None,
        num_warps=config.warps,
        **launch_options(x.device),
    )  # fmt: skip
    return out
