"""Products of one or two rows with a large fp8 matrix, bound by the time to read the matrix.

As in ``skinny_gemm``, a program holds some rows of the matrix in registers, the first block is loaded before the kernel
waits for its input, and a norm, a gate and a residual need no launches of their own. Activations are not scaled to fp8.
Four codes are loaded in 32 bits. A code's bits, moved to those of a float32, are its value times ``2 ** -120``: three
integer operations per code, and no conversion. Half of the factor is applied to the input, half to the sum, so that
neither leaves the range of a float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_engine.kernels import launch_options
from attnplug_engine.kernels.gemm_epilogue import finish

_LONGEST = 4096
_TILE = 32_768
"""Codes that a program loads at once: 32 KiB."""


@triton.jit
def _words(codes, number, word, columns, WORDS: tl.constexpr):
    """Load ``[block_n, block_k / 4]`` words of four codes. They are not read again in this step."""
    at = codes + number.to(tl.int64)[:, None] * WORDS + word[None, :]
    there = (number < columns)[:, None] & (word < WORDS)[None, :]
    return tl.load(at, mask=there, other=0, eviction_policy="evict_first")


@triton.jit
def _factors(scales, number, word, columns, WORDS: tl.constexpr, GROUP: tl.constexpr, ROWS_PER_SCALE: tl.constexpr):
    """Load the scale of each word."""
    WIDTH: tl.constexpr = (4 * WORDS + GROUP - 1) // GROUP
    at = scales + (number // ROWS_PER_SCALE).to(tl.int64)[:, None] * WIDTH + (word * 4 // GROUP)[None, :]
    return tl.load(at, mask=(number < columns)[:, None] & (word < WORDS)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _code(words, PLACE: tl.constexpr):
    """Return one of the four codes of each word, times ``2 ** -120``."""
    bits = ((words << (24 - 8 * PLACE)) >> 4) & -2014314496  # 0x87F00000: the sign's copies are cleared
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _quad(at, word, WORDS: tl.constexpr, TYPE: tl.constexpr):
    """Load four consecutive elements of a 16-bit dtype for each word: four tensors ``[1, words]`` float32."""
    found = tl.load(at + word[None, :], mask=(word < WORDS)[None, :], other=0)
    a = found.to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    b = (found >> 16).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    c = (found >> 32).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    d = (found >> 48).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    return a, b, c, d


@triton.jit
def _sum(words, factors, a, b, c, d):
    """Return the scaled sums of products ``[block_n]``, times ``2 ** -120``."""
    total = _code(words, 0) * a + _code(words, 1) * b
    total += _code(words, 2) * c + _code(words, 3) * d
    return tl.sum(total * factors, 1)


@triton.jit(do_not_specialize=["rows", "columns"])
def _quantized_skinny(
    out, x, codes, scales, bias, onto, gain, rows, columns, out_stride, x_stride, onto_stride, eps,
    K: tl.constexpr, GROUP: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BFLOAT16: tl.constexpr, GATED: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    ONTO: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``BLOCK_N`` columns of the result. ``x`` and ``gain`` are loaded as 64-bit words of four elements."""
    TYPE: tl.constexpr = tl.bfloat16 if BFLOAT16 else tl.float16
    WORDS: tl.constexpr = K // 4
    BLOCK: tl.constexpr = BLOCK_K // 4
    HALF: tl.constexpr = 1152921504606846976.0  # 2 ** 60
    if EARLY:
        gdc_launch_dependents()
    number = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    place = tl.arange(0, BLOCK)
    upper = number + columns  # rows of ``up``; those before are rows of ``gate``
    ahead = _words(codes, number, place, columns, WORDS)
    if GATED:
        ahead_up = _words(codes, upper, place, 2 * columns, WORDS)
    if EARLY:
        gdc_wait()
    row = tl.arange(0, ROWS)
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    total_up = tl.zeros([BLOCK_N, ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for start in tl.static_range(0, WORDS, BLOCK):
        word = start + place
        words = ahead
        factors = _factors(scales, number, word, columns, WORDS, GROUP, ROWS_PER_SCALE)
        if GATED:
            words_up = ahead_up
            factors_up = _factors(scales, upper, word, 2 * columns, WORDS, GROUP, ROWS_PER_SCALE)
        if start + BLOCK < WORDS:
            ahead = _words(codes, number, word + BLOCK, columns, WORDS)
            if GATED:
                ahead_up = _words(codes, upper, word + BLOCK, 2 * columns, WORDS)
        if NORM:
            p, q, r, s = _quad(gain, word, WORDS, TYPE)
        for index in tl.static_range(ROWS):
            # Rows behind the last repeat it and are not stored.
            a, b, c, d = _quad(x + tl.minimum(index, rows - 1) * x_stride, word, WORDS, TYPE)
            here = row == index
            if NORM:
                squares = tl.where(here, squares + tl.sum(tl.sum(a * a + b * b + c * c + d * d, 1), 0), squares)
                a, b, c, d = a * p, b * q, c * r, d * s
            a, b, c, d = a * HALF, b * HALF, c * HALF, d * HALF
            total = tl.where(here[None, :], total + _sum(words, factors, a, b, c, d)[:, None], total)
            if GATED:
                total_up = tl.where(here[None, :], total_up + _sum(words_up, factors_up, a, b, c, d)[:, None], total_up)
    finish(
        total * HALF, total_up * HALF, squares, out, bias, onto, number, row, rows,
        columns, out_stride, onto_stride, eps, K, GATED, NORM, BIAS, ONTO,
    )  # fmt: skip


def tile(outputs: int, width: int, parts: int) -> tuple[int, int, int]:
    """Return matrix rows of a program, columns that it loads at once, and warps: as in ``gemm_tiles``, with twice as
    many codes, which have half as many bytes."""
    block_k = min(triton.next_power_of_2(width), _LONGEST)
    block_n = min(max(_TILE // (block_k * parts), 1), 8 // parts)
    return block_n, block_k, 4


def quantized_skinny(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    *,
    group: int | None,
    rows_per_scale: int,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    onto: Tensor | None = None,
) -> Tensor:
    """Return ``x [rows, K]`` times an fp8 matrix ``[N, K]`` transposed: ``[rows, N]`` like ``x``.

    ``norm`` is the weight, in the dtype of ``x``, and epsilon of an RMS norm of ``x``. See ``skinny_gemm`` for the
    others.
    """
    if x.stride(1) != 1 or x.stride(0) % 4 or x.storage_offset() % 4:
        x = x.clone(memory_format=torch.contiguous_format)
    onto = onto if onto is None or onto.stride(1) == 1 else onto.contiguous()
    rows, width = x.shape
    outputs = codes.shape[0] // (2 if gated else 1)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    gain, eps = (x, 0.0) if norm is None else norm
    block_n, block_k, warps = tile(outputs, width, 2 if gated else 1)
    _quantized_skinny[(triton.cdiv(outputs, block_n),)](
        out, x.view(torch.int64), codes.view(torch.int32), scales,
        x if bias is None else bias,
        x if onto is None else onto,
        gain.view(torch.int64),
        rows, outputs,
        out.stride(0), x.stride(0) // 4,
        0 if onto is None else onto.stride(0),
        eps,
        K=width,
        GROUP=triton.next_power_of_2(width) if group is None else group,
        ROWS_PER_SCALE=rows_per_scale,
        ROWS=triton.next_power_of_2(rows),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BFLOAT16=x.dtype is torch.bfloat16,
        GATED=gated,
        NORM=norm is not None,
        BIAS=bias is not None,
        ONTO=onto is not None,
        num_warps=warps,
        **launch_options(x.device),
    )  # fmt: skip
    return out
