"""Data types of sparse and compressed layers: inputs of the index and the compressor, and selected rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from attnplug.declare.errors import BackendError
from attnplug.declare.model import LayerSpec


@dataclass(frozen=True, slots=True, eq=False)
class CompressorWeights:
    """Weights of a layer's compressor behind its projections. All are float32."""

    bias: Tensor
    """``[ratio, series * dim]``, added to the gates by the token's position in its window."""
    norm: Tensor
    """``[dim]``: the weight of an entry's root-mean-square norm."""
    eps: float
    frequencies: Tensor
    """``[rope / 2]``: an entry's last ``rope`` columns, in pairs ``(2 i, 2 i + 1)``, are rotated by these frequencies
    times the position of its window's first token."""


@dataclass(frozen=True, slots=True, eq=False)
class CompressorInputs:
    """Outputs of a layer's compressor for the new tokens. Rows behind the planned ones are padding.

    An entry of a window, with the weights, in float32::

        weights = softmax(gate + bias)             over the window's tokens, for each column
        entry = rms_norm(sum(weights * values))    over the window's tokens, then times ``norm``
        entry = rotated by the position of the window's first token

    With ``overlap`` the columns are two series. An entry takes the first series of the window before it and the second
    series of its own window, with one softmax over the tokens of both. The first window has none before it.
    """

    values: Tensor
    """``[tokens, series * dim]``."""
    gates: Tensor
    """``[tokens, series * dim]``."""
    weights: CompressorWeights

    def first(self, tokens: int) -> CompressorInputs:
        """Return the inputs of the first ``tokens`` tokens."""
        return CompressorInputs(self.values[:tokens], self.gates[:tokens], self.weights)


@dataclass(frozen=True, slots=True, eq=False)
class IndexInputs:
    """Outputs of a layer's indexer for the new tokens. Rows behind the planned ones are padding.

    The score of a row s for a token t is the sum over heads of ``weights[t, h] * relu(scale * q[t, h] · k[s])``, in
    float32, where ``scale`` is that of ``IndexerDims``. A weight may be negative.
    """

    q: Tensor
    """``[tokens, heads, head_dim]``, rotated."""
    k: Tensor | None
    """``[tokens, head_dim]``: the new tokens' index keys, rotated, to be cached; ``None`` if they are cached."""
    weights: Tensor
    """``[tokens, heads]`` float32."""
    entries: CompressorInputs | None = None
    """Given instead of ``k`` for a ``compressed`` layer, whose index has a key for each entry."""


@dataclass(frozen=True, slots=True, eq=False)
class SelectedPositions:
    """Selected rows by position in the token's own request; for a ``compressed`` layer, entries by number.

    ``positions`` ``[tokens, width]`` int32 are distinct, in any order, and none is behind the token's own. If fewer
    were selected, the rest of the row is -1. Rows of padding are -1.
    """

    positions: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SelectedSlots:
    """Selected rows by slot of the cache; entries by slot of the cache of entries.

    ``slots`` ``[tokens, width]`` int32 are ``page * page_size + offset``, with -1 as in ``SelectedPositions``.
    """

    slots: Tensor


SelectedRows: TypeAlias = SelectedPositions | SelectedSlots
"""Rows ``[tokens, topk]`` that each token attends to. Two types, so that a tensor never has two meanings."""


def selected_tensor(selected: SelectedRows) -> Tensor:
    """Return the tensor ``[tokens, width]`` of either type."""
    return selected.positions if isinstance(selected, SelectedPositions) else selected.slots


def first_rows(selected: SelectedRows, tokens: int) -> SelectedRows:
    """Return the rows that the first ``tokens`` tokens attend to."""
    return type(selected)(selected_tensor(selected)[:tokens])


def check_selected(selected: SelectedRows | None, layer: LayerSpec, tokens: int, backend: str) -> None:
    """Raise BackendError unless ``selected`` fits the layer: given for layers with an indexer, and for no others."""
    if selected is None:
        if layer.indexer is not None:
            raise BackendError(
                f"layer {layer.layer_id} attends to rows that an index chooses, but backend {backend} was given no "
                "extras.selected; give what `select` returned for this batch"
            )
        return
    if layer.indexer is None:
        raise BackendError(
            f"layer {layer.layer_id} attends to all rows, but extras.selected were given; leave them out"
        )
    given = selected_tensor(selected)
    if given.dim() != 2 or given.shape[0] != tokens or given.dtype is not torch.int32:
        raise BackendError(
            f"layer {layer.layer_id}: extras.selected is {given.dtype} of shape {tuple(given.shape)}; give torch.int32 "
            f"of shape [{tokens}, rows chosen]"
        )
