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
from attnplug_hybrid_linear.varlen import CapturedVarlen, VarlenBlocks

CHUNK = 64
"""Tokens per chunk of the library's kernels."""


@dataclass(slots=True, eq=False)
class FlaChunks:
    """Sequences of ``rows`` rows in the library's format, all int64.

    ``cu_seqlens`` ``[sequences + 1]`` are the sequences' row offsets, on the device and on the host. ``indices``
    ``[chunks, 2]`` are each chunk's sequence and index within it. Captured sequences have no offsets on the host, may
    be empty, and the last one may have chunks behind its end.
    """

    rows: int
    cu_seqlens: Tensor
    cu_seqlens_cpu: Tensor | None
    indices: Tensor

    @classmethod
    def of(cls, query_lens: Sequence[int], blocks: VarlenBlocks) -> FlaChunks:
        cu_seqlens = list(accumulate((tokens for tokens in query_lens if tokens), initial=0))
        device = blocks.sequence.device
        indices = torch.stack([blocks.sequence, blocks.place], 1)
        return cls(cu_seqlens[-1], to_device(cu_seqlens, device), torch.tensor(cu_seqlens), indices)

    @classmethod
    def captured(cls, varlen: CapturedVarlen) -> FlaChunks:
        return cls(varlen.batch.rows, varlen.cu_seqlens, None, varlen.indices)

    def renew(self) -> None:
        """Call inside the graph, before its first layer. The library caches what it derives from ``cu_seqlens`` by the
        tensor's identity, so without a new tensor object a graph would replay the offsets of an earlier batch."""
        self.cu_seqlens = self.cu_seqlens.view(-1)


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
            from fla.ops.common.chunk_h import chunk_fwd_kernel_h
            from fla.ops.common.chunk_o import chunk_fwd_o
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule
            from fla.ops.kda import chunk_kda
            from fla.ops.simple_gla import chunk_simple_gla
            from fla.ops.utils import chunk_local_cumsum, prepare_chunk_offsets
            from fla.ops.utils.constant import RCP_LN2

        self._gdn, self._kda, self._simple = chunk_gated_delta_rule, chunk_kda, chunk_simple_gla
        self._cumsum, self._offsets = chunk_local_cumsum, prepare_chunk_offsets
        self._states, self._output = chunk_fwd_kernel_h, chunk_fwd_o
        self._log2_e = RCP_LN2  # its kernels compute powers of two

    def chunked(self, inputs: LinearInputs, scale: float, chunks: FlaChunks, states: Tensor) -> tuple[Tensor, Tensor]:
        rows, captured = chunks.rows, chunks.cu_seqlens_cpu is None
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
            if captured:
                out, after = self._simple_captured(common["q"], common["k"], v, common["g"], scale, chunks, states)
            else:
                out, after = self._simple(**common)
        else:
            common |= {"beta": inputs.beta[:rows].unsqueeze(0), "use_qk_l2norm_in_kernel": inputs.normalize}
            if decay.dim() == 3:
                out, after = self._kda(**common, use_graph=captured)
            else:
                out, after = self._gdn(**common, chunk_indices=chunks.indices)
        return out.squeeze(0), after

    def _simple_captured(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, scale: float, chunks: FlaChunks, states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run the kernels of ``chunk_simple_gla``. It reads the number of chunks back to the host, which a capture
        cannot do; here that number is bounded."""
        k, v, decay = k.contiguous(), v.contiguous(), decay.contiguous()
        heads, key_dim, value_dim = states.shape[1:]
        spans = {"cu_seqlens": chunks.cu_seqlens, "chunk_indices": chunks.indices}
        decay = self._cumsum(decay, chunk_size=CHUNK, scale=self._log2_e, **spans)
        before, after = k.new_empty(1, chunks.indices.shape[0], *states.shape[1:]), torch.empty_like(states)

        def grid(meta: dict[str, int]) -> tuple[int]:
            return (-(-key_dim // meta["BK"]) * -(-value_dim // meta["BV"]) * states.shape[0] * heads,)

        self._states[grid](
            k=k,
            v=v,
            h=before,
            g=decay,
            g_gamma=None,
            gk=None,
            gv=None,
            h0=states,
            ht=after,
            cu_seqlens=chunks.cu_seqlens,
            split_offsets=self._offsets(chunks.cu_seqlens, CHUNK),
            T=chunks.rows,
            H=heads,
            K=key_dim,
            V=value_dim,
            BT=CHUNK,
            BS=CHUNK,
            USE_G=True,
            USE_G_GAMMA=False,
            USE_GK=False,
            USE_GV=False,
            STATE_V_FIRST=False,
        )
        out = self._output(q=q.contiguous(), k=k, v=v, g=decay, h=before, scale=scale, chunk_size=CHUNK, **spans)
        return out.to(q.dtype), after


def _rows(x: Tensor, heads: int, normalize: bool) -> Tensor:
    """Expand queries or keys of key heads to all heads, L2-normalized if requested. ``simple_gla`` does neither."""
    if normalize:
        wide = x.float()
        x = (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
    return x.repeat_interleave(heads // x.shape[2], 2)
