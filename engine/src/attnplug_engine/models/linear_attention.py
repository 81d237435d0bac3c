"""What the linear-attention layers share: a rank's part of one, its short convolution, and the gated norm after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from attnplug import ForwardBatch, LayerSpec
from attnplug.host import LinearDims, active_attention
from attnplug_engine.models.layers import frozen
from attnplug_engine.models.weights import Rows, Weights
from attnplug_engine.parallel import TensorParallel, even_part, kv_head_part


@dataclass(frozen=True, slots=True)
class LinearPart:
    """A rank's part of a linear layer: the layer with the rank's own dimensions, and which heads of the whole it has.

    Key heads are divided like KV heads: where ranks are more than they, several ranks hold the same one.
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
    """The part of a linear layer that a rank runs and keeps the state of. Raises ParallelError."""
    dims = layer.linear
    assert dims is not None
    heads = even_part(dims.heads, parallel, "linear-attention heads")
    return LinearPart(layer.for_rank(parallel.size), heads, kv_head_part(dims.key_heads, parallel))


class ShortConvolution(nn.Module):
    """The convolution over each channel's last rows that a layer has before its recurrence, with SiLU after it.

    Stored weights are ``[channels, 1, width]``; ``parts`` are this rank's channels of them, in the order of its rows.
    """

    def __init__(self, weights: Weights, parts: Sequence[Rows], layer: LayerSpec, *, bias: bool = False) -> None:
        super().__init__()
        assert layer.linear is not None
        self.weight = frozen(weights.stack("weight", parts, 1, layer.linear.conv_width).squeeze(1))
        self.bias = frozen(weights.stack("bias", parts)) if bias else None
        self._layer = layer

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """``[tokens, channels]`` to the same; reads and moves on the requests' states."""
        return active_attention().convolve(x, self.weight, self.bias, self._layer, batch)


class GatedHeadNorm(nn.Module):
    """A norm of each head's output, which is then scaled by its gate's activation; float32 inside."""

    def __init__(self, weights: Weights, width: int, eps: float, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = frozen(weights.take("weight", width, exact=True))
        self._eps = eps
        self._activation = activation

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """``x`` and ``gate`` ``[tokens, heads, width]`` to ``[tokens, heads * width]`` in the type of ``x``."""
        normed = F.rms_norm(x.float(), self.weight.shape, self.weight, self._eps)
        return (normed * self._activation(gate.float())).to(x.dtype).flatten(1)


class DecayGate(nn.Module):
    """``-exp(A_log) * softplus(x + dt_bias)``: how fast a state forgets, by what a token says. Float32 throughout."""

    def __init__(self, a_log: Tensor, dt_bias: Tensor) -> None:
        super().__init__()
        self.rate = frozen(-a_log.exp())
        self.dt_bias = frozen(dt_bias)

    def forward(self, x: Tensor) -> Tensor:
        """``[tokens, …]``, with the bias's shape after the tokens, to log decays of the same shape."""
        return self.rate * F.softplus(x.float() + self.dt_bias)
