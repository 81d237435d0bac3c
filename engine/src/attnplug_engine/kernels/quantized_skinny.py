"""Products of one or two rows with a large fp8 matrix, bound by the time to read the matrix.

As in ``skinny_gemm``, a program holds some rows of the matrix in registers, the first block is loaded before the kernel
waits for its input, and a norm, a gate and a residual need no launches of their own. Activations are not scaled to fp8.

An H200 has time for about six instructions per code, so there must be few. Eight codes are loaded at once, as two words
of 32 bits, with eight activations in two words of 64 bits: threads then hold the same columns of both, and nothing
passes through shared memory. One scale multiplies the sum of eight products. With ``NATIVE`` conversions, since SM 89,
two codes are converted to float16 at once. Otherwise a code's bits, moved to those of a float32, are its value times
``2 ** -120``; half of that factor is applied to the input, half to the sum, so that neither leaves the range of a
float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_engine.kernels import launch_options
from attnplug_engine.kernels.gemm_epilogue import finish
from attnplug_engine.kernels.quantized_configs import FewConfig, choose_few
from attnplug_engine.kernels.scaled_rows import multiplies_fp8


@triton.jit
def _words(at, word, WORDS: tl.constexpr, WHOLE: tl.constexpr):
    """Load ``[rows, block / 2, 2]`` words of four codes. They are not read again in this step."""
    if WHOLE:
        found = tl.load(at + word, eviction_policy="evict_first")
    else:
        found = tl.load(at + word, mask=word < WORDS, other=0, eviction_policy="evict_first")
    return found


@triton.jit
def _quad(at, word, WORDS: tl.constexpr, WHOLE: tl.constexpr, TYPE: tl.constexpr):
    """Load four consecutive elements of a 16-bit dtype for each word: four tensors float32."""
    found = tl.load(at + word) if WHOLE else tl.load(at + word, mask=word < WORDS, other=0)
    a = found.to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    b = (found >> 16).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    c = (found >> 32).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    d = (found >> 48).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    return a, b, c, d


@triton.jit
def _code(words, PLACE: tl.constexpr):
    """Return one of the four codes of each word, times ``2 ** -120``."""
    bits = ((words << (24 - 8 * PLACE)) >> 4) & -2014314496  # 0x87F00000: the sign's copies are cleared
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _codes(words, NATIVE: tl.constexpr):
    """Return the four codes of each word as float32; times ``2 ** -120`` if not ``NATIVE``."""
    if NATIVE:
        p, q, r, s = tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high, w, x, y, z;
            .reg .b32 even, odd;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 even, low;
            cvt.rn.f16x2.e4m3x2 odd, high;
            mov.b32 {w, x}, even;
            mov.b32 {y, z}, odd;
            cvt.f32.f16 $0, w;
            cvt.f32.f16 $1, x;
            cvt.f32.f16 $2, y;
            cvt.f32.f16 $3, z;
            }
            """,
            "=f,=f,=f,=f,r", [words], dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        p, q, r, s = _code(words, 0), _code(words, 1), _code(words, 2), _code(words, 3)
    return p, q, r, s


@triton.jit
def _sum(p, q, r, s, factors, a, b, c, d):
    """Return the scaled sums of eight products each: ``[block_n, pairs]``."""
    return tl.sum(p * a + q * b + r * c + s * d, 2) * factors


