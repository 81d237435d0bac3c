"""What a compressed layer brings to make entries of its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug.declare.errors import BackendError
from attnplug.declare.model import LayerSpec


@dataclass(frozen=True, slots=True, eq=False)
class CompressorWeights:
    """What a layer's compressor has after its projections. All are float32."""

    bias: Tensor
    """``[ratio, series * dim]``, added to the gates by the token's place in its window."""
    norm: Tensor
    """``[dim]``: the weight of an entry's root-mean-square norm."""
    eps: float
    frequencies: Tensor
    """``[rope / 2]``: an entry's last ``rope`` columns, in pairs ``(2 i, 2 i + 1)``, are turned by these frequencies
    times the position of its window's first token."""


@dataclass(frozen=True, slots=True, eq=False)
class CompressorInputs:
    """What a compressor made of the new tokens. Rows past those that were planned are padding.

    An entry of a window, with the weights, in float32::

        weights = softmax(gate + bias)             over the window's tokens, for each column
        entry = rms_norm(sum(weights * values))    over the window's tokens, then times ``norm``
        entry = turned by the position of the window's first token

    With ``overlap`` the columns are two series. An entry takes the first series of the window before it and the second
    series of its own window, with one softmax over the tokens of both. The first window has no other before it.
    """

    values: Tensor
    """``[tokens, series * dim]``."""
    gates: Tensor
    """``[tokens, series * dim]``."""
    weights: CompressorWeights

    def first(self, tokens: int) -> CompressorInputs:
        """What the first so many tokens bring."""
        return CompressorInputs(self.values[:tokens], self.gates[:tokens], self.weights)

    def check(self, layer: LayerSpec, dim: int, tokens: int) -> None:
        """Refuse what is not of a layer's compressor to entries of ``dim``, for so many tokens."""
        dims, weights = layer.compressed, self.weights
        assert dims is not None
        width = dims.series * dim
        wanted = {"values": (tokens, width), "gates": (tokens, width), "bias": (dims.ratio, width), "norm": (dim,)}
        found = {"values": self.values, "gates": self.gates, "bias": weights.bias, "norm": weights.norm}
        for name, shape in wanted.items():
            if found[name].shape != shape:
                raise BackendError(
                    f"layer {layer.layer_id}: the {name} for entries have shape {tuple(found[name].shape)}; give "
                    f"{shape} for {tokens} tokens, windows of {dims.ratio} and entries of {dim}"
                )
        if weights.frequencies.dim() != 1 or 2 * weights.frequencies.shape[0] > dim:
            raise BackendError(
                f"layer {layer.layer_id}: the frequencies for entries have shape {tuple(weights.frequencies.shape)}; "
                f"give one for each pair of up to {dim} columns"
            )
        for name in ("bias", "norm", "frequencies"):
            if getattr(weights, name).dtype is not torch.float32:
                raise BackendError(
                    f"layer {layer.layer_id}: the {name} for entries are {getattr(weights, name).dtype}; give "
                    "torch.float32"
                )
