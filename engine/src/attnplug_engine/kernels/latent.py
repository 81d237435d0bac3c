"""MLA kernels between a layer's matrix products and its attention, one launch each: make cache rows and rotate queries
in place, or absorb the queries as well."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_engine.kernels.rotary import members


@triton.jit
def _row(
    rows, down, cos, sin, gain, token, place, limit, row_stride, down_stride, eps,
    LATENT: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, BLOCK_LATENT: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Compute the cache row of one token; store it at its ``place`` if that is below ``limit``."""
    pair, column = tl.arange(0, BLOCK_HALF), tl.arange(0, BLOCK_LATENT)
    first, second = members(pair, HALF, PAIRS)
    # Padding is computed but not stored: a branch would wait for the slot before the row is loaded.
    kept = (place >= 0) & (place < limit)
    stored, stored_pairs = column < tl.where(kept, LATENT, 0), pair < tl.where(kept, HALF, 0)
    source, target = down + token * down_stride, rows + place * row_stride
    inside, there = column < LATENT, pair < HALF
    latent = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    gains = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(source + LATENT + first, mask=there, other=0.0).to(tl.float32)
    b = tl.load(source + LATENT + second, mask=there, other=0.0).to(tl.float32)
    c = tl.load(cos + token * HALF + pair, mask=there, other=0.0)
    s = tl.load(sin + token * HALF + pair, mask=there, other=0.0)
    latent *= tl.rsqrt(tl.sum(latent * latent, 0) / LATENT + eps) * gains
    tl.store(target + column, latent.to(rows.dtype.element_ty), mask=stored)
    tl.store(target + LATENT + first, (a * c - b * s).to(rows.dtype.element_ty), mask=stored_pairs)
    tl.store(target + LATENT + second, (b * c + a * s).to(rows.dtype.element_ty), mask=stored_pairs)


@triton.jit
def _latent_rows(
    rows, q, down, cos, sin, gain, row_stride, q_stride, q_head_stride, down_stride, eps,
    HEADS: tl.constexpr, NOPE: tl.constexpr, LATENT: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_LATENT: tl.constexpr, BLOCK_HALF: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One token's cache row (program 0), or the rotary parts of some heads in place."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        _row(
            rows, down, cos, sin, gain, token, token, tl.num_programs(0), row_stride, down_stride, eps,
            LATENT, HALF, PAIRS, BLOCK_LATENT, BLOCK_HALF,
        )  # fmt: skip
    else:
        pair = tl.arange(0, BLOCK_HALF)
        first, second = members(pair, HALF, PAIRS)
        there = pair < HALF
        c = tl.load(cos + token * HALF + pair, mask=there, other=0.0)[None, :]
        s = tl.load(sin + token * HALF + pair, mask=there, other=0.0)[None, :]
        head = (tl.program_id(1) - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        live = (head < HEADS)[:, None] & there[None, :]
        line = (q + token * q_stride + head * q_head_stride + NOPE)[:, None]
        x = tl.load(line + first[None, :], mask=live, other=0.0).to(tl.float32)
        y = tl.load(line + second[None, :], mask=live, other=0.0).to(tl.float32)
        tl.store(line + first[None, :], (x * c - y * s).to(q.dtype.element_ty), mask=live)
        tl.store(line + second[None, :], (y * c + x * s).to(q.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["tokens", "planned", "limit"])
def _absorb(
    out, rows, slots, q, down, weight, cos, sin, gain, tokens, planned, limit, slot_step, row_stride, q_stride,
    q_head_stride, down_stride, eps,
    HEADS: tl.constexpr, NOPE: tl.constexpr, LATENT: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
    W_HEAD: tl.constexpr, W_IN: tl.constexpr, W_OUT: tl.constexpr, TOKENS: tl.constexpr, BLOCK_NOPE: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_LATENT: tl.constexpr, BLOCK_HALF: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some latent dimensions of one head's queries; the head's first program also handles the rotated ones. Behind the
    heads follow programs that compute rows and store them at the slots of the ``planned`` tokens in ``limit`` rows of a
    cache, unless a slot is padding."""
    head, block = tl.program_id(0), tl.program_id(1)
    number = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    place = tl.arange(0, BLOCK_NOPE)
    weights = tl.load(
        weight + head.to(tl.int64) * W_HEAD + number[:, None] * W_OUT + place[None, :] * W_IN,
        mask=(number < tl.where(head < HEADS, LATENT, 0))[:, None] & (place < NOPE)[None, :],
        other=0.0,
    )
    if EARLY:  # everything above depends on no other kernel
        gdc_launch_dependents()
        gdc_wait()
    start = tl.program_id(2) * TOKENS
    PROGRAMS: tl.constexpr = (LATENT + BLOCK_OUT - 1) // BLOCK_OUT
    if head < HEADS:
        token = start + tl.arange(0, TOKENS)
        live = (token < tokens)[:, None]
        source = (q + token.to(tl.int64) * q_stride + head * q_head_stride)[:, None]
        target = (out + (token.to(tl.int64) * HEADS + head) * (LATENT + 2 * HALF))[:, None]
        values = tl.load(source + place[None, :], mask=live & (place < NOPE)[None, :], other=0.0)
        total = tl.dot(values, tl.trans(weights))
        tl.store(target + number[None, :], total.to(out.dtype.element_ty), mask=live & (number < LATENT)[None, :])
        if block == 0:
            pair = tl.arange(0, BLOCK_HALF)
            first, second = members(pair, HALF, PAIRS)
            there = live & (pair < HALF)[None, :]
            turn = token[:, None] * HALF + pair[None, :]
            c, s = tl.load(cos + turn, mask=there, other=0.0), tl.load(sin + turn, mask=there, other=0.0)
            x = tl.load(source + NOPE + first[None, :], mask=there, other=0.0).to(tl.float32)
            y = tl.load(source + NOPE + second[None, :], mask=there, other=0.0).to(tl.float32)
            tl.store(target + LATENT + first[None, :], (x * c - y * s).to(out.dtype.element_ty), mask=there)
            tl.store(target + LATENT + second[None, :], (y * c + x * s).to(out.dtype.element_ty), mask=there)
    else:
        for own in tl.static_range(0, TOKENS, PROGRAMS):
            one = (start + own + block).to(tl.int64)
            if (one < tokens) & (own + block < TOKENS):
                slot = tl.load(slots + one * slot_step, mask=one < planned, other=-1).to(tl.int64)
                _row(
                    rows, down, cos, sin, gain, one, slot, limit, row_stride, down_stride, eps,
                    LATENT, HALF, PAIRS, BLOCK_LATENT, BLOCK_HALF,
                )  # fmt: skip
