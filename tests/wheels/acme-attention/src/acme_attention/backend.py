"""The backend itself, from the public names of attnplug alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import (
    BackendContext,
    BackendError,
    BackendId,
    Claims,
    ForwardBatch,
    ForwardExtras,
    Geometry,
    LayerSpec,
    Plan,
)


@dataclass(frozen=True)
class AcmePlan:
    """Where new rows go ``[tokens]``; for each request its number of new tokens and the slots of all its rows."""

    new_slots: Tensor
    requests: tuple[tuple[int, Tensor], ...]


class AcmeBackend:
    """MHA and GQA over a paged cache."""

    claims = Claims()

    def __init__(self, context: BackendContext) -> None:
        self.backend_id = BackendId(context.name)
        if context.pools.mha is None:
            raise BackendError(f"backend {context.name} needs an MHA pool")
        self._pool = context.pools.mha
        self._page_size = context.page_size
        self._accumulate = getattr(torch, context.options.accumulate)

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan:
        geometry = Geometry.of(batch, self._page_size)
        requests = tuple(
            (queries, geometry.cache_slots([number])[0]) for number, queries in enumerate(geometry.query_lens)
        )
        metadata = AcmePlan(geometry.new_slots(), requests)
        return Plan(self.backend_id, batch.forward_mode, geometry.query_rows, geometry.kv_rows, metadata)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        *,
        save_kv_cache: bool = True,
        extras: ForwardExtras | None = None,
    ) -> Tensor:
        plan = batch.plan_for(self.backend_id, q.shape[0])
        if extras is not None and extras.asked():
            raise BackendError(f"backend {self.backend_id.name} knows no extras, not {', '.join(extras.asked())}")
        if save_kv_cache:
            if k is None or v is None:
                raise BackendError(f"layer {layer.layer_id} is to be written, but k or v is None")
            rows = plan.query_rows
            self._pool.write(layer.layer_id, plan.metadata.new_slots, k[:rows], v[:rows])
        out = q.new_zeros(q.shape[0], layer.num_heads, layer.v_head_dim)  # rows behind the plan stay zero
        first = 0
        for queries, slots in plan.metadata.requests:
            out[first : first + queries] = self._attend(q[first : first + queries], layer, slots)
            first += queries
        return out

    forward_decode = forward_extend

    def _attend(self, q: Tensor, layer: LayerSpec, slots: Tensor) -> Tensor:
        """One request: q ``[queries, heads, dim]`` over the cache rows at ``slots`` ``[keys]``, causal."""
        shared = layer.num_heads // layer.num_kv_heads
        read = (self._pool.read_keys(layer.layer_id, slots), self._pool.read_values(layer.layer_id, slots))
        k, v = (rows.to(self._accumulate).repeat_interleave(shared, dim=1) for rows in read)
        scores = torch.einsum("qhd,khd->hqk", q.to(self._accumulate), k) * layer.scale
        queries, keys = scores.shape[1:]
        hidden = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(keys - queries + 1)
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
        return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
