"""Protocol of chunk kernels and its flash-linear-attention implementation. Only this module imports the library."""

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
from attnplug_hybrid_linear.varlen import VarlenBlocks

CHUNK = 64
"""Tokens per chunk of the library's kernels."""


@dataclass(frozen=True, slots=True, eq=False)
class FlaChunks:
    """Sequences in the library's format, all int64.

    ``cu_seqlens`` ``[sequences + 1]`` are the sequences' row offsets, on the device and on the host. ``indices``
    ``[chunks, 2]`` are each chunk's sequence and index within it. ``slots`` ``[sequences]`` are the slots of the
    initial states. A padded sequence starts from some request's state, and its final state is discarded.
    """

    cu_seqlens: Tensor
    cu_seqlens_cpu: Tensor
    indices: Tensor
    slots: Tensor

    @classmethod
    def of(cls, query_lens: Sequence[int], blocks: VarlenBlocks, slots: Tensor) -> FlaChunks:
        cu_seqlens = list(accumulate((tokens for tokens in query_lens if tokens), initial=0))
        device = blocks.sequence.device
        indices = torch.stack([blocks.sequence, blocks.place], 1)
        return cls(to_device(cu_seqlens, device), torch.tensor(cu_seqlens), indices, slots.clamp(min=0))


class ChunkKernels(Protocol):
    """Chunked recurrence over long sequences."""

    def chunked(self, inputs: LinearInputs, scale: float, chunks: FlaChunks, states: Tensor) -> tuple[Tensor, Tensor]:
        """Advance the initial ``states`` ``[sequences, heads, key_dim, value_dim]`` by the sequences' rows.

        Returns the output ``[rows, heads, value_dim]`` and the final states, both in new memory.
        """
        ...


class FlaKernels:
    """``fla.ops``: GDN, KDA, and simple gated linear attention for layers without a delta rule."""

    def __init__(self) -> None:
        with warnings.catch_warnings(action="ignore"):  # it warns about missing optional dependencies
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule
            from fla.ops.kda import chunk_kda
            from fla.ops.simple_gla import chunk_simple_gla

        self._gdn, self._kda, self._simple = chunk_gated_delta_rule, chunk_kda, chunk_simple_gla

    def chunked(self, inputs: LinearInputs, scale: float, chunks: FlaChunks, states: Tensor) -> tuple[Tensor, Tensor]:
        rows = int(chunks.cu_seqlens_cpu[-1])
        q, k, v = (tensor[:rows].unsqueeze(0) for tensor in (inputs.q, inputs.k, inputs.v))
        # The library accepts a constant decay, but overflows at the end of a sequence if it is below -1.4.
        decay = inputs.log_decay.expand(rows, -1) if inputs.log_decay.dim() == 1 else inputs.log_decay[:rows]
        common: dict[str, Any] = {
            "q": q,
            "k": k,
            "v": v,
            "g": decay.unsqueeze(0),
            "scale": scale,
            "initial_state": states,
            "output_final_state": True,
            "cu_seqlens": chunks.cu_seqlens,
            "cu_seqlens_cpu": chunks.cu_seqlens_cpu,
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
    """Expand queries or keys of key heads to all heads, L2-normalized if requested. ``simple_gla`` does neither."""
    if normalize:
        wide = x.float()
        x = (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
    return x.repeat_interleave(heads // x.shape[2], 2)
