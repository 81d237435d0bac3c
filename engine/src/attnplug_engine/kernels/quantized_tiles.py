"""Tile products of a quantized matrix with activations, by the format of the codes.

The matrix is the M operand, so that tensor-core tiles are full even with few rows of activations. Codes and activations
are copied asynchronously to shared memory, several iterations ahead.

- ``scaled``: fp8 codes and activations scaled to fp8. Tensor cores accumulate 128 columns; these sums are scaled and
  added in float32, because Hopper's fp8 accumulators have too few bits for a whole row.
- ``int4`` and ``mxfp4``: both codes of a byte are decoded in registers and multiplied by the even and the odd columns
  of the activations. Scales are applied to the sum of a group, not to its codes.
- ``fp8``: codes are decoded to the dtype of the activations, for GPUs before SM 89 and small groups.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(
    codes, scales, x, x_scales, x_stride, x_groups, first, number, row, exists,
    K: tl.constexpr, GROUP: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, ONE_SCALE: tl.constexpr, FORMAT: tl.constexpr,
    UNITS: tl.constexpr, STAGES: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Return float32 ``[len(number), len(row)]``: matrix rows ``number`` times activation rows ``row``, over K.

    A scale of the matrix ``[N, K]`` applies to ``ROWS_PER_SCALE`` rows and ``GROUP`` columns. ``ONE_SCALE``: all rows
    ``number`` share the scales of row ``first``. ``x_scales`` of ``scaled`` are ``[groups, x_groups]``. ``scaled``
    does not read rows without ``exists``. An iteration of ``int4`` and ``mxfp4`` takes ``UNITS * 32`` columns; ``x`` is
    passed as 32-bit words of two 16-bit values, bfloat16 if ``NATIVE``, else float16.
    """
    if FORMAT == "scaled":
        total = _scaled(
            codes, scales, x, x_scales, x_stride, x_groups, first, number, row, exists, K, GROUP, ROWS_PER_SCALE,
            ONE_SCALE, STAGES,
        )  # fmt: skip
    elif FORMAT == "fp8":
        total = _decoded(codes, scales, x, x_stride, number, row, K, GROUP, ROWS_PER_SCALE, STAGES)
    else:
        total = _packed(codes, scales, x, x_stride, number, row, K, GROUP, FORMAT, UNITS, STAGES, NATIVE)
    return total


