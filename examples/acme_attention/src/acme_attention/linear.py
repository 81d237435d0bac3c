"""Lightning attention in plain torch, one token at a time."""

import torch
from torch import Tensor

from attnplug import BackendContext, ForwardBatch, Geometry, LayerSpec, Plan
from attnplug.linear import LinearInputs, PlannedBackend


class AcmeLinear(PlannedBackend):
    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        assert context.pools.linear is not None  # a backend for the role linear is built with its pool
        self.pool = context.pools.linear

    def plan(self, geometry: Geometry) -> Plan:  # new tokens and state slot of each request
        slots = [] if geometry.state_slots is None else geometry.state_slots.tolist()
        return Plan.of(self.backend_id, geometry, list(zip(geometry.query_lens, slots, strict=True)))

    def forward_linear(self, inputs: LinearInputs, layer: LayerSpec, batch: ForwardBatch) -> Tensor:
        plan = batch.plan_for(self.backend_id, inputs.v.shape[0])
        states, out = self.pool.recurrent(layer.layer_id), torch.zeros_like(inputs.v)
        assert states is not None
        q, k, v = inputs.q.float(), inputs.k.float(), inputs.v.float()
        decay = inputs.log_decay.exp().reshape(-1, 1, 1)  # one per head
        row = 0
        for new, slot in plan.metadata:  # a padded request has slot -1 and no rows
            for token in range(row, row + new):
                states[slot] = states[slot] * decay + torch.einsum("hk,hv->hkv", k[token], v[token])
                out[token] = (layer.scale * torch.einsum("hk,hkv->hv", q[token], states[slot])).to(out.dtype)
            row += new
        return out

    def forward_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, layer: LayerSpec, batch: ForwardBatch, silu: bool
    ) -> Tensor:
        raise NotImplementedError("Lightning attention has no convolution")

    def commit_states(self, forward_batch: ForwardBatch, accepted: Tensor) -> None:
        raise NotImplementedError("it claims no speculative tokens")
