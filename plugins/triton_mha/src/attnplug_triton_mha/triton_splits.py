"""KV splits at absolute positions, for batch-invariant results.

A request's cache rows are split at the same positions whatever the batch: ``SHORT`` splits of ``SPLIT`` rows, as many
of twice and twice as many of four times that length, and all others of eight times. Short splits let many programs
share a short request; long ones limit the number of partial results. If ``SHORT`` is 0, all have ``SPLIT`` rows.

The result is the sum of all splits' partial results from the first to the last, and that order is the only one. A
program may add some of them itself (``add_split``), or leave them to the merge kernel: both give the same bits. For
that, the weights of a split are relative to a power of two (``to_power_of_two``), so that scaling partial results is
exact, and a fused multiply-add rounds like a multiplication and an addition.
"""

from __future__ import annotations

import triton
import triton.language as tl

SHORT_SPLITS = tl.constexpr(16)
"""``SHORT`` of layers without a window."""


@triton.jit
def split_rows(row, SPLIT: tl.constexpr, SHORT: tl.constexpr):
    """Return the length of the split that contains ``row``."""
    if SHORT == 0:
        return SPLIT + 0 * row
    longer = (row >= SHORT * SPLIT).to(tl.int32) + (row >= 3 * SHORT * SPLIT).to(tl.int32)
    return SPLIT << (longer + (row >= 11 * SHORT * SPLIT).to(tl.int32))


@triton.jit
def split_from(row, SPLIT: tl.constexpr, SHORT: tl.constexpr):
    """Return the start of the first split at or behind ``row``."""
    length = split_rows(row, SPLIT, SHORT)
    return (row + length - 1) // length * length


@triton.jit
def splits_before(row, SPLIT: tl.constexpr, SHORT: tl.constexpr):
    """Return the number of splits that start before ``row``."""
    if SHORT == 0:
        return (row + SPLIT - 1) // SPLIT
    SAME: tl.constexpr = SHORT * SPLIT
    first, second = tl.minimum(row, SAME), tl.minimum(tl.maximum(row - SAME, 0), 2 * SAME)
    third, others = tl.minimum(tl.maximum(row - 3 * SAME, 0), 8 * SAME), tl.maximum(row - 11 * SAME, 0)
    shorter = (first + SPLIT - 1) // SPLIT + (second + 2 * SPLIT - 1) // (2 * SPLIT)
    return shorter + (third + 4 * SPLIT - 1) // (4 * SPLIT) + (others + 8 * SPLIT - 1) // (8 * SPLIT)


def max_splits(rows: int, split: int, short: int) -> int:
    """Return the number of splits of ``rows`` cache rows, as ``splits_before`` does."""
    if not short:
        return -(-rows // split)
    ends = split * short, 3 * split * short, 11 * split * short, rows
    starts = 0, *ends[:3]
    each = zip(starts, ends, (split, 2 * split, 4 * split, 8 * split), strict=True)
    return sum(-(-max(min(rows, end) - start, 0) // length) for start, end, length in each)


@triton.jit
def to_power_of_two(top, total, sums):
    """Return the same partial result with weights ``2 ** (logit - top)`` for an integer ``top``; -inf stays."""
    known = tl.where(top == float("-inf"), 0.0, top)
    factor = tl.exp2(known - tl.ceil(known))
    return tl.ceil(top), total * factor, sums * factor[:, None]


@triton.jit
def power_of_two(exponent):
    """Return ``2 ** exponent`` exactly for integers in float32, up to 127; 0 below -126."""
    biased = tl.maximum(exponent, -127.0).to(tl.int32) + 127
    return (biased << 23).to(tl.float32, bitcast=True)


@triton.jit
def add_split(top, total, sums, split_top, split_total, split_sums):
    """Add the next split's partial result to that of the splits before it. Both tops are integers or -inf."""
    higher = tl.maximum(top, split_top)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    kept, weight = power_of_two(top - base), power_of_two(split_top - base)
    return higher, total * kept + split_total * weight, sums * kept[:, None] + split_sums * weight[:, None]
