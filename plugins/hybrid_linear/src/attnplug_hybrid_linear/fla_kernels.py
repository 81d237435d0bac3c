"""The seam: flash-linear-attention's chunk kernels, and the only import of it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from attnplug.kernels import to_device
from attnplug.linear import LinearInputs
from attnplug_hybrid_linear.spans import Blocks

CHUNK = 64
"""Tokens per chunk in the library."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Spans as the library wants them, all int64.

    ``boundaries`` ``[spans + 1]`` say where each span begins and the last one ends, on the device and on the host.
    ``indices`` ``[chunks, 2]`` are each chunk's span and its place there. ``slots`` ``[spans]`` say from which state
    each span starts. A padded span starts from some request's state, and what becomes of it is not kept.
    """

    boundaries: Tensor
    boundaries_cpu: Tensor
    indices: Tensor
    slots: Tensor

    @classmethod
    def of(cls, query_lens: Sequence[int], blocks: Blocks, slots: Tensor) -> Chunks:
        boundaries = list(accumulate((tokens for tokens in query_lens if tokens), initial=0))
        device = blocks.span.device
        indices = torch.stack([blocks.span, blocks.place], 1)
        return cls(to_device(boundaries, device), torch.tensor(boundaries), indices, slots.clamp(min=0))


class ChunkKernels(Protocol):
    """A recurrence over long spans, by chunks."""

    def chunked(self, inputs: LinearInputs, scale: float, chunks: Chunks, states: Tensor) -> tuple[Tensor, Tensor]:
        """Advance each span's state ``[spans, heads, key_dim, value_dim]`` by its rows.

        Returns the output ``[rows, heads, value_dim]`` and the states after the last rows, both in new memory.
        """
        ...


class FlaKernels:
    """``fla.ops``: GDN, KDA, and simple gated linear attention for layers without a delta rule."""

    def __init__(self) -> None:
        with warnings.catch_warnings(action="ignore"):  # it warns about optional things that it does not find
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule
            from fla.ops.kda import chunk_kda
            from fla.ops.simple_gla import chunk_simple_gla

        self._gdn, self._kda, self._simple = chunk_gated_delta_rule, chunk_kda, chunk_simple_gla

    def chunked(self, inputs: LinearInputs, scale: float, chunks: Chunks, states: Tensor) -> tuple[Tensor, Tensor]:
        rows = int(chunks.boundaries_cpu[-1])
        q, k, v = (tensor[:rows].unsqueeze(0) for tensor in (inputs.q, inputs.k, inputs.v))
        # The library can take a constant decay as one, but overflows at the end of a span if the decay is below -1.4.
        decay = inputs.log_decay.expand(rows, -1) if inputs.log_decay.dim() == 1 else inputs.log_decay[:rows]
        common: dict[str, Any] = {
            "q": q,
            "k": k,
            "v": v,
            "g": decay.unsqueeze(0),
            "scale": scale,
            "initial_state": states,
            "output_final_state": True,
            "cu_seqlens": chunks.boundaries,
            "cu_seqlens_cpu": chunks.boundaries_cpu,
        }
        if inputs.beta is None:
            common |= {name: _rows(common[name], v.shape[2], inputs.normalize) for name in "qk"}
            out, after = self._simple(**common)
        else:
            common |= {"beta": inputs.beta[:rows].unsqueeze(0), "use_qk_l2norm_in_kernel": inputs.normalize}
            if decay.dim() == 3:
                out, after = self._kda(**common)
            else:
                out, after = self._gdn(**common, chunk_indices=chunks.indices)
        return out.squeeze(0), after


def _rows(x: Tensor, heads: int, normalize: bool) -> Tensor:
    """Queries or keys per head, from those of its key head: the simple kernel neither shares key heads nor
    normalizes."""
    if normalize:
        wide = x.float()
        x = (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
    return x.repeat_interleave(heads // x.shape[2], 2)
