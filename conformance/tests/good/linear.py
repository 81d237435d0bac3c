"""A good backend for linear attention in plain torch, a token at a time. Mutants are small changes of its text."""

from __future__ import annotations

import torch

from attnplug import (
    AttentionKind,
    BackendContext,
    BackendSpec,
    Capabilities,
    DType,
    ForwardMode,
    GraphLevel,
    Plan,
    PlanError,
    Role,
)
from attnplug.contract.batch import BackendId

SPEC = BackendSpec(
    name="good_linear",
    summary="good",
    contract="1.0",
    factory="good_linear:Backend",
    capabilities=Capabilities(
        kinds=frozenset(kind for kind in AttentionKind if kind.is_linear),
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({DType.FLOAT32, DType.BFLOAT16}),
        roles=frozenset({Role.LINEAR}),
        cuda_graph=GraphLevel.ALWAYS,
        max_speculative_tokens=8,
        invariant=frozenset({"run", "batch", "chunks", "verify"}),
    ),
)


class Backend:
    def __init__(self, context: BackendContext) -> None:
        self.claims, self.pool = context.declared.claims, context.pools.linear
        self.backend_id = BackendId(context.name)
        self.captured = {}

    def init_forward_metadata(self, batch):
        geometry = batch.geometry
        slots = [] if geometry.state_slots is None else geometry.state_slots.tolist()
        work = {"new": list(geometry.query_lens), "slots": slots, "kept": []}
        return Plan.of(self.backend_id, geometry, work)

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        pass

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        geometry = forward_batch.geometry
        key = geometry.lane, geometry.mode, geometry.requests, geometry.rows
        if in_capture:
            held = {"new": [geometry.max_new] * geometry.requests, "slots": [-1] * geometry.requests}
            self.captured[key] = Plan.of(self.backend_id, geometry, held)
        if key not in self.captured:
            raise PlanError("this shape was never captured")
        return self.captured[key]

    def init_forward_metadata_in_graph(self, forward_batch):
        geometry, work = forward_batch.geometry, self.init_forward_metadata_out_graph(forward_batch).metadata
        work["slots"][:] = geometry.state_slots.tolist()
        if geometry.new_lens is not None:
            work["new"][:] = geometry.new_lens.tolist()

    def get_cuda_graph_seq_len_fill_value(self):
        return 0

    def work(self, batch, rows):
        plan = batch.plan_for(self.backend_id, rows)
        return plan.metadata, plan.mode is ForwardMode.TARGET_VERIFY

    def requests(self, work):
        start = 0
        for new, slot in zip(work["new"], work["slots"]):
            if slot >= 0:
                yield slot, slice(start, start + new)
            start += new

    def forward_conv(self, x, weight, bias, layer, batch, silu):
        work, verify = self.work(batch, x.shape[0])
        states, out = self.pool.conv(layer.layer_id), torch.zeros_like(x)
        for slot, rows in self.requests(work):
            out[rows], after = self.convolve(x[rows], weight, bias, states[slot], silu)
            if not verify:
                states[slot] = after
        if verify:
            work["kept"].append((states, lambda slot, rows: self.convolve(x[rows], weight, bias, states[slot], silu)))
        return out

    def convolve(self, x, weight, bias, state, silu):
        out = torch.zeros_like(x)
        for token, row in enumerate(x):
            state = torch.cat([state[:, 1:], row[:, None].to(state.dtype)], 1)
            value = (state.float() * weight.float()).sum(1)
            if bias is not None:
                value = value + bias.float()
            if silu:
                value = torch.nn.functional.silu(value)
            out[token] = value.to(x.dtype)
        return out, state

    def forward_linear(self, inputs, layer, batch):
        work, verify = self.work(batch, inputs.v.shape[0])
        states, out = self.pool.recurrent(layer.layer_id), torch.zeros_like(inputs.v)
        for slot, rows in self.requests(work):
            out[rows], after = self.advance(inputs, rows, states[slot], layer)
            if not verify:
                states[slot] = after
        if verify:
            work["kept"].append((states, lambda slot, rows: self.advance(inputs, rows, states[slot], layer)))
        return out

    def advance(self, inputs, rows, state, layer):
        q, k, v = inputs.q[rows].float(), inputs.k[rows].float(), inputs.v[rows].float()
        heads = v.shape[1]
        of_key_head = torch.arange(heads) * q.shape[1] // heads
        q, k, out = q[:, of_key_head], k[:, of_key_head], torch.zeros_like(inputs.v[rows])
        if inputs.normalize:
            q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        decays = inputs.log_decay.exp()
        for token in range(len(v)):
            decay = decays if decays.dim() == 1 else decays[rows][token]
            state = state * decay.reshape(heads, -1, 1)
            write = v[token]
            if inputs.beta is not None:
                write = (write - torch.einsum("hk,hkv->hv", k[token], state)) * inputs.beta[rows][token, :, None]
            state = state + torch.einsum("hk,hv->hkv", k[token], write)
            out[token] = (layer.scale * torch.einsum("hk,hkv->hv", q[token], state)).to(out.dtype)
        return out, state

    def commit_states(self, forward_batch, accepted):
        work, _ = self.work(forward_batch, forward_batch.num_tokens)
        counts = accepted.tolist()
        live = [number for number, slot in enumerate(work["slots"]) if slot >= 0]
        for states, run in work["kept"]:
            for number, (slot, rows) in zip(live, self.requests(work)):
                states[slot] = run(slot, slice(rows.start, rows.start + counts[number]))[1]
