"""What a sparse layer brings to choose its rows, and what was chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from attnplug.contract.compressed import CompressorInputs
from attnplug.declare.errors import BackendError
from attnplug.declare.model import LayerSpec


@dataclass(frozen=True, slots=True, eq=False)
class IndexInputs:
    """What a layer's indexer made of the new tokens. Rows past those that were planned are padding.

    The score of a row s for a token t is the sum over heads of ``weights[t, h] * relu(scale * q[t, h] · k[s])``, in
    float32, where ``scale`` is that of ``IndexerDims``. A weight may be negative.
    """

    q: Tensor
    """``[tokens, heads, head_dim]``, rotated."""
    k: Tensor | None
    """``[tokens, head_dim]``: the new tokens' index keys, rotated, to be written to the cache; ``None`` where they are
    in it already."""
    weights: Tensor
    """``[tokens, heads]`` float32."""
    entries: CompressorInputs | None = None
    """In place of ``k`` for a layer that is ``compressed``, whose index has a key for each entry: what the new tokens
    bring to these keys."""


@dataclass(frozen=True, slots=True, eq=False)
class SelectedPositions:
    """Rows by their positions in the token's own request; of a ``compressed`` layer, entries by their numbers.

    ``positions`` ``[tokens, width]`` int32 are distinct, in any order, and none is past the token's own. Where fewer
    were chosen the rest of the row is -1: always after the last position. Rows of padding are -1.
    """

    positions: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SelectedSlots:
    """The same rows by where they lie in the cache; entries in that of entries.

    ``slots`` ``[tokens, width]`` int32 are ``page * page_size + offset``, with -1 as in ``SelectedPositions``.
    """

    slots: Tensor


SelectedRows: TypeAlias = SelectedPositions | SelectedSlots
"""What each token attends to. The two are never one tensor with two meanings."""


def selected_tensor(selected: SelectedRows) -> Tensor:
    """The tensor ``[tokens, width]`` of either, for what holds of both."""
    return selected.positions if isinstance(selected, SelectedPositions) else selected.slots


def first_rows(selected: SelectedRows, tokens: int) -> SelectedRows:
    """What the first so many tokens attend to."""
    return type(selected)(selected_tensor(selected)[:tokens])


@dataclass(frozen=True, slots=True, eq=False)
class LayerChoice:
    """What a layer chose in the forward of a batch, for layers that share it."""

    layer_id: int
    rows: SelectedRows


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


def check_entries(entries: CompressorInputs, layer: LayerSpec, dim: int, tokens: int) -> None:
    """Raise BackendError unless ``entries`` are inputs of the layer's compressor to entries of width ``dim``."""
    if layer.compressed is None:
        raise BackendError(f"layer {layer.layer_id} makes no entries, but extras.entries were given")
    entries.check(layer, dim, tokens)


def require_entries(entries: CompressorInputs | None, layer: LayerSpec, backend: str) -> None:
    """Raise BackendError if new rows of a compressed layer are written without the inputs of its compressor."""
    if layer.compressed is not None and entries is None:
        raise BackendError(
            f"layer {layer.layer_id} makes an entry of every {layer.compressed.ratio} tokens, but backend {backend} "
            "was given no extras.entries; give what the layer's compressor made of the new tokens"
        )
