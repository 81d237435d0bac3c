"""MLA prefill on an attnplug backend: causal attention over the new tokens, then over cached context chunk by chunk.

vLLM gathers and up-projects the rows of a chunk and merges partial results. The backend runs ``forward_ragged``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnplug import ForwardBatch, ForwardMode, Geometry, Plan, RaggedCall
from attnplug.host import ModelAttention, bind_forward, bind_optional_hook
from attnplug.kernels import spread
from attnplug_vllm.kv_group import GroupAttention


@dataclass(frozen=True, slots=True, eq=False)
class ChunkCall:
    """Call over one chunk of context. ``rows`` selects the queries with context in this chunk; ``None`` is all."""

    call: RaggedCall
    rows: slice | Tensor | None = None


class RaggedPrefill:
    """Prefill backend of a KV group, with the planned calls of the current step."""

    def __init__(self, group: GroupAttention) -> None:
        self._group, self._layer = group, group.model.layers[0]  # the layers of a group are alike
        self._attention: ModelAttention | None = None

    def prepare(self, prefill: Any, common: Any) -> None:
        """Plan the calls of a step from its ``MLACommonPrefillMetadata``: the last requests of ``common``, its
        ``CommonAttentionMetadata``."""
        attention = self._group.ready()
        if attention is not self._attention:
            self._attention, backend = attention, attention.backend
            self._run = bind_forward(self, "_run", backend, "forward_ragged")
            self._plan_calls = bind_optional_hook(backend, "init_mha_chunk_metadata")
        starts = prefill.query_start_loc
        live = starts.shape[0] - 1
        first = common.num_reqs - live
        new_lens = common.query_start_loc_cpu[first:].diff().tolist()
        while live and not new_lens[live - 1]:  # padded requests
            live -= 1
        new_lens, starts = new_lens[:live], starts[: live + 1]
        self._new = RaggedCall(0, tuple(new_lens), tuple(new_lens), True, starts, starts)
        self._chunks = chunk_calls(prefill, new_lens)
        self._plan = self._plan_step(prefill, common, first)

    def _plan_step(self, prefill: Any, common: Any, first: int) -> Plan | None:
        """Plan all calls of this step; ``None`` if the backend plans none."""
        if self._plan_calls is None:
            return None
        lens = self._new.query_lens
        seq_lens, table = common.seq_lens[first : first + len(lens)], prefill.block_table[: len(lens)]
        geometry = Geometry(
            ForwardMode.EXTEND,
            table,
            seq_lens,
            self._group.page_size,
            rows=sum(lens),
            max_seq_len=min(common.max_seq_len, table.shape[1] * self._group.page_size),
            max_new=max(lens),
            new_lens=self._new.query_indptr.diff(),
            calls=(self._new, *(chunk.call for chunk in self._chunks)),
        )
        plan: Plan | None = self._plan_calls(ForwardBatch(geometry), False)
        return plan

    def new_tokens(self, q: Tensor, k: Tensor, v: Tensor, with_lse: bool) -> tuple[Tensor, Tensor | None]:
        """Attend causally to the new rows. Returns ``[rows, heads, v_head_dim]`` and vLLM's LSE ``[heads, rows]``."""
        lse = _new_lse(q) if with_lse else None
        result = self._ragged(self._new, q, k, v, lse)
        return result, None if lse is None else lse.t().contiguous()

    def context_chunk(self, index: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Attend to the rows of a chunk, without a causal mask. LSE is -inf for queries without rows in the chunk."""
        planned = self._chunks[index]
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
        return result, lse.t().contiguous()

    def _ragged(self, call: RaggedCall, q: Tensor, k: Tensor, v: Tensor, lse: Tensor | None) -> Tensor:
        assert self._run is not None, "selection refuses a backend without it"
        result: Tensor = self._run(q, k, v, self._layer, call, self._plan, lse)
        return result


def _new_lse(q: Tensor) -> Tensor:
    return torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)


def chunk_calls(prefill: Any, new_lens: Sequence[int]) -> list[ChunkCall]:
    """Calls over chunks of context, from the metadata of either form that vLLM's versions have."""
    context = prefill.chunked_context
    if context is None:
        return []
    if hasattr(context, "chunks"):
        return [_call_of_chunk(chunk, new_lens) for chunk in context.chunks]
    return [
        _call_of_all(index, new_lens, lens, prefill.query_start_loc, context.cu_seq_lens[index])
        for index, lens in enumerate(context.seq_lens.tolist())
    ]


def _call_of_chunk(chunk: Any, new_lens: Sequence[int]) -> ChunkCall:
    """Call of consecutive requests that all have rows in the chunk (newer versions)."""
    queries, rows = tuple(new_lens[chunk.request_slice]), tuple(chunk.seq_lens.tolist())
    return ChunkCall(RaggedCall(1 + chunk.index, queries, rows, False, chunk.query_start_loc, chunk.cu_seq_lens))


def _call_of_all(index: int, new_lens: Sequence[int], lens: Sequence[int], starts: Tensor, ends: Tensor) -> ChunkCall:
    """Call of the requests that have rows in the chunk (0.26, which lists all): calls have no empty sequences (C3)."""
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
