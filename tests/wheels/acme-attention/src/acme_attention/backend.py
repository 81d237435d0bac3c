"""The backend itself, from the public names of attnplug alone."""

from __future__ import annotations

import torch
from torch import Tensor

from acme_attention.plugin import AcmeOptions
from attnplug import BackendContext, BackendError, ForwardExtras, Geometry, LayerSpec, NewRows, Plan, PlannedAttention


class AcmeBackend(PlannedAttention):
    """MHA and GQA over a paged cache. A plan's metadata is, for each request with new tokens, how many these are and
    the slots of all its rows."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        if context.pools.mha is None:
            raise BackendError(f"backend {context.name} needs an MHA pool")
        self._pool = context.pools.mha
        self._accumulate = getattr(torch, context.options_of(AcmeOptions).accumulate)

    def plan(self, geometry: Geometry) -> Plan:
        requests = tuple(
            (queries, geometry.cache_slots([number])[0])
            for number, queries in enumerate(geometry.query_lens)
            if queries
        )
        return Plan.of(self.backend_id, geometry, requests, geometry.new_slots())

    def attend(self, q: Tensor, layer: LayerSpec, plan: Plan, new: NewRows | None, extras: ForwardExtras) -> Tensor:
        out = q.new_empty(*q.shape[:2], layer.v_head_dim) if extras.out is None else extras.out
        first = 0
        for queries, slots in plan.metadata:
            out[first : first + queries] = self._attend_one(q[first : first + queries], layer, slots)
            first += queries
        return out

    def _attend_one(self, q: Tensor, layer: LayerSpec, slots: Tensor) -> Tensor:
        """One request: q ``[queries, heads, dim]`` over the cache rows at ``slots`` ``[keys]``, causal."""
        shared = layer.num_heads // layer.num_kv_heads
        read = (self._pool.read_keys(layer.layer_id, slots), self._pool.read_values(layer.layer_id, slots))
        k, v = (rows.to(self._accumulate).repeat_interleave(shared, dim=1) for rows in read)
        scores = torch.einsum("qhd,khd->hqk", q.to(self._accumulate), k) * layer.scale
        queries, keys = scores.shape[1:]
        hidden = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(keys - queries + 1)
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
        return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
