"""KV splits at absolute positions: the arithmetic of batch-invariant results.

A request's cache rows are split at the same positions whatever the batch. With ``GROWS`` these are 16 splits of
``SPLIT`` rows, then 16 of twice and all others of four times as many: short splits share a short request among many
programs, long ones keep the number of partial results small.

The result is the sum of all splits' partial results from the first to the last, and that order is the only one. A
program may add some of them itself, or leave them to the merge kernel: both give the same bits. For
that, the weights of a split are relative to a power of two (``to_power_of_two``), so that scaling partial results is
exact, and a fused multiply-add rounds like a multiplication and an addition.
"""

from __future__ import annotations

import triton
import triton.language as tl

_SAME = tl.constexpr(16)
"""Splits of each of the first two lengths."""


@triton.jit
def split_rows(row, SPLIT: tl.constexpr, GROWS: tl.constexpr):
    """Return the length of the split that contains ``row``. Without ``GROWS`` all have ``SPLIT`` rows."""
    if GROWS:
        return tl.where(row < _SAME * SPLIT, SPLIT, tl.where(row < 3 * _SAME * SPLIT, 2 * SPLIT, 4 * SPLIT))
    return SPLIT + 0 * row


@triton.jit
def split_from(row, SPLIT: tl.constexpr, GROWS: tl.constexpr):
    """Return the start of the first split at or behind ``row``."""
    length = split_rows(row, SPLIT, GROWS)
    return (row + length - 1) // length * length


@triton.jit
def splits_before(row, SPLIT: tl.constexpr, GROWS: tl.constexpr):
    """Return the number of splits that start before ``row``."""
    if GROWS:
        first, second = (
            tl.minimum(row, _SAME * SPLIT),
            tl.minimum(tl.maximum(row - _SAME * SPLIT, 0), 2 * _SAME * SPLIT),
        )
        third = tl.maximum(row - 3 * _SAME * SPLIT, 0)
        return (
            (first + SPLIT - 1) // SPLIT
            + (second + 2 * SPLIT - 1) // (2 * SPLIT)
            + (third + 4 * SPLIT - 1) // (4 * SPLIT)
        )
    return (row + SPLIT - 1) // SPLIT


def max_splits(rows: int, split: int, *, grows: bool) -> int:
    """Return the number of splits of ``rows`` cache rows, as ``splits_before`` does."""
    if not grows:
        return -(-rows // split)
    same: int = _SAME.value * split
    first, second, third = min(rows, same), min(max(rows - same, 0), 2 * same), max(rows - 3 * same, 0)
    return -(-first // split) + -(-second // (2 * split)) + -(-third // (4 * split))


@triton.jit
def power_of_two(exponent):
    """Return ``2 ** exponent`` exactly for integers in float32, up to 127; 0 below -126."""
    biased = tl.maximum(exponent, -127.0).to(tl.int32) + 127
    return (biased << 23).to(tl.float32, bitcast=True)


@triton.jit
def to_power_of_two(top):
    """Return the next integer of the largest logit in base 2, and the factor of weights relative to it; -inf stays."""
    known = tl.where(top == float("-inf"), 0.0, top)
    return tl.ceil(top), tl.exp2(known - tl.ceil(known))
