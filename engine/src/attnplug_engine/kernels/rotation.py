"""Rotation of one step's tokens on a GPU: launches the kernels of ``rotary`` and ``latent``."""

from __future__ import annotations

from typing import Protocol

import torch
import triton
from torch import Tensor

from attnplug.host import MLAWeights
from attnplug_engine.kernels import launch_options
from attnplug_engine.kernels.invariant import active
from attnplug_engine.kernels.latent import _absorb, _latent_rows
from attnplug_engine.kernels.rotary import _angles, _rotate_heads
from attnplug_engine.kernels.row_places import RowPlaces

_MANY_TOKENS = 64
"""From this number of tokens on, a program takes more heads, because there are enough programs."""
_MAX_ABSORBED = 256
"""Most tokens that this kernel absorbs. With more, a library's batched product is faster, although it needs copies."""


class Norm(Protocol):
    """A root-mean-square norm over the last dimension."""

    @property
    def weight(self) -> Tensor: ...
    @property
    def eps(self) -> float: ...


class FusedRotation:
    """Rotation for the tokens of one step on a GPU; in float32, whatever the dtype of its arguments.

    ``pairs``: ``(2 i, 2 i + 1)`` are rotated together, instead of ``(i, i + half)``.
    """

    __slots__ = ("_cos", "_half", "_options", "_pairs", "_sin")

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
        """Return ``x [tokens, heads, dim]`` with its first dimensions rotated."""
        turned = x.clone(memory_format=torch.contiguous_format)
        self.apply_(turned)
        return turned

    def apply_(self, x: Tensor) -> None:
        """Rotate the first dimensions of ``x [tokens, heads, dim]``, which may be a view, in place."""
        self._rotate(x, x.shape[1], 0, x.shape[1], None)

    def heads(
        self, qkv: Tensor, queries: int, skipped: int, keys: int, norms: tuple[Norm, Norm] | None
    ) -> tuple[Tensor, Tensor]:
        """Implement ``Rotation.heads``; queries and keys are rotated in place."""
        self._rotate(qkv, queries, skipped, queries + keys, norms)
        start = queries + skipped
        return qkv[:, :queries], qkv[:, start : start + keys]

    def _rotate(self, x: Tensor, queries: int, skipped: int, heads: int, norms: tuple[Norm, Norm] | None) -> None:
        tokens, _, dim = x.shape
        assert x.stride(2) == 1, "heads to be rotated in place lie apart"
        if not tokens:
            return
        q_gain, k_gain, eps = (x, x, 0.0) if norms is None else (norms[0].weight, norms[1].weight, norms[0].eps)
        block = _heads_at_once(tokens, heads)
        _rotate_heads[tokens, triton.cdiv(heads, block)](
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
            # One warp per tile: of two warps that share a tile, the later one would norm what the other has rotated.
            num_warps=2 if block * self._half >= 64 else 1,
            **self._options,
        )  # fmt: skip

    def latent_rows(self, q: Tensor, down: Tensor, nope: int, norm: Norm) -> Tensor:
        """Implement ``Rotation.latent_rows`` with one launch for queries and rows."""
        tokens, heads, dim = q.shape
        latent = norm.weight.shape[0]
        assert dim - nope == 2 * self._half and down.shape[1] == latent + dim - nope
        assert q.stride(2) == 1 and down.stride(1) == 1
        rows = down.new_empty(tokens, down.shape[1])
        if tokens:
            block = _heads_at_once(tokens, heads)
            _latent_rows[tokens, 1 + triton.cdiv(heads, block)](
                rows, q, down, self._cos, self._sin, norm.weight,
                rows.stride(0), q.stride(0), q.stride(1), down.stride(0), norm.eps,
                HEADS=heads,
                NOPE=nope,
                BLOCK_HEADS=block,
                num_warps=2,
                **self._row_shape(latent),
                **self._options,
            )  # fmt: skip
        return rows

    def absorbs(self, q: Tensor) -> bool:
        return 0 < q.shape[0] <= _MAX_ABSORBED and q.dtype in (torch.bfloat16, torch.float16) and not active()

    def absorb(self, q: Tensor, down: Tensor, weights: MLAWeights, norm: Norm, places: RowPlaces) -> Tensor:
        """Implement ``Rotation.absorb`` with one launch."""
        tokens, heads, dim = q.shape
        nope, latent = weights.w_kc.shape[1:]
        assert dim - nope == 2 * self._half and down.shape[1] == latent + dim - nope
        assert q.stride(2) == 1 and down.stride(1) == 1
        cache, slots = places.cache, places.slots
        out = q.new_empty(tokens, heads, down.shape[1])
        # Even one row is padded to a tensor-core tile: sums across threads would take twice as long.
        at_once = min(max(triton.next_power_of_2(tokens), 16), 32)
        block_nope = max(triton.next_power_of_2(nope), 16)
        tile = 8_192 if tokens <= at_once else 16_384
        block_out = min(max(tile // block_nope, 16), 128, max(triton.next_power_of_2(latent), 16))
        _absorb[heads + 1, triton.cdiv(latent, block_out), triton.cdiv(tokens, at_once)](
            out, cache, slots, q, down, weights.w_kc, self._cos, self._sin, norm.weight,
            tokens, slots.shape[0], cache.shape[0], slots.stride(0), cache.stride(0), q.stride(0), q.stride(1),
            down.stride(0), norm.eps,
            HEADS=heads,
            NOPE=nope,
            W_HEAD=weights.w_kc.stride(0),
            W_IN=weights.w_kc.stride(1),
            W_OUT=weights.w_kc.stride(2),
            TOKENS=at_once,
            BLOCK_NOPE=block_nope,
            BLOCK_OUT=block_out,
            **self._row_shape(latent),
            **self._options,
        )  # fmt: skip
        return out

    def _row_shape(self, latent: int) -> dict[str, int | bool]:
        """Constants of the kernels that make cache rows."""
        blocks = {"BLOCK_LATENT": triton.next_power_of_2(latent), "BLOCK_HALF": triton.next_power_of_2(self._half)}
        return {"LATENT": latent, "HALF": self._half, "PAIRS": self._pairs, **blocks}


def _heads_at_once(tokens: int, heads: int) -> int:
    few = tokens < _MANY_TOKENS or active()  # a norm's sum depends on the shape of the tile
    at_once: int = min(triton.next_power_of_2(heads), 4 if few else 16)
    return at_once
