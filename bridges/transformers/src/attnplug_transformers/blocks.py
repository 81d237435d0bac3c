"""Access to the memory of transformers' ``PagedAttentionCache``, in the form of 5.17 and in that of 5.18 and later."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

BlockCache = Any  # transformers' PagedAttentionCache, of either form

KeysAndValues = Mapping[int, tuple[Tensor, Tensor]]
"""Keys and values ``[pages, page_size, kv_heads, dim]``, by layer."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one type, which share page tables.

    Row i of the cache, by transformers' read and write indices, is in page ``i // stride`` at offset ``i % stride``.
    """

    index: int
    layer_type: str
    layers: tuple[int, ...]
    page_size: int
    stride: int
    window: int | None

    @classmethod
    def of(cls, cache: BlockCache, layer: int) -> LayerGroup:
        """Return the group of a layer."""
        if hasattr(cache, "layer_to_allocator"):
            allocator = cache.layer_to_allocator[layer]
            return cls(
                allocator.index,
                allocator.layer_type,
                tuple(allocator.layer_indices),
                allocator.tokens_per_page,
                allocator.block_physical_stride,
                getattr(allocator, "sliding_window", None),
            )
        places = cache.layer_index_to_group_indices
        group, _ = places[layer]
        window = cache.sliding_windows[layer]  # 1: none
        return cls(
            group,
            "full_attention" if window == 1 else "sliding_attention",
            tuple(index for index, (number, _) in places.items() if number == group),
            cache.block_size,
            cache.block_size,
            None if window == 1 else window,
        )

    def tensors(self, cache: BlockCache) -> KeysAndValues:
        """Keys and values of the group's layers, for layers without a window."""
        if hasattr(cache, "layer_to_allocator"):
            # One buffer: a block holds the keys and then the values of every layer of the group.
            allocator = cache.layer_to_allocator[self.layers[0]]
            step = self.stride // self.page_size
            pairs = {index: allocator.get_cache_for_block_table(index) for index in self.layers}
            return {index: (keys[::step], values[::step]) for index, (keys, values) in pairs.items()}
        # 5.17: one tensor of keys and one of values for each position in a group.
        places = {index: cache.layer_index_to_group_indices[index][1] for index in self.layers}
        pages = -1, self.page_size
        return {
            index: (cache.key_cache[place].unflatten(0, pages), cache.value_cache[place].unflatten(0, pages))
            for index, place in places.items()
        }


def read_gathered(
    cache: BlockCache, key: Tensor, value: Tensor, layer: int, others: Mapping[str, object]
) -> tuple[Tensor, Tensor]:
    """Have transformers write the new rows and gather the rows of all requests as ``[rows, kv_heads, dim]``."""
    if "kwargs" in inspect.signature(cache.update).parameters:
        given = dict(others)  # update() modifies it
        keys, values = cache.update(key, value, layer, given)
        return keys[0].transpose(0, 1), values[0].transpose(0, 1)
    keys, values = cache.update(key, value, layer, others["read_index"], others["write_index"])
    return keys, values
