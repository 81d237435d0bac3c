"""MHA and GQA in plain torch: one request at a time, or a captured decode of all requests at once."""

from typing import NamedTuple

import torch
from torch import Tensor

from acme_attention.options import AcmeOptions
from attnplug import (
    BackendContext,
    ForwardExtras,
    Geometry,
    GraphLimits,
    LayerSpec,
    NewRows,
    Plan,
    PlannedAttention,
)


class CapturedRows(NamedTuple):
    """Static memory that a captured decode reads."""

    slots: Tensor  # [requests, rows] int64
    visible: Tensor  # [requests, rows] bool


class AcmeMHA(PlannedAttention):
    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        assert context.pools.mha is not None  # a backend that claims MHA is built with its pool
        self.pool = context.pools.mha
        self.dtype = getattr(torch, context.options_of(AcmeOptions).accumulate)

    def plan(self, geometry: Geometry) -> Plan:  # eager: new tokens of each request, and the slots of all its rows
        lens = enumerate(geometry.query_lens)
        requests = [(new, geometry.cache_slots([request])[0]) for request, new in lens if new]
        return Plan.of(self.backend_id, geometry, requests, geometry.new_slots())

    def reserve(self, limits: GraphLimits) -> tuple[Tensor, Tensor]:  # one lane's memory, allocated once
        rows, device = limits.pages * self.context.page_size, self.context.device
        slots = torch.zeros(limits.max_bs, rows + 1, dtype=torch.int64, device=device)  # the last column: new slots
        return slots, torch.zeros(limits.max_bs, rows, dtype=torch.bool, device=device)

    def capture(self, geometry: Geometry, memory: tuple[Tensor, Tensor]) -> Plan:  # once per captured shape
        slots, visible = (tensor[: geometry.requests] for tensor in memory)
        rows = geometry.page_table.shape[1] * geometry.page_size
        return Plan.of(self.backend_id, geometry, CapturedRows(slots[:, :rows], visible[:, :rows]), slots[:, -1])

    def refill(self, plan: Plan, geometry: Geometry) -> None:  # inside the graph: reads only device memory
        size, device = geometry.page_size, geometry.device
        pages = geometry.page_table.long()[:, :, None]
        slots = (pages * size + torch.arange(size, device=device)).flatten(1)
        visible = torch.arange(slots.shape[1], device=device) < geometry.seq_lens[:, None]
        plan.metadata.slots.copy_(slots.where(visible, 0))  # entries behind the last page are garbage
        plan.metadata.visible.copy_(visible)
        assert plan.new_slots is not None
        plan.new_slots.copy_(geometry.new_slots())

    def attend(  # once per layer; the new rows are in the cache by now
        self, q: Tensor, layer: LayerSpec, plan: Plan, new: NewRows | None, extras: ForwardExtras
    ) -> Tensor:
        if isinstance(plan.metadata, CapturedRows):
            return self.attend_captured(q, layer, plan.metadata)
        queries = torch.split(q, [count for count, _ in plan.metadata])
        pairs = zip(queries, plan.metadata, strict=True)
        return torch.cat([self.attend_one(q, slots, layer) for q, (_, slots) in pairs])

    def attend_one(self, q: Tensor, slots: Tensor, layer: LayerSpec) -> Tensor:
        keys, values = self.read(layer, slots, q.shape[1])
        scores = torch.einsum("qhd,khd->hqk", q.to(self.dtype), keys) * layer.scale
        future = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(len(slots) - len(q) + 1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)

    def attend_captured(self, q: Tensor, layer: LayerSpec, rows: CapturedRows) -> Tensor:
        read = self.read(layer, rows.slots.flatten(), q.shape[1])
        shown = rows.visible[:, :, None, None]
        keys, values = (part.unflatten(0, rows.slots.shape).where(shown, 0) for part in read)
        scores = torch.einsum("rhd,rkhd->rhk", q.to(self.dtype), keys) * layer.scale
        weights = scores.masked_fill(~rows.visible[:, None], float("-inf")).softmax(-1)
        weights = weights.where(rows.visible.any(1)[:, None, None], 0)  # padded requests: zeros
        return torch.einsum("rhk,rkhd->rhd", weights, values).to(q.dtype)

    def read(self, layer: LayerSpec, slots: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[rows, heads, dim]`` of some slots, repeated for every query head."""
        keys, values = self.pool.read_keys(layer.layer_id, slots), self.pool.read_values(layer.layer_id, slots)
        times = heads // keys.shape[1]
        return keys.to(self.dtype).repeat_interleave(times, 1), values.to(self.dtype).repeat_interleave(times, 1)
