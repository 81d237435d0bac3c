"""Products of few rows with a large matrix, bound by the time to read the matrix.

A program holds some rows of the matrix in registers: many loads are in flight at once, and they are issued before the
kernel waits for its input. A norm of the input and a residual need no launches of their own. The norm's factor is one
number per row, so it is applied to the result; sums are float32. Some products of one row are faster with
``preloaded_gemm``. With more rows, ``tiled_gemm``, ``streamed_gemm`` or a library is faster: ``gemm_tiles`` chooses.
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
from attnplug_engine.kernels.streamed_gemm import _streamed_gemm
from attnplug_engine.kernels.tiled_gemm import _tiled_gemm


@triton.jit
def _weights(weight, number, pair, columns, PAIRS: tl.constexpr):
    """Load ``[block_n, block_k / 2]`` pairs of the matrix, with eviction priority: they are not read again in this
    step."""
    at = weight + number.to(tl.int64)[:, None] * PAIRS + pair[None, :]
    there = (number < columns)[:, None] & (pair < PAIRS)[None, :]
    return tl.load(at, mask=there, other=0, eviction_policy="evict_first")


@triton.jit
def _halves(pairs, BFLOAT16: tl.constexpr):
    """Return both elements of each pair in float32."""
    if BFLOAT16:  # bfloat16 is the upper half of a float32
        first = (pairs << 16).to(tl.float32, bitcast=True)
        second = (pairs & -65536).to(tl.float32, bitcast=True)
    else:
        first = pairs.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        second = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return first, second


@triton.jit(do_not_specialize=["rows", "columns"])
def _skinny_gemm(
    out, x, weight, bias, onto, gain, rows, columns, out_stride, x_stride, onto_stride, eps,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BFLOAT16: tl.constexpr,
    GATED: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, ONTO: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``BLOCK_N`` columns of the result. Blocks of input columns are processed in order, with weights loaded a block
    ahead.

    Input and weights are loaded as pairs of 32 bits: 16-bit elements would be unpacked right after their load, so the
    kernel would wait for weights before it waits for the input.
    """
    PAIRS: tl.constexpr = K // 2
    BLOCK: tl.constexpr = BLOCK_K // 2
    if EARLY:
        gdc_launch_dependents()
    number = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    place = tl.arange(0, BLOCK)
    upper = weight + columns.to(tl.int64) * PAIRS  # rows of ``up``; those before are rows of ``gate``
    ahead = _weights(weight, number, place, columns, PAIRS)
    if GATED:
        ahead_up = _weights(upper, number, place, columns, PAIRS)
    if EARLY:
        gdc_wait()
    row = tl.arange(0, ROWS)
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    total_up = tl.zeros([BLOCK_N, ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for start in tl.static_range(0, PAIRS, BLOCK):
        pair = start + place
        first, second = _halves(ahead, BFLOAT16)
        if GATED:
            first_up, second_up = _halves(ahead_up, BFLOAT16)
        if start + BLOCK < PAIRS:
            ahead = _weights(weight, number, pair + BLOCK, columns, PAIRS)
            if GATED:
                ahead_up = _weights(upper, number, pair + BLOCK, columns, PAIRS)
        if NORM:
            column = 2 * start + tl.arange(0, BLOCK_K)
            gains = tl.load(gain + column, mask=column < K, other=0.0).to(tl.float32)
            first_gain, second_gain = tl.split(gains.reshape(1, BLOCK, 2))
        for index in tl.static_range(ROWS):
            # Rows behind the last repeat it and are not stored.
            line = x + tl.minimum(index, rows - 1) * x_stride
            a, b = _halves(tl.load(line + pair[None, :], mask=(pair < PAIRS)[None, :], other=0), BFLOAT16)
            here = row == index
            if NORM:
                squares = tl.where(here, squares + tl.sum(tl.sum(a * a + b * b, 1), 0), squares)
                a *= first_gain
                b *= second_gain
            total = tl.where(here[None, :], total + tl.sum(first * a + second * b, 1)[:, None], total)
            if GATED:
                total_up = tl.where(
                    here[None, :], total_up + tl.sum(first_up * a + second_up * b, 1)[:, None], total_up
                )
    finish(
        total, total_up, squares, out, bias, onto, number, row, rows, columns, out_stride, onto_stride, eps,
        K, GATED, NORM, BIAS, ONTO,
    )  # fmt: skip


def aligned(x: Tensor) -> Tensor:
    """Return 16-bit rows that begin at multiples of 4 bytes: ``x [rows, K]`` or a copy."""
    if x.stride(1) == 1 and x.stride(0) % 2 == 0 and x.storage_offset() % 2 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)  # contiguous() returns one row as it is, with any stride


def skinny_gemm(
    x: Tensor,
    weight: Tensor,
    config: GemmConfig,
    *,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    onto: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return ``x [rows, K]`` times ``weight [N, K]`` transposed: ``[rows, N]`` in ``dtype``, by default that of ``x``.

    ``norm`` is the weight and epsilon of an RMS norm of ``x``. ``gated`` computes ``silu(gate) * up`` of ``N = [gate |
    up]``, so the result has half as many columns. The result is added to ``onto [rows, N]``.
    """
    x = aligned(x)
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    if onto is not None and onto.stride(1) != 1:
        onto = onto.contiguous()
    out = torch.empty(rows, outputs, dtype=x.dtype if dtype is None else dtype, device=x.device)
    programs = (triton.cdiv(outputs, config.block_n),)
    if config.preloads:
        preloaded_gemm(x, weight, config, out, bias=bias, norm=norm, gated=gated, onto=onto)
        return out
    if config.stages:
        if norm is not None:
            x = rms_norm(x, *norm)
        _streamed_gemm[programs](
            out, x, weight,
            x if bias is None else bias,
            x if onto is None else onto,
            rows, outputs,
            out.stride(0), x.stride(0),
            0 if onto is None else onto.stride(0),
            K=inputs,
            ROWS=max(triton.next_power_of_2(rows), 16),
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            STAGES=config.stages,
            GATED=gated,
            BIAS=bias is not None,
            ONTO=onto is not None,
            num_warps=config.warps,
            **launch_options(x.device),
        )  # fmt: skip
        return out
    gain, eps = (x, 0.0) if norm is None else norm
    kernel, shape = _skinny_gemm, {"ROWS": triton.next_power_of_2(rows)}
    if config.tiles:
        kernel, shape = _tiled_gemm, {"ROWS": max(triton.next_power_of_2(rows), 8), "WARPS": config.warps}
    kernel[programs](
        out, x.view(torch.int32), weight.view(torch.int32),
        x if bias is None else bias,
        x if onto is None else onto,
        gain, rows, outputs,
        out.stride(0), x.stride(0) // 2,
        0 if onto is None else onto.stride(0),
        eps,
        K=inputs,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        BFLOAT16=x.dtype is torch.bfloat16,
        GATED=gated,
        NORM=norm is not None,
        BIAS=bias is not None,
        ONTO=onto is not None,
        **shape,
        num_warps=config.warps,
        **launch_options(x.device),
    )  # fmt: skip
    return out
