"""Kernels of rotary positions: angles once per step, and norm and rotation of heads in place."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _angles(
    cos, sin, positions, frequencies, factor, HALF: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Compute cosines and sines of one token."""
    pair = tl.arange(0, BLOCK)
    there = pair < HALF
    frequency = tl.load(frequencies + pair, mask=there, other=0.0)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    angle = tl.load(positions + token).to(tl.float32) * frequency
    tl.store(cos + token * HALF + pair, tl.cos(angle) * factor, mask=there)
    tl.store(sin + token * HALF + pair, tl.sin(angle) * factor, mask=there)


@triton.jit
def members(pair, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Return the indices of a pair's two elements in a row."""
    if PAIRS:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + HALF
    return first, second


@triton.jit
def _rotate_heads(
    x, cos, sin, q_gain, k_gain, token_stride, head_stride, eps,
    QUERIES: tl.constexpr, SKIPPED: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    PAIRS: tl.constexpr, NORM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some heads of one token, in place: normed if ``NORM``, with the first ``2 * HALF`` dimensions rotated.

    The first ``QUERIES`` heads are normed by ``q_gain``; the next ``SKIPPED`` heads are not changed.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    query = (head < QUERIES)[:, None]
    line = (x + token * token_stride + tl.where(head < QUERIES, head, head + SKIPPED) * head_stride)[:, None]
    pair = tl.arange(0, BLOCK_HALF)
    first, second = members(pair, HALF, PAIRS)
    live = (head < HEADS)[:, None] & (pair < HALF)[None, :]
    a = tl.load(line + first[None, :], mask=live, other=0.0).to(tl.float32)
    b = tl.load(line + second[None, :], mask=live, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(a * a + b * b, 1)
        if 2 * HALF < DIM:
            rest = 2 * HALF + tl.arange(0, BLOCK_REST)
            also = (head < HEADS)[:, None] & (rest < DIM)[None, :]
            others = tl.load(line + rest[None, :], mask=also, other=0.0).to(tl.float32)
            squares += tl.sum(others * others, 1)
        factor = tl.rsqrt(squares / DIM + eps)[:, None]
        a *= factor * _gains(q_gain, k_gain, query, first, DIM)
        b *= factor * _gains(q_gain, k_gain, query, second, DIM)
        if 2 * HALF < DIM:
            others *= factor * _gains(q_gain, k_gain, query, rest, DIM)
            tl.store(line + rest[None, :], others.to(x.dtype.element_ty), mask=also)
    c = tl.load(cos + token * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    s = tl.load(sin + token * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    tl.store(line + first[None, :], (a * c - b * s).to(x.dtype.element_ty), mask=live)
    tl.store(line + second[None, :], (b * c + a * s).to(x.dtype.element_ty), mask=live)


@triton.jit
def _gains(q_gain, k_gain, query, place, DIM: tl.constexpr):
    """Return ``[heads, places]``: a query's or a key's norm weights."""
    there = place < DIM
    of_query = tl.load(q_gain + place, mask=there, other=0.0).to(tl.float32)
    of_key = tl.load(k_gain + place, mask=there, other=0.0).to(tl.float32)
    return tl.where(query, of_query[None, :], of_key[None, :])
