"""Row selection as the layers of a model call it: by a layer's own index, or that of an earlier layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from attnplug import AttentionBackend, BackendError, Feature, ForwardBatch, LayerSpec
from attnplug.sparse import IndexInputs, SelectedPositions, SelectedRows, SelectedSlots


class BoundBackend(Protocol):
    """A backend with its optional hooks, as ``attnplug.host.ModelAttention`` binds them."""

    backend: AttentionBackend
    hooks: Mapping[str, Callable[..., Any] | None]


@dataclass(frozen=True, slots=True, eq=False)
class LayerSelection:
    """Selection of a layer in the forward pass of a batch, for layers that share it."""

    layer_id: int
    rows: SelectedRows


def select_rows(
    attention: BoundBackend, index: IndexInputs | None, layer: LayerSpec, batch: ForwardBatch
) -> SelectedRows:
    """Return the rows that a sparse layer attends to, for ``attend_mla``; see ``RowSelection.select``.

    A layer that shares an index passes ``None`` and gets the selection of that layer in this forward pass::

        selected = select_rows(attention, index, layer, batch)
        out = attention.attend_mla(q, rows, layer, weights, batch, selected=selected)
    """
    dims, backend = layer.indexer, attention.backend.backend_id.name
    if dims is None or (dims.shares is None) != (index is not None):
        has = "attends to all rows"
        if dims is not None:
            has = "has its own index" if dims.shares is None else f"shares the index of layer {dims.shares}"
        given = "no index" if index is None else "an index"
        raise BackendError(f"layer {layer.layer_id} {has}, but select_rows was given {given}")
    if index is None:
        return _shared(layer.layer_id, dims.shares, batch)
    select = attention.hooks["select"]
    if select is None:
        raise BackendError(
            f"layer {layer.layer_id} selects rows, but backend {backend} has no select; choose one that claims the "
            f"feature {Feature.SPARSE}"
        )
    rows: SelectedRows = select(index, layer, batch)
    if not isinstance(rows, SelectedPositions | SelectedSlots):
        raise BackendError(
            f"select of backend {backend} returned {type(rows).__name__} for layer {layer.layer_id}; it must return "
            "SelectedPositions or SelectedSlots"
        )
    batch.passed_on = LayerSelection(layer.layer_id, rows)
    return rows


def _shared(layer_id: int, wanted: int | None, batch: ForwardBatch) -> SelectedRows:
    last = batch.passed_on
    if isinstance(last, LayerSelection) and last.layer_id == wanted:
        return last.rows
    found = f"the last to select was layer {last.layer_id}" if isinstance(last, LayerSelection) else "none selected any"
    raise BackendError(
        f"layer {layer_id} attends to the rows that layer {wanted} selects, but in this batch {found}; run layers in "
        "order"
    )
