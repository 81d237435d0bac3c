"""Checks shared by pools: their layers, sizes and scales."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from attnplug.declare.errors import PoolError
from attnplug.declare.model import LayerSpec

T = TypeVar("T")


def held_for(held: Mapping[int, T], layer_id: int, kind: str) -> T:
    """Return a layer's entry of a pool of this ``kind``. Raises PoolError if the pool does not have the layer."""
    try:
        return held[layer_id]
    except KeyError:
        raise PoolError(f"the {kind} pool has no layer {layer_id}; it has {layer_list(held)}") from None


def distinct_layers(layers: Sequence[LayerSpec], kind: str) -> dict[int, LayerSpec]:
    """Return a pool's layers by id. Raises PoolError if there is none, or if an id repeats."""
    by_id = {layer.layer_id: layer for layer in layers}
    if not by_id:
        raise PoolError(f"there is no {kind} layer to make a pool for; leave the {kind} pool out")
    if len(by_id) != len(layers):
        raise PoolError(f"layer ids repeat among {[layer.layer_id for layer in layers]}; give each layer its own")
    return by_id


def check_size(num_pages: int, page_size: int) -> None:
    """Raise PoolError for an empty pool."""
    if num_pages < 1 or page_size < 1:
        raise PoolError(f"a pool of {num_pages} pages of {page_size} tokens holds nothing; give 1 or more of each")


def layer_scales(scales: Mapping[int, T] | None, layers: Collection[int], default: T) -> dict[int, T]:
    """Return the scales of all layers. Raises PoolError for scales of layers that the pool does not have."""
    unknown = set(scales or ()) - set(layers)
    if unknown:
        raise PoolError(f"scales were given for layers {layer_list(unknown)}; the pool has {layer_list(layers)}")
    return dict.fromkeys(layers, default) | dict(scales or {})


def layer_list(layer_ids: Iterable[int]) -> str:
    """Format layer ids for messages."""
    return ", ".join(map(str, sorted(layer_ids)))
