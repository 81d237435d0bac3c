"""Rotary positions in one launch a layer: heads are normed and rotated where they lie, and latent rows are made."""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug.host import RowPlaces
from attnplug_engine.kernels import launch_options

_MANY_TOKENS = 64
"""From so many tokens on a program takes more heads: there are enough programs then."""


@triton.jit
def _angles(
    cos, sin, positions, frequencies, factor, HALF: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Cosines and sines of one token."""
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
def _members(pair, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Where the two numbers of a pair lie in a row."""
    if PAIRS:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + HALF
    return first, second


@triton.jit
def _turn_heads(
    x, cos, sin, q_gain, k_gain, token_stride, head_stride, eps,
    QUERIES: tl.constexpr, SKIPPED: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    PAIRS: tl.constexpr, NORM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some heads of one token, in place: normed where ``NORM``, and the first ``2 * HALF`` dimensions rotated.

    The first ``QUERIES`` heads are normed by ``q_gain``; ``SKIPPED`` heads after them are left alone.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    query = (head < QUERIES)[:, None]
    line = (x + token * token_stride + tl.where(head < QUERIES, head, head + SKIPPED) * head_stride)[:, None]
    pair = tl.arange(0, BLOCK_HALF)
    first, second = _members(pair, HALF, PAIRS)
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
    """``[heads, places]``: a query's weights or a key's."""
    there = place < DIM
    of_query = tl.load(q_gain + place, mask=there, other=0.0).to(tl.float32)
    of_key = tl.load(k_gain + place, mask=there, other=0.0).to(tl.float32)
    return tl.where(query, of_query[None, :], of_key[None, :])


@triton.jit(do_not_specialize=["planned", "limit"])
def _latent_rows(
    rows, slots, q, down, cos, sin, gain, planned, limit, slot_step, row_stride, q_stride, q_head_stride, down_stride,
    eps,
    HEADS: tl.constexpr, BEFORE: tl.constexpr, LATENT: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_LATENT: tl.constexpr, BLOCK_HALF: tl.constexpr, BY_SLOT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Of one token the cache row (program 0), or some heads' rotary parts in place.

    With ``BY_SLOT`` ``rows`` are ``limit`` rows of a cache, and the row is stored at the token's slot, if it is one of
    the ``planned`` tokens and its slot is none of padding.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK_HALF)
    first, second = _members(pair, HALF, PAIRS)
    there = pair < HALF
    c = tl.load(cos + token * HALF + pair, mask=there, other=0.0)
    s = tl.load(sin + token * HALF + pair, mask=there, other=0.0)
    if tl.program_id(1) == 0:
        column = tl.arange(0, BLOCK_LATENT)
        place = token
        if BY_SLOT:
            place = tl.load(slots + token * slot_step, mask=token < planned, other=-1).to(tl.int64)
        # Padding is computed, and not stored: to branch would be to wait for the slot before the row is loaded.
        kept = (place >= 0) & (place < limit)
        stored, stored_pairs = column < tl.where(kept, LATENT, 0), pair < tl.where(kept, HALF, 0)
        source, target = down + token * down_stride, rows + place * row_stride
        inside = column < LATENT
        latent = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
        gains = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
        a = tl.load(source + LATENT + first, mask=there, other=0.0).to(tl.float32)
        b = tl.load(source + LATENT + second, mask=there, other=0.0).to(tl.float32)
        latent *= tl.rsqrt(tl.sum(latent * latent, 0) / LATENT + eps) * gains
        tl.store(target + column, latent.to(rows.dtype.element_ty), mask=stored)
        tl.store(target + LATENT + first, (a * c - b * s).to(rows.dtype.element_ty), mask=stored_pairs)
        tl.store(target + LATENT + second, (b * c + a * s).to(rows.dtype.element_ty), mask=stored_pairs)
    else:
        head = (tl.program_id(1) - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        live = (head < HEADS)[:, None] & there[None, :]
        line = (q + token * q_stride + head * q_head_stride + BEFORE)[:, None]
        x = tl.load(line + first[None, :], mask=live, other=0.0).to(tl.float32)
        y = tl.load(line + second[None, :], mask=live, other=0.0).to(tl.float32)
        turned_x, turned_y = x * c[None, :] - y * s[None, :], y * c[None, :] + x * s[None, :]
        tl.store(line + first[None, :], turned_x.to(q.dtype.element_ty), mask=live)
        tl.store(line + second[None, :], turned_y.to(q.dtype.element_ty), mask=live)


class Norm(Protocol):
    """A root-mean-square norm over the last dimension."""

    @property
    def weight(self) -> Tensor: ...
    @property
    def eps(self) -> float: ...


class Turn:
    """The rotation for the tokens of one step on a GPU; in float32, whatever the type of what is rotated.

    ``pairs`` says that ``(2 i, 2 i + 1)`` are turned together, rather than ``(i, i + half)``.
    """

    __slots__ = ("_cos", "_half", "_options", "_pairs", "_sin")
    stores: ClassVar[bool] = True

    def __init__(self, positions: Tensor, frequencies: Tensor, factor: float, *, pairs: bool) -> None:
        tokens, self._half = positions.shape[0], frequencies.shape[0]
        self._cos, self._sin = torch.empty(2, tokens, self._half, dtype=torch.float32, device=positions.device).unbind()
        if positions.stride(0) != 1:
            positions = positions.contiguous()
        self._pairs = pairs
        self._options = launch_options(positions.device)
        if tokens:
            block = triton.next_power_of_2(self._half)
            _angles[(tokens,)](
                self._cos, self._sin, positions, frequencies, factor,
                HALF=self._half, BLOCK=block, num_warps=1, **self._options,
            )  # fmt: skip

    def apply(self, x: Tensor) -> Tensor:
        """``x`` ``[tokens, heads, dim]`` with its first dimensions rotated."""
        turned = x.clone(memory_format=torch.contiguous_format)
        self.apply_(turned)
        return turned

    def apply_(self, x: Tensor) -> None:
        """Rotate the first dimensions of ``x`` ``[tokens, heads, dim]``, which may be a view, in place."""
        self._turn(x, x.shape[1], 0, x.shape[1], None)

    def heads(
        self, qkv: Tensor, queries: int, skipped: int, keys: int, norms: tuple[Norm, Norm] | None
    ) -> tuple[Tensor, Tensor]:
        """See ``Rotation.heads``: queries and keys are rotated where they lie."""
        self._turn(qkv, queries, skipped, queries + keys, norms)
        start = queries + skipped
        return qkv[:, :queries], qkv[:, start : start + keys]

    def _turn(self, x: Tensor, queries: int, skipped: int, heads: int, norms: tuple[Norm, Norm] | None) -> None:
        tokens, _, dim = x.shape
        assert x.stride(2) == 1, "heads to be rotated in place lie apart"
        if not tokens:
            return
        q_gain, k_gain, eps = (x, x, 0.0) if norms is None else (norms[0].weight, norms[1].weight, norms[0].eps)
        block = _heads_at_once(tokens, heads)
        _turn_heads[tokens, triton.cdiv(heads, block)](
            x, self._cos, self._sin, q_gain, k_gain, x.stride(0), x.stride(1), eps,
            QUERIES=queries,
            SKIPPED=skipped,
            HEADS=heads,
            DIM=dim,
            HALF=self._half,
            PAIRS=self._pairs,
            NORM=norms is not None,
            BLOCK_HEADS=block,
            BLOCK_HALF=triton.next_power_of_2(self._half),
            BLOCK_REST=triton.next_power_of_2(max(dim - 2 * self._half, 1)),
            # A tile that two warps would both hold is one's: a late one would norm what the other has rotated.
            num_warps=2 if block * self._half >= 64 else 1,
            **self._options,
        )  # fmt: skip

    def latent_rows(
        self, q: Tensor, down: Tensor, before: int, norm: Norm, places: RowPlaces | None = None
    ) -> Tensor | None:
        """See ``Rotation.latent_rows``: one launch for queries and rows, which also stores them."""
        tokens, heads, dim = q.shape
        latent = norm.weight.shape[0]
        assert dim - before == 2 * self._half and down.shape[1] == latent + dim - before
        assert q.stride(2) == 1 and down.stride(1) == 1
        rows = down.new_empty(tokens, down.shape[1]) if places is None else places.cache
        slots = rows if places is None else places.slots
        if tokens:
            block = _heads_at_once(tokens, heads)
            _latent_rows[tokens, 1 + triton.cdiv(heads, block)](
                rows, slots, q, down, self._cos, self._sin, norm.weight,
                slots.shape[0], rows.shape[0], slots.stride(0), rows.stride(0), q.stride(0), q.stride(1),
                down.stride(0), norm.eps,
                HEADS=heads,
                BEFORE=before,
                LATENT=latent,
                HALF=self._half,
                PAIRS=self._pairs,
                BLOCK_HEADS=block,
                BLOCK_LATENT=triton.next_power_of_2(latent),
                BLOCK_HALF=triton.next_power_of_2(self._half),
                BY_SLOT=places is not None,
                num_warps=2,
                **self._options,
            )  # fmt: skip
        return rows if places is None else None


def _heads_at_once(tokens: int, heads: int) -> int:
    at_once: int = min(triton.next_power_of_2(heads), 4 if tokens < _MANY_TOKENS else 16)
    return at_once
