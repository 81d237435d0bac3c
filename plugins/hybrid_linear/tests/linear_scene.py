"""A linear backend on a scene: a layer of every kind, NaN in every slot without a request, and a float64 reference.

Each request of the scene owns a slot. Its expected states are computed in float64 from the inputs of all its steps. A
batch may also hold padded requests, whose rows are all NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from random import Random
from typing import Any

import torch
from torch import Tensor

import linear_float64
from attnplug import AttentionKind, BackendContext, DType, ForwardBatch, ForwardMode, LayerSpec, ModelSpec, Role
from attnplug.host import KVPools, Limits, WorkspaceOwner
from attnplug.kernels import torch_dtype
from attnplug.linear import LinearDims, LinearInputs, LinearStatePool
from attnplug_testing.batches import capabilities, geometry, padded, with_plan
from linear_float64 import Array, relative_error
from linear_inputs import random_inputs, tokens_of

PADDED = -1
"""In place of a request's number: a padded request."""

_DIMS = {
    AttentionKind.GDN: LinearDims(4, 2, 8, 12, conv_channels=10, conv_width=4),
    AttentionKind.KDA: LinearDims(2, 2, 12, 8, conv_channels=6, conv_width=4),
    AttentionKind.LIGHTNING: LinearDims(3, 3, 8, 8),
    AttentionKind.MAMBA2: LinearDims(6, 2, 16, 5, conv_channels=7, conv_width=3),
    AttentionKind.SHORT_CONV: LinearDims(0, 0, 0, 0, conv_channels=5, conv_width=3),
}
LAYERS = tuple(
    LayerSpec(2 * number + 1, kind, dims.heads, dims.key_heads, dims.key_dim, dims.value_dim, 0.7, linear=dims)
    for number, (kind, dims) in enumerate(_DIMS.items())
)


@dataclass
class Step:
    """One batch: its requests and their numbers of new tokens, each layer's inputs, and the outputs."""

    batch: ForwardBatch
    members: Sequence[int]
    new: Sequence[int]
    inputs: dict[int, LinearInputs] = field(default_factory=dict)
    conv_rows: dict[int, Tensor] = field(default_factory=dict)
    out: dict[int, Tensor] = field(default_factory=dict)
    conv_out: dict[int, Tensor] = field(default_factory=dict)