@triton.jit
def prefetch(codes, number, BYTES: tl.constexpr, LINES: tl.constexpr):
    """Prefetch the first ``LINES`` cache lines of matrix rows of ``BYTES`` bytes to L2."""
    line = tl.minimum(tl.arange(0, LINES) * 128, BYTES - 1)
    at = codes.to(tl.pointer_type(tl.uint8)) + number.to(tl.int64)[:, None] * BYTES + line[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _scaled(
    codes, scales, x, x_scales, x_stride, x_groups, first, number, row, exists,
    K: tl.constexpr, GROUP: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, ONE_SCALE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply fp8 codes by activations in fp8.

    Scales are loaded one iteration ahead, because Triton's pipeliner only handles tiles that a dot takes. The next
    ones are loaded after the last use of the current ones: both then have the same registers, and no iteration
    waits for a load of its own. A tile of more than 64 rows has too few registers for the next scales of its rows.
    """
    AHEAD: tl.constexpr = row.shape[0] <= 64
    STEP: tl.constexpr = 128
    LAST: tl.constexpr = (K - 1) // STEP * STEP
    WIDTH: tl.constexpr = (K + GROUP - 1) // GROUP
    matrix = codes + number.to(tl.int64)[:, None] * K
    inputs = x + row.to(tl.int64)[:, None] * x_stride
    factors = scales + (first if ONE_SCALE else number) // ROWS_PER_SCALE * WIDTH
    place = tl.arange(0, STEP)
    total = tl.zeros([number.shape[0], row.shape[0]], tl.float32)
    factor = tl.load(factors)
    if AHEAD:
        x_factor = tl.load(x_scales + row)
    for start in tl.range(0, K, STEP, num_stages=STAGES):
        column = start + place[None, :]
        following = tl.minimum(start + STEP, LAST)
        if K % STEP == 0:
            weights = tl.load(matrix + column, eviction_policy="evict_first" if row.shape[0] <= 64 else "")
            values = tl.load(inputs + column, mask=exists[:, None], other=0.0)
        else:
            weights = tl.load(matrix + column, mask=column < K, other=0.0)
            values = tl.load(inputs + column, mask=exists[:, None] & (column < K), other=0.0)
        if not AHEAD:
            x_factor = tl.load(x_scales + start // STEP * x_groups + row)
        x_factors = (x_factor * factor if WIDTH > 1 and ONE_SCALE else x_factor)[None, :]
        sums = tl.dot(weights, tl.trans(values))
        if WIDTH > 1 and not ONE_SCALE:
            sums *= factor[:, None]
        total += sums * x_factors
        if WIDTH > 1:
            factor = tl.load(factors + following // GROUP)
        if AHEAD:
            x_factor = tl.load(x_scales + following // STEP * x_groups + row)
    if WIDTH == 1 and ONE_SCALE:
        total *= factor
    elif WIDTH == 1:
        total *= factor[:, None]
    return total


@triton.jit
def _packed(
    codes, scales, x, x_stride, number, row,
    K: tl.constexpr, GROUP: tl.constexpr, FORMAT: tl.constexpr, UNITS: tl.constexpr, STAGES: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Multiply by 4-bit codes, two per byte. Each row has its own scales."""
    BYTES: tl.constexpr = K // 2
    WIDTH: tl.constexpr = (K + GROUP - 1) // GROUP
    TYPE: tl.constexpr = tl.bfloat16 if NATIVE else tl.float16
    matrix = codes + number.to(tl.int64)[:, None] * BYTES
    inputs = x + row.to(tl.int64)[:, None] * x_stride
    factors = scales + number.to(tl.int64) * WIDTH
    total = tl.zeros([number.shape[0], row.shape[0]], tl.float32)
    for start in tl.range(0, K, 32 * UNITS, num_stages=STAGES):
        for unit in tl.static_range(UNITS):
            place = start // 2 + unit * 16 + tl.arange(0, 16)[None, :]
            if K % (32 * UNITS) == 0:
                both = tl.load(matrix + place, eviction_policy="evict_first")
                pairs = tl.load(inputs + place)
            else:
                both = tl.load(matrix + place, mask=place < BYTES, other=0, eviction_policy="evict_first")
                pairs = tl.load(inputs + place, mask=place < BYTES, other=0)
            low, high = _nibbles(both, FORMAT, NATIVE)
            even = pairs.to(tl.int16).to(TYPE, bitcast=True)
            odd = (pairs >> 16).to(tl.int16).to(TYPE, bitcast=True)
            if unit * 32 % GROUP == 0:
                sums = tl.zeros([number.shape[0], row.shape[0]], tl.float32)
            sums = tl.dot(low, tl.trans(even), acc=sums)
            sums = tl.dot(high, tl.trans(odd), acc=sums)
            if (unit + 1) * 32 % GROUP == 0 or unit + 1 == UNITS:
                group = tl.minimum((start + unit * 32) // GROUP, WIDTH - 1)
                total += sums * _scale(tl.load(factors + group))[:, None]
    return total


@triton.jit
def _scale(found):
    """Convert scales to float32. A UE8M0 byte is the exponent of a float32."""
    if found.dtype == tl.uint8:
        found = (found.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return found.to(tl.float32)


@triton.jit
def _nibbles(both, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Decode the lower and the upper code of each byte to float16; to bfloat16 if ``NATIVE``, four bytes at a time."""
    if NATIVE and FORMAT == "int4":
        # 0x4300 + code is 128 + code in bfloat16; subtract 136 for a value from -8 to 7.
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high, one, bias;
            and.b32 low, $4, 0x0f0f0f0f;
            shr.u32 high, $4, 4;
            and.b32 high, high, 0x0f0f0f0f;
            mov.b32 one, 0x3f803f80;
            mov.b32 bias, 0xc308c308;
            prmt.b32 $0, low, 0x43434343, 0x4140;
            prmt.b32 $1, low, 0x43434343, 0x4342;
            prmt.b32 $2, high, 0x43434343, 0x4140;
            prmt.b32 $3, high, 0x43434343, 0x4342;
            fma.rn.bf16x2 $0, $0, one, bias;
            fma.rn.bf16x2 $1, $1, one, bias;
            fma.rn.bf16x2 $2, $2, one, bias;
            fma.rn.bf16x2 $3, $3, one, bias;
            }
            """,
            "=&r,=&r,=&r,=&r,r", [both], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    elif NATIVE:
        # A code's bits, shifted into a bfloat16, are its value times 2 ** -126.
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, a, b, c, d, e, f, g, h, scale, zero;
            shl.b32 low, $4, 4;
            prmt.b32 a, low, 0, 0x1404;
            prmt.b32 b, low, 0, 0x3424;
            prmt.b32 c, $4, 0, 0x1404;
            prmt.b32 d, $4, 0, 0x3424;
            shr.u32 e, a, 6;
            shr.u32 f, b, 6;
            shr.u32 g, c, 6;
            shr.u32 h, d, 6;
            and.b32 e, e, 0x01c001c0;
            and.b32 f, f, 0x01c001c0;
            and.b32 g, g, 0x01c001c0;
            and.b32 h, h, 0x01c001c0;
            lop3.b32 a, a, 0x80008000, e, 0xea;
            lop3.b32 b, b, 0x80008000, f, 0xea;
            lop3.b32 c, c, 0x80008000, g, 0xea;
            lop3.b32 d, d, 0x80008000, h, 0xea;
            mov.b32 scale, 0x7e807e80;
            mov.b32 zero, 0x80008000;
            fma.rn.bf16x2 $0, a, scale, zero;
            fma.rn.bf16x2 $1, b, scale, zero;
            fma.rn.bf16x2 $2, c, scale, zero;
            fma.rn.bf16x2 $3, d, scale, zero;
            }
            """,
            "=&r,=&r,=&r,=&r,r", [both], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        wide = both.to(tl.int16)
        low, high = _half(wide & 15, FORMAT), _half(wide >> 4, FORMAT)
    return low, high


@triton.jit
def _half(nibble, FORMAT: tl.constexpr):
    if FORMAT == "int4":
        value = (nibble - 8).to(tl.float16)
    else:
        bits = ((nibble & 8) << 12) | ((nibble & 7) << 9)
        value = bits.to(tl.float16, bitcast=True) * 16384.0
    return value


@triton.jit
def _decoded(
    codes, scales, x, x_stride, number, row,
    K: tl.constexpr, GROUP: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply by fp8 codes, decoded by shifting their bits into a float16: GPUs before SM 89 cannot convert fp8."""
    STEP: tl.constexpr = 128
    COUNT: tl.constexpr = STEP // GROUP if GROUP < STEP else 1
    WIDTH: tl.constexpr = (K + GROUP - 1) // GROUP
    LINES: tl.constexpr = number.shape[0]
    matrix = codes + number.to(tl.int64)[:, None] * K
    factors = scales + (number // ROWS_PER_SCALE).to(tl.int64)[:, None] * WIDTH
    inputs = x + row.to(tl.int64)[:, None] * x_stride
    total = tl.zeros([LINES, row.shape[0]], tl.float32)
    for start in tl.range(0, K, STEP, num_stages=STAGES):
        column = start + tl.arange(0, STEP)[None, :]
        values = tl.load(inputs + column, mask=column < K, other=0.0)
        found = tl.load(matrix + column, mask=column < K, other=0).to(tl.int32)
        bits = ((found & 0x80) << 8) | ((found & 0x7F) << 7)
        weights = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        group = tl.minimum(start // GROUP + tl.arange(0, COUNT), WIDTH - 1)
        own = tl.load(factors + group[None, :])[:, :, None]
        weights *= tl.broadcast_to(own, [LINES, COUNT, STEP // COUNT]).reshape(LINES, STEP)
        total = tl.dot(weights.to(values.dtype), tl.trans(values), acc=total, input_precision="ieee")
    return total
