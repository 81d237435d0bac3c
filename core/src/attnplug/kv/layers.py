"""Which of a model's layers a pool holds, and what may be asked of it: the checks that pools share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from attnplug.declare.errors import PoolError
from attnplug.declare.model import LayerSpec

T = TypeVar("T")


def held_for(held: Mapping[int, T], layer_id: int, kind: str) -> T:
    """What a pool of this ``kind`` holds for a layer, by layer id."""
    try:
        return held[layer_id]
    except KeyError:
        raise PoolError(f"the {kind} pool has no layer {layer_id}; it has {_ids(held)}") from None


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
        raise PoolError(f"scales were given for layers {_ids(unknown)}; the pool has {_ids(layers)}")


def heads_per_rank(layer: LayerSpec, tensor_parallel: int) -> int:
    """A rank's KV heads: an even part, or one that several ranks hold when there are more ranks than heads."""
    heads = layer.num_kv_heads
    if tensor_parallel < 1 or (heads % tensor_parallel and tensor_parallel % heads):
        raise PoolError(
            f"layer {layer.layer_id}: {heads} KV heads cannot be divided over {tensor_parallel} ranks; "
            f"use a `tensor_parallel` that divides {heads} or is a multiple of it",
            settings=["tensor_parallel"],
        )
    return max(heads // tensor_parallel, 1)


def _ids(layer_ids: Collection[int]) -> str:
    return ", ".join(map(str, sorted(layer_ids)))