class LinearScene:
    """Requests with states of their own in a poisoned pool."""

    def __init__(
        self,
        requests: int = 4,
        *,
        name: str,
        build: Callable[[BackendContext], Any],
        device: str = "cpu",
        dtype: DType = DType.FLOAT32,
        decay: float = 1.0,
        seed: int = 0,
        levels: frozenset[str] = frozenset(),
    ) -> None:
        self.device, self.dtype, self.decay = torch.device(device), torch_dtype(dtype), decay
        self.random = torch.Generator().manual_seed(seed)
        self.pool = LinearStatePool(LAYERS, num_slots=requests + 3, dtype=dtype, device=device)
        self.slots = torch.randperm(requests + 3, generator=self.random)[:requests].tolist()
        self.weights = {
            layer.layer_id: (
                self._normal(layer.linear.conv_channels, layer.linear.conv_width),
                self._normal(layer.linear.conv_channels) if layer.layer_id % 4 == 1 else None,
            )
            for layer in LAYERS
            if layer.linear is not None
        }
        self.wanted: dict[tuple[int, int], Array] = {}
        """By layer and request: the recurrent state."""
        self.wanted_conv: dict[tuple[int, int], Array] = {}
        for layer in LAYERS:
            self._first_states(layer.layer_id, self.pool.recurrent(layer.layer_id), self.wanted)
            self._first_states(layer.layer_id, self.pool.conv(layer.layer_id), self.wanted_conv)
        self.backend = build(
            BackendContext(
                name="under_test",
                roles=frozenset({Role.LINEAR}),
                model=ModelSpec("test", "test", LAYERS, 4096),
                device=self.device,
                dtype=self.dtype,
                kv_dtype=dtype,
                page_size=16,
                limits=Limits(16, 4096, 4096, lanes=2),
                pools=KVPools(linear=self.pool),
                workspace=WorkspaceOwner(),
                declared=capabilities(name),
                options=None,
                invariant=levels,
            )
        )

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random).to(self.dtype).to(self.device)

    def _first_states(self, layer_id: int, states: Tensor | None, wanted: dict[tuple[int, int], Array]) -> None:
        if states is None:
            return
        states.fill_(torch.nan)
        for request, slot in enumerate(self.slots):
            states[slot] = self._normal(*states.shape[1:]).to(states.dtype)
            wanted[layer_id, request] = states[slot].double().cpu().numpy()

    # ---- a step ----

    def batch(
        self,
        mode: ForwardMode,
        members: Sequence[int],
        new: Sequence[int],
        *,
        padding: int = 0,
        exact: bool = True,
        lane: int = 0,
        captured: bool = False,
    ) -> ForwardBatch:
        """``padding`` rows come after those of the requests. Without ``exact`` the host has bounds of lengths only."""
        slots = [PADDED if member == PADDED else self.slots[member] for member in members]
        table = torch.zeros(len(new), 256, dtype=torch.int32)
        made = geometry(
            mode,
            table,
            new,
            new,
            16,
            exact=exact and not captured,
            device=self.device,
            state_slots=torch.tensor(slots, dtype=torch.int64, device=self.device),
            lane=lane,
        )
        return padded(ForwardBatch(replace(made, captured=captured)), padding)

    def step(self, mode: ForwardMode, members: Sequence[int], new: Sequence[int], **batch: object) -> Step:
        """A batch with inputs for every layer; planned, not run."""
        made = Step(self.batch(mode, members, new, **batch), members, new)
        rows = made.batch.num_tokens
        padded = torch.ones(rows, dtype=torch.bool)
        for member, own in zip(members, self.rows(made), strict=True):
            padded[own] = member == PADDED
        for layer in LAYERS:
            dims = layer.linear
            assert dims is not None
            if dims.heads:
                inputs = random_inputs(
                    layer.kind, dims, rows, self.random, decay=self.decay, normalize=True, dtype=self.dtype
                )
                made.inputs[layer.layer_id] = _poisoned(inputs, padded, self.device)
            if dims.conv_width:
                x = self._normal(rows, dims.conv_channels)
                x[padded.to(self.device)] = torch.nan
                made.conv_rows[layer.layer_id] = x
        with_plan(made.batch, self.backend.init_forward_metadata(made.batch))
        return made

    def forward(self, step: Step, layers: Sequence[LayerSpec] = LAYERS) -> None:
        for layer in layers:
            if layer.layer_id in step.conv_rows:
                weight, bias = self.weights[layer.layer_id]
                x = step.conv_rows[layer.layer_id]
                step.conv_out[layer.layer_id] = self.backend.forward_conv(x, weight, bias, layer, step.batch, True)
            if layer.layer_id in step.inputs:
                inputs = step.inputs[layer.layer_id]
                step.out[layer.layer_id] = self.backend.forward_linear(inputs, layer, step.batch)

    def run(self, mode: ForwardMode, members: Sequence[int], new: Sequence[int], **batch: object) -> Step:
        step = self.step(mode, members, new, **batch)
        self.forward(step)
        return step

    # ---- what should be ----

    @staticmethod
    def rows(step: Step) -> list[slice]:
        """Row range of each member."""
        return [slice(start, stop) for start, stop in pairwise(accumulate(step.new, initial=0))]

    def check(self, step: Step, tolerance: float, accepted: Sequence[int] | None = None) -> None:
        """The outputs are right; from here on the states should be after the ``accepted`` rows, or all of them."""
        self.check_outputs(step, tolerance)
        self.accept(step, step.new if accepted is None else accepted)

    def check_outputs(self, step: Step, tolerance: float) -> None:
        """Compare with float64, and with zero for padded requests and behind the last one."""
        for results, run in ((step.out, self._recurrence), (step.conv_out, self._convolution)):
            for layer_id, out in results.items():
                assert out.dtype is self.dtype
                assert not out[sum(step.new) :].any()
                for member, own in zip(step.members, self.rows(step), strict=True):
                    if member == PADDED:
                        assert not out[own].any()
                    else:
                        error = relative_error(out[own], run(step, layer_id, member, own)[0])
                        assert error <= tolerance, f"layer {layer_id}, request {member}: {error:.1e}"

    def accept(self, step: Step, accepted: Sequence[int]) -> None:
        """Advance the expected states by the first ``accepted`` rows of each request."""
        for member, own, kept in zip(step.members, self.rows(step), accepted, strict=True):
            first = slice(own.start, own.start + kept)
            if member == PADDED:
                continue
            for layer_id in step.inputs:
                self.wanted[layer_id, member] = self._recurrence(step, layer_id, member, first)[1]
            for layer_id in step.conv_rows:
                self.wanted_conv[layer_id, member] = self._convolution(step, layer_id, member, first)[1]

    def _recurrence(self, step: Step, layer_id: int, member: int, rows: slice) -> tuple[Array, Array]:
        (layer,) = (layer for layer in LAYERS if layer.layer_id == layer_id)
        inputs = tokens_of(step.inputs[layer_id], rows)
        return linear_float64.recurrence(inputs, self.wanted[layer_id, member], layer.scale)

    def _convolution(self, step: Step, layer_id: int, member: int, rows: slice) -> tuple[Array, Array]:
        x = step.conv_rows[layer_id][rows]
        return linear_float64.convolution(x, *self.weights[layer_id], True, self.wanted_conv[layer_id, member])

    def check_states(self, tolerance: float = 1e-5) -> None:
        """Check that every request's states match float64 and that all slots without a request are still NaN."""
        for layer in LAYERS:
            for states, wanted, most in (
                (self.pool.recurrent(layer.layer_id), self.wanted, tolerance),
                (self.pool.conv(layer.layer_id), self.wanted_conv, 0.0),
            ):
                if states is None:
                    continue
                for request, slot in enumerate(self.slots):
                    error = relative_error(states[slot], wanted[layer.layer_id, request])
                    assert error <= most, f"layer {layer.layer_id}, request {request}: {error:.1e}"
                others = [slot for slot in range(self.pool.num_slots) if slot not in self.slots]
                assert states[others].isnan().all()

    def states(self) -> list[Tensor]:
        """A copy of every state in the pool."""
        both = [read(layer.layer_id) for layer in LAYERS for read in (self.pool.recurrent, self.pool.conv)]
        return [states.clone() for states in both if states is not None]

    def bits(self) -> list[Tensor]:
        """Copies of all states as raw bytes, so that NaNs compare equal, too."""
        return [states.view(torch.uint8) for states in self.states()]


def random_members(drawn: Random, requests: int, size: int) -> list[int]:
    """Some of the requests in any order, padded anywhere."""
    live = drawn.sample(range(requests), drawn.randint(0, min(size, requests)))
    members = live + [PADDED] * (size - len(live))
    drawn.shuffle(members)
    return members


def same_bits(before: list[Tensor], after: list[Tensor]) -> bool:
    return all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def same_values(before: list[Tensor], after: list[Tensor]) -> bool:
    return all(torch.allclose(old, new, 0, 0, equal_nan=True) for old, new in zip(before, after, strict=True))


def _poisoned(inputs: LinearInputs, rows: Tensor, device: torch.device) -> LinearInputs:
    """The inputs on a device, NaN in these rows."""
    for tensor in (inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.beta):
        if tensor is not None and tensor.shape[0] == rows.shape[0] and tensor.dim() > 1:
            tensor[rows] = torch.nan
    q, k, v, log_decay = (tensor.to(device) for tensor in (inputs.q, inputs.k, inputs.v, inputs.log_decay))
    return LinearInputs(q, k, v, log_decay, None if inputs.beta is None else inputs.beta.to(device), inputs.normalize)
