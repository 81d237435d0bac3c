"""The stage of ``attnplug check`` for linear attention: states in scattered slots of a poisoned pool, and float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug.cli.reference import convolution_float64, recurrence_float64
from attnplug.cli.scene import CONTEXT, LONGEST, Clock, Result, Step, allowed_error, largest_error, worse
from attnplug.contract.backend import AttentionBackend
from attnplug.contract.batch import ForwardBatch
from attnplug.contract.geometry import Geometry
from attnplug.contract.linear import LinearInputs
from attnplug.declare.errors import BackendError
from attnplug.declare.model import AttentionKind, LayerSpec, LinearDims
from attnplug.declare.problem import DType
from attnplug.kv import KVPools, LinearStatePool, torch_dtype
from attnplug.kv.workspace import WorkspaceOwner
from attnplug.layers.model_attention import ModelAttention


def _layer(kind: AttentionKind, dims: LinearDims) -> LayerSpec:
    scale = max(dims.key_dim, 1) ** -0.5
    return LayerSpec(0, kind, dims.heads, dims.key_heads, dims.key_dim, dims.value_dim, scale, linear=dims)


LINEAR_LAYERS = {
    "GDN 4/2 heads": _layer(AttentionKind.GDN, LinearDims(4, 2, 64, 64, conv_channels=512, conv_width=4)),
    "KDA 4 heads": _layer(AttentionKind.KDA, LinearDims(4, 4, 64, 64, conv_channels=768, conv_width=4)),
    "lightning 4 heads": _layer(AttentionKind.LIGHTNING, LinearDims(4, 4, 64, 64)),
    "mamba2 8/1 heads": _layer(AttentionKind.MAMBA2, LinearDims(8, 1, 64, 32, conv_channels=384, conv_width=4)),
    "short convolution": _layer(AttentionKind.SHORT_CONV, LinearDims(0, 0, 0, 0, conv_channels=128, conv_width=3)),
}
_DELTA = (AttentionKind.GDN, AttentionKind.KDA)
_SLOTS = 7


@dataclass
class _State:
    """What a request's states should be, in float64."""

    recurrent: Tensor
    conv: Tensor


