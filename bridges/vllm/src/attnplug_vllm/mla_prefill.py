"""MLA prefill in vLLM on a backend of ours: causal over the new tokens, then chunk by chunk over cached context.

vLLM gathers and up-projects the rows of a chunk and merges partial results. What is left is ``forward_ragged``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from attnplug import ForwardBatch, ForwardMode, Geometry, LayerSpec, Plan, RaggedCall
from attnplug.host import ModelAttention, bind_hook, optional_hooks, spread
from attnplug_vllm.memory import GroupAttention

_PLANNING = "init_mha_chunk_metadata"
_RAGGED = "forward_ragged"


@dataclass(frozen=True, slots=True, eq=False)
class ChunkCall:
    """A call over one chunk of context. ``rows`` are the queries that take part, of those that vLLM gives; ``None``
    means all of them. The others have no context in this chunk."""

    call: RaggedCall
    rows: slice | Tensor | None = None


class AttnplugMLAPrefill(MLAPrefillBackend):
    """Made by the builder of a KV group, in place of the one that vLLM chose for its layers."""

    group: GroupAttention
    common: Any = None
    """The step's ``CommonAttentionMetadata``, set before ``prepare_metadata``."""

    @classmethod
    def of(cls, group: GroupAttention) -> AttnplugMLAPrefill:
        layer = group.model.layers[0]
        assert layer.mla is not None
        made = cls(
            num_heads=layer.num_heads,
            scale=layer.scale,
            kv_lora_rank=layer.mla.kv_lora_rank,
            qk_nope_head_dim=layer.mla.qk_nope_head_dim,
            qk_rope_head_dim=layer.mla.qk_rope_head_dim,
            v_head_dim=layer.v_head_dim,
            vllm_config=group.config,
        )
        made.group, made._layer, made._attention = group, layer, None
        return made

    _layer: LayerSpec
    _attention: ModelAttention | None

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        super().prepare_metadata(prefill_metadata)
        attention = self.group.ready()
        if attention is not self._attention:
            self._attention, backend = attention, attention.backend
            self._run = bind_hook(backend, _RAGGED, optional_hooks()[_RAGGED])
            self._plan_calls = bind_hook(backend, _PLANNING, optional_hooks()[_PLANNING], ("disable_flashinfer_ragged",))
        starts = prefill_metadata.query_start_loc
        requests = starts.shape[0] - 1
        first = self.common.num_reqs - requests
        new_lens = self.common.query_start_loc_cpu[first:].diff().tolist()
        live = requests
        while live and not new_lens[live - 1]:  # requests that only pad the batch
            live -= 1
        new_lens, starts = new_lens[:live], starts[: live + 1]
        self._new = RaggedCall(0, tuple(new_lens), tuple(new_lens), True, starts, starts)
        self._chunks = chunk_calls(prefill_metadata, new_lens)
        self._plan = self._planned(prefill_metadata, first, live)

    def _planned(self, prefill: Any, first: int, live: int) -> Plan | None:
        """What a backend plans for all calls of this step, if it plans them."""
        if self._plan_calls is None:
            return None
        seq_lens, table = self.common.seq_lens[first : first + live], prefill.block_table[:live]
        lens = self._new.query_lens
        geometry = Geometry(
            ForwardMode.EXTEND,
            table,
            seq_lens,
            self.group.page_size,
            rows=sum(lens),
            max_seq_len=min(self.common.max_seq_len, table.shape[1] * self.group.page_size),
            max_new=max(lens),
            new_lens=self._new.query_indptr.diff(),
            calls=(self._new, *(chunk.call for chunk in self._chunks)),
        )
        plan: Plan | None = self._plan_calls(ForwardBatch(geometry), False)
        return plan

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        assert output_scale is None, "quantised output is not claimed"
        lse = _new_lse(q) if return_softmax_lse else None
        result = self._ragged(self._new, q, k, v, lse)
        if out is not None:
            result = out.copy_(result)
        return result if lse is None else (result, lse.t().contiguous())

    def run_prefill_context_chunk(
        self, *, q: Tensor, k: Tensor, v: Tensor, chunk_idx: int = 0, chunk: Any = None, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """vLLM gives the number of a chunk with all queries, or (later versions) the chunk with its own queries."""
        planned = self._chunks[chunk_idx if chunk is None else chunk.index]
        if planned.rows is None:
            lse = _new_lse(q)
            result = self._ragged(planned.call, q, k, v, lse)
        else:
            queries = q[planned.rows]
            part = _new_lse(queries)
            result = q.new_zeros(*q.shape[:2], v.shape[-1])
            result[planned.rows] = self._ragged(planned.call, queries, k, v, part)
            lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
            lse[planned.rows] = part
        if out is not None:
            result = out.copy_(result)
        return result, lse.t().contiguous()

    def _ragged(self, call: RaggedCall, q: Tensor, k: Tensor, v: Tensor, lse: Tensor | None) -> Tensor:
        assert self._run is not None, "selection refuses a backend without it"
        result: Tensor = self._run(q, k, v, self._layer, call, self._plan, lse)
        return result


def _new_lse(q: Tensor) -> Tensor:
    return torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)


def chunk_calls(prefill: Any, new_lens: Sequence[int]) -> list[ChunkCall]:
    """The calls over chunks of context, as this version of vLLM plans them."""
    context = prefill.chunked_context
    if context is None:
        return []
    if hasattr(context, "chunks"):
        return [_of_chunk(chunk, new_lens) for chunk in context.chunks]
    return [
        _of_lengths(index, new_lens, lens, prefill.query_start_loc, context.cu_seq_lens[index])
        for index, lens in enumerate(context.seq_lens.tolist())
    ]


def _of_chunk(chunk: Any, new_lens: Sequence[int]) -> ChunkCall:
    """A run of requests that all have rows in the chunk."""
    queries, rows = tuple(new_lens[chunk.request_slice]), tuple(chunk.seq_lens.tolist())
    return ChunkCall(RaggedCall(1 + chunk.index, queries, rows, False, chunk.query_start_loc, chunk.cu_seq_lens))


def _of_lengths(index: int, new_lens: Sequence[int], lens: Sequence[int], starts: Tensor, ends: Tensor) -> ChunkCall:
    """All requests, of which some may have no rows in the chunk; our calls have no empty sequences."""
    live = [request for request, rows in enumerate(lens[: len(new_lens)]) if rows]
    if len(live) == len(new_lens):
        count = len(live) + 1
        call = RaggedCall(1 + index, tuple(new_lens), tuple(lens[: len(live)]), False, starts[:count], ends[:count])
        return ChunkCall(call)
    queries, rows = [new_lens[request] for request in live], [lens[request] for request in live]
    call = RaggedCall.of(1 + index, queries, rows, causal=False, device=starts.device)
    firsts = [sum(new_lens[:request]) for request in live]
    if live == list(range(live[0], live[-1] + 1)):
        return ChunkCall(call, slice(firsts[0], firsts[0] + sum(queries)))
    return ChunkCall(call, spread(firsts, queries, starts.device)[1])
