"""The backend. A captured batch runs as one dense operation, an eager one request by request."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import (
    BackendContext,
    ForwardBatch,
    ForwardExtras,
    Geometry,
    GraphLimits,
    LayerSpec,
    MLAShape,
    NewRows,
    Plan,
    PlannedAttention,
    RaggedCall,
)


@dataclass(frozen=True, eq=False)
class Captured:
    """Static memory of a captured batch: lengths ``[requests]``, page table ``[requests, pages]``, slots ``[rows]``."""

    lens: Tensor
    table: Tensor
    slots: Tensor


class FossilMLA(PlannedAttention):
    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.shape = MLAShape.of(context)

    def plan(self, geometry: Geometry) -> Plan:
        if geometry.calls:  # it runs as MHA, and core writes the rows
            return Plan.of(self.backend_id, geometry)
        requests = [(new, geometry.cache_slots([request])[0]) for request, new in enumerate(geometry.query_lens) if new]
        return Plan.of(self.backend_id, geometry, requests, geometry.new_slots())

    def reserve(self, limits: GraphLimits) -> Captured:
        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=self.context.device)

        return Captured(
            zeros(limits.max_bs), zeros(limits.max_bs, limits.pages), zeros(limits.max_num_tokens, dtype=torch.int64)
        )

    def capture(self, geometry: Geometry, memory: Captured) -> Plan:
        requests, pages = geometry.page_table.shape
        work = Captured(memory.lens[:requests], memory.table[:requests, :pages], memory.slots[: geometry.rows])
        plan = Plan.of(self.backend_id, geometry, work, work.slots)
        self.refill(plan, geometry)
        return plan

    def refill(self, plan: Plan, geometry: Geometry) -> None:
        plan.metadata.lens.copy_(geometry.seq_lens)
        plan.metadata.table.copy_(geometry.page_table)
        plan.metadata.slots.copy_(geometry.new_slots())

    def attend(self, q: Tensor, layer: LayerSpec, plan: Plan, new: NewRows | None, extras: ForwardExtras) -> Tensor:
        if isinstance(plan.metadata, Captured):
            return self.attend_captured(q, layer, plan.metadata, extras.lse)
        out, first = q.new_empty(*q.shape[:2], self.shape.dims.kv_lora_rank), 0
        for count, slots in plan.metadata:
            rows = slice(first, first + count)
            first += count
            cached = self.shape.pool.read_rows(layer.layer_id, slots)[:, None]
            values = cached[..., : self.shape.dims.kv_lora_rank]
            lse = None if extras.lse is None else extras.lse[rows]
            out[rows] = attend_one(q[rows], cached, values, layer.scale, len(slots) - count, lse)
        return out

    def attend_captured(self, q: Tensor, layer: LayerSpec, work: Captured, lse: Tensor | None) -> Tensor:
        """Attend with q ``[requests * new, heads, width]``. Nothing depends on a length on the host."""
        requests, size = work.table.shape[0], self.context.page_size
        offsets = torch.arange(size, device=q.device)
        slots = (work.table[:, :, None].long() * size + offsets).flatten(1)  # [requests, keys]
        key = torch.arange(slots.shape[1], device=q.device)
        valid = key < work.lens[:, None]
        rows = self.shape.pool.read_rows(layer.layer_id, slots.where(valid, 0)).float()
        rows = rows.masked_fill(~valid[..., None], 0)  # rows behind a request's end may hold NaN
        queries = q.float().unflatten(0, (requests, -1))  # [requests, new, heads, width]
        count = queries.shape[1]
        seen = key <= (work.lens[:, None, None] - count + torch.arange(count, device=q.device)[:, None])
        scores = torch.einsum("rqhd,rkd->rhqk", queries, rows) * layer.scale
        scores = scores.masked_fill(~(seen & valid[:, None])[:, None], float("-inf"))
        if lse is not None:
            lse.copy_(scores.logsumexp(-1).transpose(1, 2).flatten(0, 1))
        weights = scores.softmax(-1).nan_to_num(0.0)  # a padded request sees no key
        result = torch.einsum("rhqk,rkd->rqhd", weights, rows[..., : self.shape.dims.kv_lora_rank])
        return result.flatten(0, 1).to(q.dtype)

    def init_mha_chunk_metadata(self, forward_batch: ForwardBatch) -> Plan:
        spans = {
            call.index: list(zip(call.query_lens, call.kv_lens, strict=True)) for call in forward_batch.geometry.calls
        }
        return Plan.of(self.backend_id, forward_batch.geometry, spans)

    def forward_ragged(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: LayerSpec,
        call: RaggedCall,
        plan: Plan | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        if call.padded_rows is not None:
            return attend_padded(q, k, v, layer.scale, call.query_indptr, lse)
        assert plan is not None  # planned by init_mha_chunk_metadata
        out, query, key = q.new_empty(*q.shape[:2], v.shape[-1]), 0, 0
        for queries, keys in plan.part_of(self.backend_id).metadata[call.index]:
            rows, cached = slice(query, query + queries), slice(key, key + keys)
            query, key = query + queries, key + keys
            before = keys - queries if call.causal else keys
            sums = None if lse is None else lse[rows]
            out[rows] = attend_one(q[rows], k[cached], v[cached], layer.scale, before, sums)
        return out


def attend_one(q: Tensor, k: Tensor, v: Tensor, scale: float, before: int, lse: Tensor | None) -> Tensor:
    """Attend with one request's q ``[queries, heads, width]``; query i sees the first ``before + i + 1`` keys.

    k ``[keys, heads or 1, width]``, v ``[keys, heads or 1, v_width]``.
    """
    keys, values = (rows.float().expand(-1, q.shape[1], -1) for rows in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    future = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(before + 1)
    scores = scores.masked_fill(future, float("-inf"))
    if lse is not None:
        lse.copy_(scores.logsumexp(-1).T)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)


def attend_padded(q: Tensor, k: Tensor, v: Tensor, scale: float, indptr: Tensor, lse: Tensor | None) -> Tensor:
    """Attend causally within sequences that begin at ``indptr`` ``[sequences + 1]``, by lengths on the device alone.

    q, k and v ``[rows, heads, width]``. Rows behind the last sequence are padding: they may hold NaN, and get zeros.
    """
    row = torch.arange(len(q), device=q.device)
    sequence = torch.searchsorted(indptr[1:].contiguous(), row, right=True)
    valid = row < indptr[-1]
    seen = (sequence[:, None] == sequence) & (row[:, None] >= row) & valid
    keys, values = (rows.float().where(valid[:, None, None], 0) for rows in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    scores = scores.masked_fill(~seen, float("-inf"))
    if lse is not None:
        lse.copy_(scores.logsumexp(-1).T)
    weights = scores.softmax(-1).where(valid[:, None], 0)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