class LinearScene:
    """Requests with states of their own. Every slot that belongs to no request is NaN, and must stay so."""

    def __init__(
        self, layer: LayerSpec, dtype: DType, kv_dtype: DType, page_size: int, device: torch.device, seed: int
    ) -> None:
        assert layer.linear is not None
        self.layer, self.dims, self.device, self.page_size = layer, layer.linear, device, page_size
        self.dtype, self.workspace = torch_dtype(dtype), WorkspaceOwner()
        self.tolerance = allowed_error(dtype, self.dims.key_dim + LONGEST)
        self._random, self._clock = torch.Generator().manual_seed(seed), Clock(device)
        pool = LinearStatePool([layer], num_slots=_SLOTS, dtype=dtype, device=device)
        self.pools = KVPools(linear=pool)
        self._memory = {"recurrent": pool.recurrent(layer.layer_id), "conv": pool.conv(layer.layer_id)}
        order = torch.randperm(_SLOTS, generator=self._random).tolist()
        self._slots, self._others = order[:3], order[3:]
        for states in self._memory.values():
            if states is not None:
                states.fill_(float("nan"))
                states[self._slots] = 0.0
        dims = self.dims
        self._wanted = [
            _State(
                torch.zeros(dims.heads, dims.key_dim, dims.value_dim, dtype=torch.float64),
                torch.zeros(dims.conv_channels, dims.conv_width, dtype=torch.float64),
            )
            for _ in self._slots
        ]
        self._totals = [0] * len(self._slots)
        self._weight = self._normal(dims.conv_channels, dims.conv_width) * max(dims.conv_width, 1) ** -0.5
        self._bias = self._normal(dims.conv_channels)

    def run(self, name: str, step: Step, backend: AttentionBackend, with_lse: bool) -> Result:
        lengths = list(step.new_tokens.values())
        rows = sum(lengths)
        batch, attention = self._batch(step), ModelAttention(backend, self.pools)
        x = self._normal(rows, self.dims.conv_channels) if self.dims.conv_width else None
        inputs = self._inputs(rows) if self.dims.heads else None
        started = self._clock.now()
        attention.plan(batch)
        planned = self._clock.now()
        conv_out = None if x is None else attention.convolve(x, self._weight, self._bias, self.layer, batch)
        out = None if inputs is None else attention.attend_linear(inputs, self.layer, batch)
        finished = self._clock.now()
        error = 0.0
        first = 0
        for request, count in step.new_tokens.items():
            own, wanted = slice(first, first + count), self._wanted[request]
            if x is not None:
                right, wanted.conv = convolution_float64(x[own], self._weight, self._bias, wanted.conv, silu=True)
                error = worse(error, largest_error(_rows(conv_out, rows)[own], right))
            if inputs is not None:
                right, wanted.recurrent = recurrence_float64(_part(inputs, own), wanted.recurrent, self.layer.scale)
                error = worse(error, largest_error(_rows(out, rows)[own], right))
            first += count
        return Result(
            layer=name,
            step=step.title,
            rows=rows,
            tolerance=self.tolerance,
            error=worse(error, self._state_error()),
            plan_ms=1e3 * (planned - started),
            forward_ms=1e3 * (finished - planned),
        )

    def _state_error(self) -> float:
        error = 0.0
        for kind, states in self._memory.items():
            if states is None:
                continue
            if not states[self._others].isnan().all():
                raise BackendError(f"it wrote to the {kind} state of a slot that no request of the batch has")
            for slot, wanted in zip(self._slots, self._wanted, strict=True):
                error = worse(error, largest_error(states[slot], getattr(wanted, kind)))
        return error

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._random).to(self.dtype).to(self.device)

    def _inputs(self, tokens: int) -> LinearInputs:
        dims, kind = self.dims, self.layer.kind
        q, k = (self._normal(tokens, dims.key_heads, dims.key_dim) for _ in "qk")
        if kind not in _DELTA:
            k = k * dims.key_dim**-0.5
        decays = {AttentionKind.LIGHTNING: (dims.heads,), AttentionKind.KDA: (tokens, dims.heads, dims.key_dim)}
        log_decay = -torch.rand(*decays.get(kind, (tokens, dims.heads)), generator=self._random)
        beta = torch.rand(tokens, dims.heads, generator=self._random) if kind in _DELTA else None
        return LinearInputs(
            q,
            k,
            self._normal(tokens, dims.heads, dims.value_dim),
            log_decay.to(self.device),
            None if beta is None else beta.to(self.device),
            normalize=kind in _DELTA,
        )

    def _batch(self, step: Step) -> ForwardBatch:
        for request, count in step.new_tokens.items():
            self._totals[request] += count
        new, lens = list(step.new_tokens.values()), [self._totals[request] for request in step.new_tokens]
        table = torch.zeros(len(lens), CONTEXT // self.page_size + 1, dtype=torch.int32, device=self.device)
        slots = torch.tensor([self._slots[request] for request in step.new_tokens], device=self.device)
        return ForwardBatch(Geometry.of_lengths(step.mode, table, new, lens, self.page_size, state_slots=slots))


def _rows(found: object, rows: int) -> Tensor:
    if not isinstance(found, Tensor) or found.shape[:1] != (rows,):
        shape = tuple(found.shape) if isinstance(found, Tensor) else repr(found)
        raise BackendError(f"the result has shape {shape} and should have {rows} rows")
    return found


def _part(inputs: LinearInputs, rows: slice) -> LinearInputs:
    """One request's rows."""
    decay, beta = inputs.log_decay, inputs.beta
    return LinearInputs(
        inputs.q[rows],
        inputs.k[rows],
        inputs.v[rows],
        decay if decay.dim() == 1 else decay[rows],
        None if beta is None else beta[rows],
        inputs.normalize,
    )
