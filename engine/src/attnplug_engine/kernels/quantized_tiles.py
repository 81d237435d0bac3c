"""Tiles of quantized weights, decoded in registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_tile(
    scales, row, exists, start, K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, ROWS_PER_SCALE: tl.constexpr
):
    """Load the scales of ``BLOCK`` columns of some rows: float32 ``[rows, max(BLOCK / GROUP, 1)]``."""
    COUNT: tl.constexpr = BLOCK // GROUP if GROUP < BLOCK else 1
    WIDTH: tl.constexpr = (K + GROUP - 1) // GROUP
    column = start // GROUP + tl.arange(0, COUNT)
    at = scales + (row // ROWS_PER_SCALE).to(tl.int64)[:, None] * WIDTH + column[None, :]
    found = tl.load(at, mask=exists[:, None] & (column < WIDTH)[None, :], other=0)
    if scales.dtype.element_ty == tl.uint8:  # UE8M0 is the exponent of a float32
        return (found.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return found.to(tl.float32)


@triton.jit
def decoded_tile(
    codes, scales, row, exists, start,
    K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Load and decode ``BLOCK`` columns from ``start`` on of some rows of a weight: float32 ``[rows, BLOCK]``.

    Codes are moved into the bits of a float16, which works before SM 89 too, where there is no conversion from fp8.
    """
    ROWS: tl.constexpr = row.shape[0]
    PACKED: tl.constexpr = 1 if FORMAT == "fp8" else 2 if FORMAT == "mxfp4" else 8
    place = start // PACKED + tl.arange(0, BLOCK // PACKED)
    at = codes + row.to(tl.int64)[:, None] * (K // PACKED) + place[None, :]
    there = exists[:, None] & (place < K // PACKED)[None, :]
    found = tl.load(at, mask=there, other=0, eviction_policy="evict_first").to(tl.int32)
    if FORMAT == "fp8":
        bits = ((found & 0x80) << 8) | ((found & 0x7F) << 7)
        values = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        shifts = 4 * tl.arange(0, PACKED)
        nibbles = ((found[:, :, None] >> shifts[None, None, :]) & 15).reshape(ROWS, BLOCK)
        if FORMAT == "mxfp4":
            bits = ((nibbles & 8) << 12) | ((nibbles & 7) << 9)
            values = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
        else:
            values = (nibbles - 8).to(tl.float32)
    factors = scale_tile(scales, row, exists, start, K, GROUP, BLOCK, ROWS_PER_SCALE)
    COUNT: tl.constexpr = BLOCK // GROUP if GROUP < BLOCK else 1
    return values * tl.broadcast_to(factors[:, :, None], [ROWS, COUNT, BLOCK // COUNT]).reshape(ROWS, BLOCK)
