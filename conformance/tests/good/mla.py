"""A good MLA backend in plain torch: absorbed, and as MHA over rows passed as arguments.

Mutants are small changes of its text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnplug import (
    AttentionKind,
    BackendContext,
    BackendError,
    BackendSpec,
    CacheLayout,
    Capabilities,
    DType,
    ExtendPath,
    ForwardExtras,
    Plan,
    Role,
)
from attnplug.contract.batch import BackendId

SPEC = BackendSpec(
    name="good_mla",
    summary="good",
    contract="1.0",
    factory="good_mla:Backend",
    capabilities=Capabilities(
        kinds=frozenset({AttentionKind.MLA}),
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({DType.FLOAT32, DType.BFLOAT16}),
        kv_dtypes=frozenset({DType.FLOAT32, DType.BFLOAT16, DType.FLOAT8_E4M3, "fp8_ds_mla"}),
        roles=frozenset({Role.PREFILL, Role.DECODE}),
        max_speculative_tokens=8,
        extras=frozenset({"lse", "out", "q_rope"}),
        mla_extend=frozenset(ExtendPath),
        ragged_graphs=True,
        layouts=frozenset(CacheLayout),
    ),
)


@dataclass(frozen=True, eq=False)
class Work:
    slots: list
    new: list


class Backend:
    def __init__(self, context: BackendContext) -> None:
        self.context, self.claims = context, context.declared.claims
        self.backend_id = BackendId(context.name)
        self.pool = context.pools.mla

    def init_forward_metadata(self, batch):
        geometry = batch.geometry
        if geometry.tree is not None:
            raise BackendError("trees are not claimed")
        if geometry.calls:  # it runs as MHA, and core writes the rows
            return Plan.of(self.backend_id, geometry)
        slots = [geometry.cache_slots([r])[0] if geometry.kv_lens[r] else None for r in range(geometry.requests)]
        work = Work(slots, list(geometry.query_lens))
        return Plan.of(self.backend_id, geometry, work, geometry.new_slots())

    def init_mha_chunk_metadata(self, forward_batch, disable_flashinfer_ragged=False):
        calls = {call.index: (call.query_lens, call.kv_lens) for call in forward_batch.geometry.calls}
        return Plan.of(self.backend_id, forward_batch.geometry, calls)

    def forward_extend(self, q, k, v, layer, batch, *, save_kv_cache=True, extras=None):
        plan = batch.plan_for(self.backend_id, q.shape[0], decode=False)
        return self.run(plan, q, k, layer, save_kv_cache, extras or ForwardExtras())

    def forward_decode(self, q, k, v, layer, batch, *, save_kv_cache=True, extras=None):
        plan = batch.plan_for(self.backend_id, q.shape[0], decode=True)
        return self.run(plan, q, k, layer, save_kv_cache, extras or ForwardExtras())

    def run(self, plan, q, k, layer, save_kv_cache, extras):
        if extras.given() - self.claims.extras:
            raise BackendError("an extra is not claimed")
        if save_kv_cache:
            self.pool.write(layer.layer_id, plan.new_slots, k[: plan.query_rows])
        if extras.q_rope is not None:
            q = torch.cat([q, extras.q_rope], -1)
        rank = layer.mla.kv_lora_rank
        out = q.new_zeros(*q.shape[:2], rank) if extras.out is None else extras.out.zero_()
        if extras.lse is not None:
            extras.lse.fill_(float("-inf"))
        start = 0
        for slots, new in zip(plan.metadata.slots, plan.metadata.new):
            rows = slice(start, start + new)
            start += new
            if not new:
                continue
            cached = self.pool.read_rows(layer.layer_id, slots).float()
            scores = torch.einsum("qhd,kd->hqk", q[rows].float(), cached) * layer.scale
            future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(slots) - new + 1)
            scores = scores.masked_fill(future, float("-inf"))
            values = cached[:, :rank]
            out[rows] = torch.einsum("hqk,kd->qhd", scores.softmax(-1), values).to(q.dtype)
            if extras.lse is not None:
                extras.lse[rows] = scores.logsumexp(-1).T
        return out

    def forward_ragged(self, q, k, v, layer, call, plan=None, lse=None):
        queries, keys = plan.part_of(self.backend_id).metadata[call.index]
        if call.padded_rows is not None:  # its lengths are on the device
            queries = keys = call.query_indptr.diff().tolist()
        out, query, key = q.new_zeros(*q.shape[:2], v.shape[-1]), 0, 0
        for new, total in zip(queries, keys):
            mine, theirs = slice(query, query + new), slice(key, key + total)
            query, key = query + new, key + total
            scores = torch.einsum("qhd,khd->hqk", q[mine].float(), k[theirs].float()) * layer.scale
            if call.causal:
                future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(total - new + 1)
                scores = scores.masked_fill(future, float("-inf"))
            out[mine] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[theirs].float()).to(q.dtype)
            if lse is not None:
                lse[mine] = scores.logsumexp(-1).T
        return out
