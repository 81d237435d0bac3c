"""The memory of ``PagedAttentionCache``, which transformers changed in 5.18: one reader for each form."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerGroup:
    """Layers of one kind, which share page tables.

    ``tensors`` are keys and values ``[pages, page_size, kv_heads, dim]`` by layer. Row i of the cache, as read and write
    indices count, is in page ``i // stride``, at ``i % stride``.
    """

    index: int
    layer_type: str
    layers: tuple[int, ...]
    tensors: Mapping[int, tuple[Tensor, Tensor]]
    page_size: int
    stride: int
    window: int | None

    @property
    def num_pages(self) -> int:
        return next(iter(self.tensors.values()))[0].shape[0]

    @property
    def dense(self) -> bool:
        """Whether pages lie one after the other."""
        return all(tensor.is_contiguous() for pair in self.tensors.values() for tensor in pair)

    @classmethod
    def of(cls, cache: Any, layer: int) -> LayerGroup:
        """The group of a layer."""
        return _of_allocator(cache, layer) if hasattr(cache, "layer_to_allocator") else _of_lists(cache, layer)


def _of_allocator(cache: Any, layer: int) -> LayerGroup:
    """From 5.18 on: one buffer, in which a block holds the keys and then the values of every layer of a kind."""
    allocator = cache.layer_to_allocator[layer]
    step = allocator.block_physical_stride // allocator.tokens_per_page
    tensors = {}
    for index in allocator.layer_indices:
        keys, values = allocator.get_cache_for_block_table(index)
        tensors[index] = keys[::step], values[::step]
    return LayerGroup(
        allocator.index,
        allocator.layer_type,
        tuple(allocator.layer_indices),
        tensors,
        allocator.tokens_per_page,
        allocator.block_physical_stride,
        getattr(allocator, "sliding_window", None),
    )


def _of_lists(cache: Any, layer: int) -> LayerGroup:
    """5.17: a tensor of keys and one of values for each place in a group."""
    group, _ = cache.layer_index_to_group_indices[layer]
    places = {index: place for index, (number, place) in cache.layer_index_to_group_indices.items() if number == group}
    size = cache.block_size
    pairs = {
        index: (cache.key_cache[place].unflatten(0, (-1, size)), cache.value_cache[place].unflatten(0, (-1, size)))
        for index, place in places.items()
    }
    window = cache.sliding_windows[layer]
    kind = "full_attention" if window == 1 else "sliding_attention"
    return LayerGroup(group, kind, tuple(places), pairs, size, size, None if window == 1 else window)


def read_gathered(
    cache: Any, key: Tensor, value: Tensor, layer: int, others: Mapping[str, object]
) -> tuple[Tensor, Tensor]:
    """Let transformers write new rows and read those of all requests, as ``[rows, kv_heads, dim]``."""
    if "kwargs" in inspect.signature(cache.update).parameters:
        given = dict(others)  # it changes some
        keys, values = cache.update(key, value, layer, given)
        return keys[0].transpose(0, 1), values[0].transpose(0, 1)
    keys, values = cache.update(key, value, layer, others["read_index"], others["write_index"])
    return keys, values
