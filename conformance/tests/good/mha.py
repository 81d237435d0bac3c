"""A good MHA backend in plain torch, over the bare protocol. Mutants are small changes of its text."""

from __future__ import annotations

import torch

from attnplug import (
    AttentionKind,
    BackendContext,
    BackendError,
    BackendSpec,
    CacheLayout,
    Capabilities,
    DType,
    Feature,
    ForwardBatch,
    ForwardExtras,
    Geometry,
    GraphLevel,
    Plan,
    PlanError,
    Role,
)
from attnplug.contract.batch import BackendId

SPEC = BackendSpec(
    name="good_mha",
    summary="good",
    contract="1.0",
    factory="good_mha:Backend",
    capabilities=Capabilities(
        kinds=frozenset({AttentionKind.MHA}),
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16}),
        kv_dtypes=frozenset(DType),
        roles=frozenset({Role.PREFILL, Role.DECODE, Role.DRAFT}),
        features=frozenset({Feature.SLIDING_WINDOW, Feature.LOGIT_CAP, Feature.SINKS}),
        max_speculative_tokens=64,
        cuda_graph=GraphLevel.ALWAYS,
        needs_cpu_seq_lens=False,
        extras=frozenset({"lse", "out", "sinks"}),
        layouts=frozenset(CacheLayout),
        trees=True,
    ),
)


class Work:
    """Lengths and pages of a batch, in memory of the plan's own."""

    def __init__(self, geometry: Geometry) -> None:
        new = geometry.new_lens
        if new is None:
            new = torch.full_like(geometry.seq_lens, geometry.max_new)
        self.lens, self.table, self.new = geometry.seq_lens.clone(), geometry.page_table.clone(), new.clone()
        self.tree = geometry.tree  # read when the batch runs: the draft may write it after planning
        self.slots = geometry.new_slots().clone()
        self.page_size = geometry.page_size

    def refill(self, geometry: Geometry) -> None:
        self.lens.copy_(geometry.seq_lens)
        self.table.copy_(geometry.page_table)
        if geometry.new_lens is not None:
            self.new.copy_(geometry.new_lens)
        self.slots.copy_(geometry.new_slots())

    def cache_slots(self, request: int, length: int) -> torch.Tensor:
        position = torch.arange(length)
        pages = self.table[request, position // self.page_size].long()
        return pages * self.page_size + position % self.page_size


class Backend:
    def __init__(self, context: BackendContext) -> None:
        self.context, self.claims = context, context.declared.claims
        self.backend_id = BackendId(context.name)
        self.pool = context.pools.mha
        self.captured = {}
        self.reserved = False

    # Planning

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan:
        self.check(batch.geometry)
        return self.plan(batch.geometry)

    def check(self, geometry: Geometry) -> None:
        if not 0 <= geometry.lane < self.context.limits.lanes:
            raise PlanError(f"lane {geometry.lane} is not one of {self.context.limits.lanes}")
        if geometry.tree is not None and not self.claims.trees:
            raise PlanError("trees are not claimed")

    def plan(self, geometry: Geometry) -> Plan:
        work = Work(geometry)
        return Plan(self.backend_id, geometry.mode, geometry.rows, geometry.kv_rows, work, work.slots)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.reserved = True

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> Plan:
        key = self.key(forward_batch.geometry)
        if in_capture:
            self.captured[key] = self.plan(forward_batch.geometry)
        if key not in self.captured:
            raise PlanError("this shape was never captured")
        return self.captured[key]

    def key(self, geometry: Geometry):
        return geometry.lane, geometry.mode, geometry.requests, geometry.rows, geometry.tree is None

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        geometry = forward_batch.geometry
        self.captured[self.key(geometry)].metadata.refill(geometry)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 0

    # Running

    def forward_extend(self, q, k, v, layer, batch, *, save_kv_cache=True, extras=None):
        plan = batch.plan_for(self.backend_id, q.shape[0], decode=False)
        return self.run(plan, q, k, v, layer, save_kv_cache, extras or ForwardExtras())

    def forward_decode(self, q, k, v, layer, batch, *, save_kv_cache=True, extras=None):
        plan = batch.plan_for(self.backend_id, q.shape[0], decode=True)
        return self.run(plan, q, k, v, layer, save_kv_cache, extras or ForwardExtras())

    def run(self, plan, q, k, v, layer, save_kv_cache, extras):
        if extras.given() - self.claims.extras:
            raise BackendError("an extra is not claimed")
        if layer.sinks != (extras.sinks is not None):
            raise BackendError("sinks are for layers that have them")
        if save_kv_cache:
            self.write(layer, plan, k, v)
        out = q.new_zeros(q.shape[0], q.shape[1], layer.v_head_dim) if extras.out is None else extras.out.zero_()
        if extras.lse is not None:
            extras.lse.fill_(float("-inf"))
        work, start = plan.metadata, 0
        for request, (length, new) in enumerate(zip(work.lens.tolist(), work.new.tolist())):
            rows = slice(start, start + new)
            start += new
            if not length or not new:
                continue
            tree = None if work.tree is None else work.tree[request]
            slots = work.cache_slots(request, length)
            result, sums = self.attend(q[rows], slots, layer, tree, extras.sinks)
            out[rows] = result.to(q.dtype)
            if extras.lse is not None:
                extras.lse[rows] = sums
        return out

    def write(self, layer, plan, k, v):
        rows = plan.query_rows
        self.pool.write(layer.layer_id, plan.new_slots, k[:rows], v[:rows])

    def attend(self, q, slots, layer, tree, sinks):
        keys, values = self.pool.read_keys(layer.layer_id, slots), self.pool.read_values(layer.layer_id, slots)
        group = q.shape[1] // keys.shape[1]
        keys, values = keys.float().repeat_interleave(group, 1), values.float().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * layer.scale
        if layer.logit_cap is not None:
            scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
        scores = scores.masked_fill(~self.seen(len(q), len(slots), layer, tree), float("-inf"))
        sums = scores.logsumexp(-1)
        total = sums if sinks is None else torch.logaddexp(sums, sinks[:, None].expand_as(sums))
        weights = torch.exp(scores - total.unsqueeze(-1))
        return torch.einsum("hqk,khd->qhd", weights, values), sums.T

    def seen(self, queries, keys, layer, tree):
        before = keys - queries
        key, query = torch.arange(keys), before + torch.arange(queries)[:, None]
        if tree is not None:
            return (key < before) | ((tree[:, None] >> (key - before).clamp(min=0)) & 1).bool()
        seen = key <= query
        if layer.sliding_window is not None:
            seen = seen & (key > query - layer.sliding_window)
        return seen
