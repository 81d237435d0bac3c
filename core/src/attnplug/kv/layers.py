"""The checks that pools share: which of a model's layers a pool holds, and what may be asked of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from attnplug.declare.errors import PoolError
from attnplug.declare.model import LayerSpec

T = TypeVar("T")


def held_for(held: Mapping[int, T], layer_id: int, kind: str) -> T:
    """What a pool of this ``kind`` holds for a layer, by layer id."""
    try:
        return held[layer_id]
    except KeyError:
        raise PoolError(f"the {kind} pool has no layer {layer_id}; it has {layer_list(held)}") from None


def distinct_layers(layers: Sequence[LayerSpec], kind: str) -> dict[int, LayerSpec]:
    """A pool's layers by id: at least one, and no id twice."""
    by_id = {layer.layer_id: layer for layer in layers}
    if not by_id:
        raise PoolError(f"there is no {kind} layer to make a pool for; leave the {kind} pool out")
    if len(by_id) != len(layers):
        raise PoolError(f"layer ids repeat among {[layer.layer_id for layer in layers]}; give each layer its own")
    return by_id


def check_size(num_pages: int, page_size: int) -> None:
    """Refuse a pool that holds nothing."""
    if num_pages < 1 or page_size < 1:
        raise PoolError(f"a pool of {num_pages} pages of {page_size} tokens holds nothing; give 1 or more of each")


def check_scales(scales: Collection[int], layers: Collection[int]) -> None:
    """Refuse scales for layers that the pool does not have."""
    unknown = set(scales) - set(layers)
    if unknown:
        raise PoolError(f"scales were given for layers {layer_list(unknown)}; the pool has {layer_list(layers)}")


def layer_list(layer_ids: Iterable[int]) -> str:
    """Layer ids as messages show them."""
    return ", ".join(map(str, sorted(layer_ids)))
