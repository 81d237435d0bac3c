"""Shared parts of linear-attention layers: a rank's part of a layer, short convolution, gated norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from attnplug import ForwardBatch, LayerSpec
from attnplug.host import active_attention
from attnplug.linear import LinearDims
from attnplug_engine import kernels
from attnplug_engine.models.layers import ColumnNorm, frozen
from attnplug_engine.models.weights import WeightRows, Weights
from attnplug_engine.parallel.collectives import TensorParallel, even_part, kv_head_part


@dataclass(frozen=True, slots=True)
class LinearPart:
    """A rank's part of a linear layer: the layer with the rank's dimensions, and its heads of the whole.

    Key heads are divided like KV heads: if there are more ranks than key heads, several ranks hold the same one.
    """

    layer: LayerSpec
    heads: slice
    key_heads: slice

    @property
    def dims(self) -> LinearDims:
        dims = self.layer.linear
        assert dims is not None
        return dims

    @property
    def key_width(self) -> int:
        """Columns of this rank's queries, and of its keys."""
        return self.dims.key_heads * self.dims.key_dim

    @property
    def value_width(self) -> int:
        return self.dims.heads * self.dims.value_dim


def linear_part(layer: LayerSpec, parallel: TensorParallel) -> LinearPart:
    """Return the part of a linear layer that a rank runs and keeps the state of. Raises ParallelError."""
    dims = layer.linear
    assert dims is not None
    heads = even_part(dims.heads, parallel, "linear-attention heads")
    return LinearPart(layer.for_rank(parallel.size), heads, kv_head_part(dims.key_heads, parallel))


class ShortConvolution(nn.Module):
    """Convolution over each channel's last rows, before a layer's recurrence, with SiLU.

    Stored weights are ``[channels, 1, width]``; ``parts`` are this rank's channels, in the order of its rows.
    """

    def __init__(self, weights: Weights, parts: Sequence[WeightRows], layer: LayerSpec, *, bias: bool = False) -> None:
        super().__init__()
        assert layer.linear is not None
        self.weight = frozen(weights.stack("weight", parts, 1, layer.linear.conv_width).squeeze(1))
        self.bias = frozen(weights.stack("bias", parts)) if bias else None
        self._layer = layer

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """``[tokens, channels]`` to the same; reads and advances the requests' states."""
        return active_attention().convolve(x, self.weight, self.bias, self._layer, batch)


class GatedHeadNorm(nn.Module):
    """Norm of each head's output, scaled by the SiLU or sigmoid of its gate; float32 inside."""

    def __init__(self, weights: Weights, width: int, eps: float, *, silu: bool) -> None:
        super().__init__()
        self.weight = frozen(weights.take("weight", width, exact=True))
        self.eps, self.silu = eps, silu

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """``x`` and ``gate`` ``[tokens, heads, width]`` to ``[tokens, heads * width]`` in the dtype of ``x``."""
        if kernels.usable(x):
            from attnplug_engine.kernels.linear_gates import gated_norm

            heads = x.shape[1]
            return gated_norm(x.flatten(1), gate.flatten(1), self.weight, self.eps, groups=heads, silu=self.silu)
        normed = F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)
        return (normed * opened(gate, silu=self.silu)).to(x.dtype).flatten(1)


class GatedColumnNorm(ColumnNorm):
    """Norm over columns that the ranks share, and a gate per column, before or behind the norm."""

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return ``norm(x) * sigmoid(gate)`` of ``[tokens, own columns]``, in the dtype of ``x``."""
        if self._parallel is None and kernels.usable(x):
            from attnplug_engine.kernels.linear_gates import gated_norm

            return gated_norm(x, gate, self.weight, self._eps, groups=self._groups, silu=False)
        return cast(Tensor, (self(x) * opened(gate, silu=False)).to(x.dtype))

    def after_gate(self, x: Tensor, gate: Tensor, skip: Tensor, skipped: Tensor) -> Tensor:
        """Return ``norm((x + skip * skipped) * silu(gate))`` of ``[tokens, own columns]``; ``skip`` has one number per
        head."""
        if self._parallel is None and kernels.usable(x):
            from attnplug_engine.kernels.linear_gates import gated_norm

            skips, groups = (skip, skipped), self._groups
            return gated_norm(x, gate, self.weight, self._eps, groups=groups, silu=True, gate_first=True, skip=skips)
        heads = skip.shape[0]
        summed = x.unflatten(1, (heads, -1)) + skip.unsqueeze(-1) * skipped.unflatten(1, (heads, -1))
        return cast(Tensor, self(summed.flatten(1) * opened(gate, silu=True)).to(x.dtype))


def opened(gate: Tensor, *, silu: bool) -> Tensor:
    return F.silu(gate.float()) if silu else gate.float().sigmoid()


class DecayGate(nn.Module):
    """``-exp(A_log) * softplus(x + dt_bias)``: data-dependent decay of a state, in float32."""

    def __init__(self, a_log: Tensor, dt_bias: Tensor) -> None:
        super().__init__()
        self.rate = frozen(-a_log.exp())
        self.dt_bias = frozen(dt_bias.contiguous())

    def forward(self, x: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """Return log decays of the shape of ``x [tokens, …]``, whose last dimensions are the bias's, and the sigmoid of
        ``beta``."""
        if kernels.usable(x):
            from attnplug_engine.kernels.linear_gates import delta_gates

            return delta_gates(x, beta, self.rate, self.dt_bias)
        return self.rate * F.softplus(x.float() + self.dt_bias), beta.sigmoid()
