"""Products of queries, keys and values that consist of ``PACK`` tensors of some columns each, as quantized rows do.

Queries are split accordingly before the first step, and results are joined after the last one.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def queries_for_products(rows, there, scale, PACK: tl.constexpr):
    """Return queries in the products' dtype, zeros for missing rows, and the scale of their logits."""
    rows = tl.where(there, rows, 0.0)
    if PACK > 1:
        queries, by = _split_queries(rows, scale, PACK)
    else:
        queries, by = (rows,), scale
    return queries, by


@triton.jit
def _split_queries(queries, scale, PACK: tl.constexpr):
    """Return queries as tensors for products with coded rows, in fp16, and the scale of their logits.

    Each row of other types is divided by a power of 2, so that its numbers are up to 2 and fp16 holds them as well as
    bf16 did.
    """
    by = scale
    if queries.dtype != tl.float16:
        largest = tl.max(tl.abs(queries.to(tl.float32)), 1)
        power = tl.exp2(tl.floor(tl.log2(tl.maximum(largest, 1e-30))))[:, None]
        by = scale * power
        queries = (queries / power).to(tl.float16)
    even, odd = tl.split(tl.reshape(queries, [queries.shape[0], queries.shape[1] // 2, 2]))
    if PACK == 2:
        tensors = even, odd
    else:
        first, third = tl.split(tl.reshape(even, [even.shape[0], even.shape[1] // 2, 2]))
        second, fourth = tl.split(tl.reshape(odd, [odd.shape[0], odd.shape[1] // 2, 2]))
        tensors = first, second, third, fourth
    return tensors, by


@triton.jit
def zero_sums(TILE: tl.constexpr, WIDTH: tl.constexpr, PACK: tl.constexpr):
    """Return sums of weighted values, as a tensor for each that a row consists of."""
    zeros = tl.zeros([TILE, WIDTH // PACK], tl.float32)
    if PACK == 4:
        sums = zeros, zeros, zeros, zeros
    elif PACK == 2:
        sums = zeros, zeros
    else:
        sums = (zeros,)
    return sums


@triton.jit
def join_columns(sums, PACK: tl.constexpr):
    """Return the columns of results in order; the inverse of ``queries_for_products``."""
    if PACK == 1:
        joined = sums[0]
    elif PACK == 2:
        joined = tl.interleave(sums[0], sums[1])
    else:
        joined = tl.interleave(tl.interleave(sums[0], sums[2]), tl.interleave(sums[1], sums[3]))
    return joined


@triton.jit
def logits_of(queries, keys, scale, SCALE_FIRST: tl.constexpr, PACK: tl.constexpr):
    """Return scaled logits ``[TILE, STEP]`` of queries and keys, tuples of ``PACK`` tensors.

    ``SCALE_FIRST``: scale partial products before they are added.
    """
    logits = tl.dot(queries[0], tl.trans(keys[0]))
    if PACK == 4:
        logits = tl.dot(queries[1], tl.trans(keys[1]), logits)
        second = tl.dot(queries[3], tl.trans(keys[3]), tl.dot(queries[2], tl.trans(keys[2])))
        logits = logits * scale + second * scale
    elif PACK == 2 and SCALE_FIRST:
        # The compiler would turn a plain sum of products into one dependent chain.
        logits = logits * scale + tl.dot(queries[1], tl.trans(keys[1])) * scale
    elif PACK == 2:
        logits = tl.dot(queries[1], tl.trans(keys[1]), logits) * scale
    else:
        logits = logits * scale
    return logits


@triton.jit
def add_values(sums, kept, weights, values, PACK: tl.constexpr):
    """Return ``sums`` times ``kept`` plus weighted values, tuples of ``PACK`` tensors."""
    weights = weights.to(values[0].dtype)
    first = tl.dot(weights, values[0], sums[0] * kept[:, None])
    if PACK == 1:
        sums = (first,)
    else:
        second = tl.dot(weights, values[1], sums[1] * kept[:, None])
        if PACK == 2:
            sums = first, second
        else:
            third = tl.dot(weights, values[2], sums[2] * kept[:, None])
            sums = first, second, third, tl.dot(weights, values[3], sums[3] * kept[:, None])
    return sums


@triton.jit
def finite_rows(values, PACK: tl.constexpr):
    """Return a mask of the rows without NaN and infinity, and the values with other rows set to zero."""
    whole = _finite(values[0])
    if PACK == 2:
        whole = whole & _finite(values[1])
    first = tl.where(whole[:, None], values[0], 0)
    if PACK == 1:
        values = (first,)
    else:
        second = tl.where(whole[:, None], values[1], 0)
        if PACK == 2:
            values = first, second
        else:  # the only NaN of nvfp4 is a scale, which all four tensors share
            third, fourth = tl.where(whole[:, None], values[2], 0), tl.where(whole[:, None], values[3], 0)
            values = first, second, third, fourth
    return whole, values


@triton.jit
def _finite(rows):
    """Return a mask of the rows that contain neither NaN nor infinity."""
    return tl.min((tl.abs(rows.to(tl.float32)) < float("inf")).to(tl.int32), 1) > 0
