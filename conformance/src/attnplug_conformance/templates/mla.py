"""SUMMARY: absorbed MLA, one request at a time, with torch. Replace ``attend_one`` by your kernel."""

import torch
from torch import Tensor

from attnplug import BackendContext, ForwardExtras, Geometry, LayerSpec, MLAShape, NewRows, Plan, PlannedAttention


class MyBackend(PlannedAttention):
    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.shape = MLAShape.of(context)  # heads, dims and the pool

    def plan(self, geometry: Geometry) -> Plan:  # once per batch: new tokens and slots of each request
        lens = enumerate(geometry.query_lens)
        requests = [(new, geometry.cache_slots([request])[0]) for request, new in lens if new]
        return Plan.of(self.backend_id, geometry, requests, geometry.new_slots())

    def attend(  # once per layer; the new rows are in the cache by now
        self, q: Tensor, layer: LayerSpec, plan: Plan, new: NewRows | None, extras: ForwardExtras
    ) -> Tensor:
        queries = torch.split(q, [count for count, _ in plan.metadata])
        sums = [None] * len(queries) if extras.lse is None else torch.split(extras.lse, [len(q) for q in queries])
        work = zip(queries, plan.metadata, sums, strict=True)
        return torch.cat([self.attend_one(q, slots, layer, lse) for q, (_, slots), lse in work])

    def attend_one(self, q: Tensor, slots: Tensor, layer: LayerSpec, lse: Tensor | None) -> Tensor:
        rows = self.shape.pool.read_rows(layer.layer_id, slots).float()  # [keys, kv_lora_rank + rope]
        scores = torch.einsum("qhd,kd->hqk", q.float(), rows) * layer.scale
        future = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(len(slots) - len(q) + 1)
        scores = scores.masked_fill(future, float("-inf"))
        if lse is not None:
            lse.copy_(scores.logsumexp(-1).T)  # natural logarithm, [tokens, heads]
        values = rows[:, : self.shape.dims.kv_lora_rank]
        return torch.einsum("hqk,kd->qhd", scores.softmax(-1), values).to(q.dtype)
