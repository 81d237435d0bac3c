"""Whole layers of the delta rule on a linear backend: requests with states in a poisoned pool, and a float64 reference.

As in ``linear_scene``, every slot without a request and every row of a padded request is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import linear_float64
from attnplug import AttentionKind, BackendContext, ForwardBatch, ForwardMode, LayerSpec, ModelSpec, Role
from attnplug.host import KVPools, Limits, WorkspaceOwner
from attnplug.kernels import torch_dtype
from attnplug.linear import DeltaInputs, DeltaWeights, LinearDims, LinearInputs, LinearStatePool
from attnplug_testing.batches import capabilities, geometry, padded, with_plan
from linear_float64 import Array, relative_error
from linear_scene import PADDED
from linear_settings import Setting

EPS = 1e-5
_DIMS = {AttentionKind.GDN: LinearDims(4, 2, 8, 12, 80, 4), AttentionKind.KDA: LinearDims(1, 1, 12, 5, 29, 3)}


def delta_layers(dims: dict[AttentionKind, LinearDims]) -> tuple[LayerSpec, ...]:
    return tuple(
        LayerSpec(number, kind, own.heads, own.key_heads, own.key_dim, own.value_dim, 0.7, linear=own)
        for number, (kind, own) in enumerate(dims.items())
    )


@dataclass
class DeltaStep:
    """One batch with the inputs of every layer."""

    batch: ForwardBatch
    members: Sequence[int]
    inputs: list[DeltaInputs]


class DeltaScene:
    def __init__(
        self, setting: Setting, requests: int = 5, dims: dict[AttentionKind, LinearDims] = _DIMS, lanes: int = 2
    ) -> None:
        self.setting, self.layers = setting, delta_layers(dims)
        self.device, self.dtype = torch.device(setting.device), torch_dtype(setting.dtype)
        self.random = torch.Generator().manual_seed(3)
        self.pool = LinearStatePool(self.layers, num_slots=requests + 3, dtype=setting.dtype, device=setting.device)
        self.slots = torch.randperm(requests + 3, generator=self.random)[:requests].tolist()
        self.workspace = WorkspaceOwner()
        self.weights = [self._weights(layer) for layer in self.layers]
        self.wanted: dict[tuple[int, int], tuple[Array, Array]] = {}
        """By layer and request: the convolution's state and the recurrent one."""
        for layer in self.layers:
            both = self.states(layer.layer_id)
            for states in both:
                states.fill_(torch.nan)
            for request, slot in enumerate(self.slots):
                for states in both:
                    states[slot] = self.normal(*states.shape[1:]).to(states.dtype)
                self.wanted[layer.layer_id, request] = tuple(states[slot].double().cpu().numpy() for states in both)
        self.backend = setting.build(
            BackendContext(
                name="under_test",
                roles=frozenset({Role.LINEAR}),
                model=ModelSpec("test", "test", self.layers, 4096),
                device=self.device,
                dtype=self.dtype,
                kv_dtype=setting.dtype,
                page_size=16,
                limits=Limits(8, 4096, 4096, lanes=lanes),
                pools=KVPools(linear=self.pool),
                workspace=self.workspace,
                declared=capabilities(setting.name),
                options=None,
            )
        )

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random).to(self.dtype).to(self.device)

    def states(self, layer_id: int) -> tuple[Tensor, Tensor]:
        conv, recurrent = self.pool.conv(layer_id), self.pool.recurrent(layer_id)
        assert conv is not None and recurrent is not None
        return conv, recurrent

    def _weights(self, layer: LayerSpec) -> DeltaWeights:
        dims = layer.linear
        assert dims is not None
        by_channel = layer.kind is AttentionKind.KDA
        heads = (dims.heads, 1) if by_channel else (dims.heads,)
        bias = self.normal(dims.heads, dims.key_dim) if by_channel else self.normal(dims.heads)
        return DeltaWeights(
            self.normal(dims.conv_channels, dims.conv_width),
            -self.normal(*heads).float().exp(),
            bias.float() * 4 - 4,  # from decays that forget at once to decays that float32 hardly sees
            self.normal(dims.value_dim).float(),
            EPS,
            silu=not by_channel,
        )

    def batch(self, mode: ForwardMode, members: Sequence[int], new: int = 1, **given: Any) -> ForwardBatch:
        slots = [PADDED if member == PADDED else self.slots[member] for member in members]
        lens = [new] * len(members)
        made = geometry(
            mode,
            torch.zeros(len(members), 256, dtype=torch.int32),
            lens,
            lens,
            16,
            exact=not given.get("captured", False),
            device=self.device,
            state_slots=torch.tensor(slots, dtype=torch.int64, device=self.device),
            lane=given.get("lane", 0),
        )
        return padded(ForwardBatch(made), given.get("padding", 0))

    def step(
        self, members: Sequence[int], mode: ForwardMode = ForwardMode.DECODE, new: int = 1, **given: Any
    ) -> DeltaStep:
        """A planned batch with inputs for every layer, each a slice of one product as in a model."""
        batch = self.batch(mode, members, new, **given)
        dead = torch.ones(batch.num_tokens, dtype=torch.bool)
        for number, member in enumerate(members):
            dead[number * new : (number + 1) * new] = member == PADDED
        inputs = []
        for layer, weights in zip(self.layers, self.weights, strict=True):
            dims = layer.linear
            assert dims is not None
            keys = dims.key_dim if layer.kind is AttentionKind.KDA else 1
            widths = (dims.conv_channels, dims.heads * dims.value_dim, dims.heads, dims.heads * keys)
            product = self.normal(batch.num_tokens, sum(widths))
            product[dead.to(self.device)] = torch.nan
            rows, gate, beta, decay = product.split(widths, 1)
            decay = decay if layer.kind is AttentionKind.GDN else decay.unflatten(1, (dims.heads, keys))
            inputs.append(DeltaInputs(rows, decay, beta, gate.unflatten(1, (dims.heads, -1)), weights))
        with_plan(batch, self.backend.init_forward_metadata(batch))
        return DeltaStep(batch, members, inputs)

    def run(self, step: DeltaStep) -> list[Tensor]:
        outs = [
            self.backend.forward_delta(inputs, layer, step.batch)
            for layer, inputs in zip(self.layers, step.inputs, strict=True)
        ]
        assert all(out is not None for out in outs)
        return outs

    def check(self, step: DeltaStep, outs: Sequence[Tensor]) -> None:
        """Outputs are right; from here on the states should be after these rows."""
        for layer, inputs, out in zip(self.layers, step.inputs, outs, strict=True):
            assert out.dtype is self.dtype and not out[len(step.members) :].any()
            for row, member in enumerate(step.members):
                if member == PADDED:
                    assert not out[row].any()
                    continue
                before = self.wanted[layer.layer_id, member]
                wanted, self.wanted[layer.layer_id, member] = self._float64(layer, inputs, row, *before)
                error = relative_error(out[row], wanted)
                assert error <= self.setting.tolerance, f"{layer.kind}, request {member}: {error:.1e}"

    def check_states(self) -> None:
        for layer in self.layers:
            both = self.states(layer.layer_id)
            for request, slot in enumerate(self.slots):
                for states, wanted, most in zip(
                    both, self.wanted[layer.layer_id, request], (0.0, self.setting.state_tolerance), strict=True
                ):
                    error = relative_error(states[slot], wanted)
                    assert error <= most, f"{layer.kind}, request {request}: {error:.1e}"
            others = [slot for slot in range(self.pool.num_slots) if slot not in self.slots]
            assert all(states[others].isnan().all() for states in both)

    def bits(self) -> list[Tensor]:
        return [states.clone().view(torch.uint8) for layer in self.layers for states in self.states(layer.layer_id)]

    def _float64(
        self, layer: LayerSpec, inputs: DeltaInputs, row: int, conv: Array, recurrent: Array
    ) -> tuple[Array, tuple[Array, Array]]:
        dims, weights = layer.linear, inputs.weights
        assert dims is not None
        one = slice(row, row + 1)
        mixed, conv = linear_float64.convolution(inputs.rows[one], weights.conv, None, True, conv)
        keys = dims.key_heads * dims.key_dim
        mixed = self._rounded(mixed)
        q, k, v = np.split(mixed, (keys, 2 * keys), axis=1)
        decay = weights.rate.double().cpu() * torch.log1p(
            (inputs.decay[one].double() + weights.bias.double()).cpu().exp()
        )
        parts = LinearInputs(
            torch.from_numpy(q).unflatten(1, (-1, dims.key_dim)),
            torch.from_numpy(k).unflatten(1, (-1, dims.key_dim)),
            torch.from_numpy(v).unflatten(1, (-1, dims.value_dim)),
            decay,
            torch.from_numpy(self._rounded(inputs.beta[one].double().sigmoid().cpu().numpy())),
            normalize=True,
        )
        out, recurrent = linear_float64.recurrence(parts, recurrent, layer.scale)
        out = self._rounded(out)
        normed = out / np.sqrt((out * out).mean(-1, keepdims=True) + weights.eps) * weights.norm.double().cpu().numpy()
        gate = inputs.gate[one].double().cpu().numpy()
        opened = (gate if weights.silu else 1.0) / (1 + np.exp(-gate))
        return (normed * opened).reshape(1, -1), (conv, recurrent)

    def _rounded(self, values: Array) -> Array:
        """Float64 ``values`` rounded to the model's type, at the places that ``DeltaInputs`` documents."""
        return torch.from_numpy(values).to(self.dtype).double().numpy()
