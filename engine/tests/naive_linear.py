"""Linear attention as its equations read: one request and one token at a time, in loops."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attnplug import Claims, ForwardBatch, LayerSpec, Plan
from attnplug.contract.batch import BackendId
from attnplug.linear import DeltaInputs, LinearInputs, LinearStatePool


class NaiveLinearBackend:
    """A linear backend for tests: slow, and plainly the recurrence that ``LinearInputs`` describes."""

    def __init__(self, pool: LinearStatePool) -> None:
        self.backend_id = BackendId("naive_linear")
        self.claims = Claims()
        self._pool = pool

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan:
        assert batch.geometry.state_slots is not None
        return Plan.of(self.backend_id, batch.geometry)

    def forward_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, layer: LayerSpec, batch: ForwardBatch, silu: bool
    ) -> Tensor:
        states = self._pool.conv(layer.layer_id)
        assert states is not None and states.shape[1:] == weight.shape == (x.shape[1], layer.linear.conv_width)
        out = torch.zeros_like(x)
        for slot, row in self._rows(batch):
            state = torch.cat((states[slot][:, 1:], x[row].unsqueeze(1)), dim=1)
            states[slot] = state
            value = (state * weight).sum(dim=1)
            value = value if bias is None else value + bias
            out[row] = value * value.sigmoid() if silu else value
        return out

    def forward_linear(self, inputs: LinearInputs, layer: LayerSpec, batch: ForwardBatch) -> Tensor:
        states = self._pool.recurrent(layer.layer_id)
        heads, value_dim = inputs.v.shape[1:]
        assert states is not None and states.shape[1:] == (heads, inputs.q.shape[2], value_dim)
        assert inputs.log_decay.dtype is torch.float32 and bool((inputs.log_decay <= 0).all())
        each = heads // inputs.q.shape[1]
        out = torch.zeros_like(inputs.v)
        for slot, row in self._rows(batch):
            q, k = (x[row].float().repeat_interleave(each, dim=0)[:, :, None] for x in (inputs.q, inputs.k))
            if inputs.normalize:
                q, k = (x / (x.square().sum(dim=1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
            log_decay = inputs.log_decay if inputs.log_decay.dim() == 1 else inputs.log_decay[row]
            state = states[slot] * log_decay.exp().reshape(heads, -1, 1)
            v = inputs.v[row].float()
            added = v if inputs.beta is None else (v - (k * state).sum(dim=1)) * inputs.beta[row][:, None]
            state = state + k * added[:, None]
            states[slot] = state
            out[row] = layer.scale * (q * state).sum(dim=1)
        return out

    def _rows(self, batch: ForwardBatch) -> Iterator[tuple[int, int]]:
        """The state and the row of each new token."""
        row = 0
        for slot, count in zip(batch.geometry.state_slots.tolist(), batch.geometry.query_lens, strict=True):
            for _ in range(count):
                yield slot, row
                row += 1


class WholeDeltaBackend(NaiveLinearBackend):
    """One that also runs decodes of a whole layer of the delta rule, as ``DeltaInputs``' equations read."""

    def __init__(self, pool: LinearStatePool) -> None:
        super().__init__(pool)
        self.whole = 0

    def forward_delta(self, inputs: DeltaInputs, layer: LayerSpec, batch: ForwardBatch) -> Tensor | None:
        if not batch.forward_mode.is_decode:
            return None
        self.whole += 1
        dims, weights = layer.linear, inputs.weights
        keys = dims.key_heads * dims.key_dim
        mixed = self.forward_conv(inputs.rows, weights.conv, None, layer, batch, True)
        q, k, v = mixed.split((keys, keys, dims.heads * dims.value_dim), dim=1)
        log_decay = weights.rate * torch.log1p((inputs.decay.float() + weights.bias).exp())
        parts = LinearInputs(
            q.unflatten(1, (-1, dims.key_dim)),
            k.unflatten(1, (-1, dims.key_dim)),
            v.unflatten(1, (-1, dims.value_dim)),
            log_decay,
            1 / (1 + (-inputs.beta).exp()),
            normalize=True,
        )
        out = self.forward_linear(parts, layer, batch)
        out = out / (out.square().mean(-1, keepdim=True) + weights.eps).sqrt() * weights.norm
        opened = 1 / (1 + (-inputs.gate).exp())
        return (out * opened * (inputs.gate if weights.silu else 1)).flatten(1)
