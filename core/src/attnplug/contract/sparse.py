"""What a sparse layer brings to choose its rows, and what was chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from attnplug.contract.compressed import CompressorInputs


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
