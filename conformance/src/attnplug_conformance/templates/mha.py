"""SUMMARY: one request at a time, with torch. Replace ``attend_one`` by your kernel."""

import torch
from torch import Tensor

from attnplug import BackendContext, ForwardExtras, Geometry, LayerSpec, NewRows, Plan, PlannedAttention


class MyBackend(PlannedAttention):
    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        assert context.pools.mha is not None  # a backend that claims MHA is built with its pool
        self.pool = context.pools.mha

    def plan(self, geometry: Geometry) -> Plan:  # once per batch: new tokens and slots of each request
        lens = enumerate(geometry.query_lens)
        requests = [(new, geometry.cache_slots([request])[0]) for request, new in lens if new]
        return Plan.of(self.backend_id, geometry, requests, geometry.new_slots())

    def attend(  # once per layer; the new rows are in the cache by now
        self, q: Tensor, layer: LayerSpec, plan: Plan, new: NewRows | None, extras: ForwardExtras
    ) -> Tensor:
        queries = torch.split(q, [count for count, _ in plan.metadata])
        pairs = zip(queries, plan.metadata, strict=True)
        return torch.cat([self.attend_one(q, slots, layer) for q, (_, slots) in pairs])

    def attend_one(self, q: Tensor, slots: Tensor, layer: LayerSpec) -> Tensor:
        read = self.pool.read_keys(layer.layer_id, slots), self.pool.read_values(layer.layer_id, slots)
        keys, values = (rows.float().repeat_interleave(q.shape[1] // rows.shape[1], 1) for rows in read)
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * layer.scale
        future = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(len(slots) - len(q) + 1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
