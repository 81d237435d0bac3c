"""MLA in plain torch: absorbed over the cache, and as MHA over rows passed as arguments."""

import torch
from torch import Tensor

from attnplug import (
    BackendContext,
    ForwardExtras,
    Geometry,
    LayerSpec,
    MLAShape,
    NewRows,
    Plan,
    PlannedAttention,
    RaggedCall,
)


class AcmeMLA(PlannedAttention):
    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.shape = MLAShape.of(context)  # heads, dims and the pool

    def plan(self, geometry: Geometry) -> Plan:
        if geometry.calls:  # this batch runs as MHA, and core writes its rows
            return Plan.of(self.backend_id, geometry, None)
        lens = enumerate(geometry.query_lens)
        requests = [(new, geometry.cache_slots([request])[0]) for request, new in lens if new]
        return Plan.of(self.backend_id, geometry, requests, geometry.new_slots())

    def attend(  # absorbed: q is [tokens, heads, kv_lora_rank + rope]
        self, q: Tensor, layer: LayerSpec, plan: Plan, new: NewRows | None, extras: ForwardExtras
    ) -> Tensor:
        out = q.new_empty(*q.shape[:2], self.shape.dims.kv_lora_rank)
        start = 0
        for count, slots in plan.metadata:
            part = slice(start, start := start + count)
            rows = self.shape.pool.read_rows(layer.layer_id, slots)[:, None]  # [keys, 1, kv_lora_rank + rope]
            values = rows[..., : self.shape.dims.kv_lora_rank]
            out[part], sums = attention(q[part], rows, values, layer.scale, causal=True)
            if extras.lse is not None:
                extras.lse[part] = sums
        return out

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
        call.check(q, k, v)
        out = q.new_empty(*q.shape[:2], v.shape[2])
        query = key = 0
        for queries, keys in zip(call.query_lens, call.kv_lens, strict=True):
            new, read = slice(query, query := query + queries), slice(key, key := key + keys)
            out[new], sums = attention(q[new], k[read], v[read], layer.scale, causal=call.causal)
            if lse is not None:
                lse[new] = sums
        return out


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output and the natural log-sum-exp ``[queries, heads]`` of one sequence.

    q ``[queries, heads, dim]``, k ``[keys, heads or 1, dim]``, v ``[keys, heads or 1, v_dim]``.
    """
    keys, values = (rows.float().expand(-1, q.shape[1], -1) for rows in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if causal:  # the last query attends to all keys
        future = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(len(k) - len(q) + 1)
        scores = scores.masked_fill(future, float("-inf"))
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return out.to(q.dtype), scores.logsumexp(-1).T