@triton.jit(do_not_specialize=["rows", "columns"])
def _quantized_skinny(
    out, x, codes, scales, bias, onto, gain, rows, columns, out_stride, x_stride, onto_stride, eps,
    K: tl.constexpr, GROUP: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, ONE_SCALE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BFLOAT16: tl.constexpr, NATIVE: tl.constexpr, GATED: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, ONTO: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``BLOCK_N`` columns of the result. ``x`` and ``gain`` are loaded as 64-bit words of four elements. ``ONE_SCALE``:
    the program's matrix rows have the same scales."""
    TYPE: tl.constexpr = tl.bfloat16 if BFLOAT16 else tl.float16
    WORDS: tl.constexpr = K // 4
    BLOCK: tl.constexpr = BLOCK_K // 4
    WHOLE: tl.constexpr = WORDS % BLOCK == 0
    WIDTH: tl.constexpr = (K + GROUP - 1) // GROUP
    HALF: tl.constexpr = 1.0 if NATIVE else 1152921504606846976.0  # 2 ** 60
    if EARLY:
        gdc_launch_dependents()
    first = tl.program_id(0) * BLOCK_N
    number = first + tl.arange(0, BLOCK_N)
    own = tl.minimum(number, columns - 1)  # rows behind the last repeat it and are not stored
    pair = tl.arange(0, BLOCK // 2)  # of words: eight codes
    place = pair[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    matrix = codes + own.to(tl.int64)[:, None, None] * WORDS
    upper = codes + (own + columns).to(tl.int64)[:, None, None] * WORDS  # ``up``; rows before those are of ``gate``
    scaled = first + tl.arange(0, 1) if ONE_SCALE else own
    factors_at = scales + (scaled // ROWS_PER_SCALE).to(tl.int64)[:, None] * WIDTH
    factors_up_at = scales + ((scaled + columns) // ROWS_PER_SCALE).to(tl.int64)[:, None] * WIDTH
    ahead = _words(matrix, place, WORDS, WHOLE)
    if GATED:
        ahead_up = _words(upper, place, WORDS, WHOLE)
    if EARLY:
        gdc_wait()
    row = tl.arange(0, ROWS)
    # Threads add up their own columns, and all of them only at the end.
    parts = tl.zeros([BLOCK_N, BLOCK // 2, ROWS], tl.float32)
    parts_up = tl.zeros([BLOCK_N, BLOCK // 2, ROWS], tl.float32)
    squares = tl.zeros([1, BLOCK // 2, ROWS], tl.float32)
    for start in tl.static_range(0, WORDS, BLOCK):
        word = start + place
        group = tl.minimum((start // 2 + pair) * 8 // GROUP, WIDTH - 1)[None, :]
        factors = tl.load(factors_at + group)
        words = ahead
        if GATED:
            words_up = ahead_up
            factors_up = tl.load(factors_up_at + group)
        if start + BLOCK < WORDS:
            ahead = _words(matrix, word + BLOCK, WORDS, WHOLE)
            if GATED:
                ahead_up = _words(upper, word + BLOCK, WORDS, WHOLE)
        p, q, r, s = _codes(words, NATIVE)
        if GATED:
            p_up, q_up, r_up, s_up = _codes(words_up, NATIVE)
        if NORM:
            gain_a, gain_b, gain_c, gain_d = _quad(gain, word, WORDS, WHOLE, TYPE)
        for index in tl.static_range(ROWS):
            # Rows behind the last repeat it and are not stored.
            a, b, c, d = _quad(x + tl.minimum(index, rows - 1) * x_stride, word, WORDS, WHOLE, TYPE)
            here = (row == index)[None, None, :]
            if NORM:
                square = tl.sum(a * a + b * b + c * c + d * d, 2)
                squares = tl.where(here, squares + square[:, :, None], squares)
                a, b, c, d = a * gain_a, b * gain_b, c * gain_c, d * gain_d
            if not NATIVE:
                a, b, c, d = a * HALF, b * HALF, c * HALF, d * HALF
            parts = tl.where(here, parts + _sum(p, q, r, s, factors, a, b, c, d)[:, :, None], parts)
            if GATED:
                sums = _sum(p_up, q_up, r_up, s_up, factors_up, a, b, c, d)
                parts_up = tl.where(here, parts_up + sums[:, :, None], parts_up)
    total, total_up = tl.sum(parts, 1), tl.sum(parts_up, 1)
    finish(
        total * HALF, total_up * HALF, tl.sum(tl.sum(squares, 1), 0), out, bias, onto, number, row, rows,
        columns, out_stride, onto_stride, eps, K, GATED, NORM, BIAS, ONTO,
    )  # fmt: skip


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
    config: FewConfig | None = None,
) -> Tensor:
    """Return ``x [rows, K]`` times an fp8 matrix ``[N, K]`` transposed: ``[rows, N]`` like ``x``.

    ``norm`` is the weight, in the dtype of ``x``, and epsilon of an RMS norm of ``x``. See ``skinny_gemm`` for the
    others, and ``choose_few`` for ``config``.
    """
    if x.stride(1) != 1 or x.stride(0) % 4 or x.storage_offset() % 4:
        x = x.clone(memory_format=torch.contiguous_format)
    onto = onto if onto is None or onto.stride(1) == 1 else onto.contiguous()
    rows, width = x.shape
    outputs = codes.shape[0] // (2 if gated else 1)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    gain, eps = (x, 0.0) if norm is None else norm
    config = config or choose_few(outputs, width, 2 if gated else 1)
    _quantized_skinny[(triton.cdiv(outputs, config.columns),)](
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
        ONE_SCALE=rows_per_scale % config.columns == 0 and (not gated or outputs % rows_per_scale == 0),
        ROWS=triton.next_power_of_2(rows),
        BLOCK_N=config.columns,
        BLOCK_K=config.depth,
        BFLOAT16=x.dtype is torch.bfloat16,
        NATIVE=x.is_cuda and multiplies_fp8(x.device),
        GATED=gated,
        NORM=norm is not None,
        BIAS=bias is not None,
        ONTO=onto is not None,
        num_warps=config.warps,
        **launch_options(x.device),
    )  # fmt: skip
    return out
