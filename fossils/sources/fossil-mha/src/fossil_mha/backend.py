"""The backend, on the base class of the contract."""

from __future__ import annotations

import torch
from torch import Tensor

from attnplug import BackendContext, ForwardExtras, Geometry, LayerSpec, NewRows, Plan, PlannedAttention
from fossil_mha.plugin import FossilOptions


class FossilMHA(PlannedAttention):
    """A plan's metadata has, for each request with new rows, their number and the slots of all rows."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        assert context.pools.mha is not None
        self.pool = context.pools.mha
        options = context.options_of(FossilOptions) if context.name == "fossil_mha" else FossilOptions()
        self.dtype = getattr(torch, options.accumulate)

    def plan(self, geometry: Geometry) -> Plan:
        requests = [(new, geometry.cache_slots([request])[0]) for request, new in enumerate(geometry.query_lens) if new]
        return Plan.of(self.backend_id, geometry, requests, geometry.new_slots())

    def attend(self, q: Tensor, layer: LayerSpec, plan: Plan, new: NewRows | None, extras: ForwardExtras) -> Tensor:
        out = q.new_empty(*q.shape[:2], layer.v_head_dim) if extras.out is None else extras.out
        first = 0
        for count, slots in plan.metadata:
            rows = slice(first, first + count)
            first += count
            result, sums = self.attend_one(q[rows], slots, layer)
            out[rows] = result.to(q.dtype)
            if extras.lse is not None:
                extras.lse[rows] = sums.float()
        return out

    def attend_one(self, q: Tensor, slots: Tensor, layer: LayerSpec) -> tuple[Tensor, Tensor]:
        read = self.pool.read_keys(layer.layer_id, slots), self.pool.read_values(layer.layer_id, slots)
        keys, values = (rows.to(self.dtype).repeat_interleave(q.shape[1] // rows.shape[1], 1) for rows in read)
        scores = torch.einsum("qhd,khd->hqk", q.to(self.dtype), keys) * layer.scale
        key = torch.arange(len(slots), device=q.device)
        query = key[len(slots) - len(q) :, None]
        hidden = key > query
        if layer.sliding_window is not None:
            hidden |= key <= query - layer.sliding_window
        scores = scores.masked_fill(hidden, float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values), scores.logsumexp(-1).T
