"""The cache of index keys, by which sparse layers choose the rows that they attend to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from attnplug.declare.errors import PoolError
from attnplug.declare.model import IndexerDims, LayerSpec
from attnplug.declare.problem import DType
from attnplug.kv.allocator import PageCopy
from attnplug.kv.buffer import PagedBuffer, copy_pages, move_rows
from attnplug.kv.caches import CacheKey
from attnplug.kv.foreign import check_tensors, check_together, foreign_buffer, page_views
from attnplug.kv.layers import check_size, distinct_layers, held_for
from attnplug.kv.layout import PageLayout

_KIND = "index key"


def _own_indexers(layers: Sequence[LayerSpec]) -> dict[int, IndexerDims]:
    """The layers that compute an index, by id."""
    own = [layer for layer in layers if layer.indexer is not None and layer.indexer.shares is None]
    return {
        layer_id: layer.indexer for layer_id, layer in distinct_layers(own, _KIND).items() if layer.indexer is not None
    }


class IndexKeyPool:
    """Index keys of all layers among ``layers`` that compute an index: per layer ``[pages, page_size, head_dim]``.

    Pages and slots are those of the layers' other rows: one page table leads to both. ``dtype`` is the model's own.
    """

    def __init__(
        self, layers: Sequence[LayerSpec], *, num_pages: int, page_size: int, dtype: DType, device: torch.device | str
    ) -> None:
        check_size(num_pages, page_size)
        _check_type(dtype)
        buffers = {}
        for layer_id, dims in _own_indexers(layers).items():
            layout = PageLayout.token_major(num_pages, page_size, 1, dims.head_dim)
            buffers[layer_id] = PagedBuffer.allocate(layout, dtype=dtype, device=device)
        self._hold(buffers, dtype)

    @classmethod
    def over(
        cls, layers: Sequence[LayerSpec], tensors: Mapping[int, Tensor], layout: str, *, page_size: int, dtype: DType
    ) -> IndexKeyPool:
        """A pool over a host's tensors, by layer id, without a copy; ``layout`` is as in ``MLAPool.over``."""
        check_size(1, page_size)
        _check_type(dtype)
        own = _own_indexers(layers)
        check_tensors(tensors, own, _KIND)
        buffers, named = {}, {}
        for layer_id, dims in own.items():
            name = f"the index keys of layer {layer_id}"
            (pages,) = page_views(tensors[layer_id], layout, page_size, 1, (dims.head_dim,), name)
            buffers[layer_id] = named[name] = foreign_buffer(pages, dtype, 1.0, name)
        check_together(named)
        pool = cls.__new__(cls)
        pool._hold(buffers, dtype)
        return pool

    def _hold(self, buffers: dict[int, PagedBuffer], dtype: DType) -> None:
        self._keys = buffers
        self.num_pages, self.page_size = next(iter(buffers.values())).layout.shape[:2]
        self.dtype = dtype

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return tuple(self._keys)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._keys.values())

    def keys(self, layer_id: int) -> Tensor:
        """``[pages, page_size, head_dim]`` as stored: the cache itself."""
        return held_for(self._keys, layer_id, _KIND).pages.squeeze(2)

    def write(self, layer_id: int, slots: Tensor, keys: Tensor) -> None:
        """Store ``keys`` ``[tokens, head_dim]`` at flat ``slots`` ``[tokens]`` int64.

        A key with the slot -1 is padding and is not written. Waits for no device.
        """
        buffer = held_for(self._keys, layer_id, _KIND)
        rows = keys.unsqueeze(1)
        buffer.write(slots, rows, padded=buffer.check_rows(slots, rows, "index keys"))

    def read_keys(self, layer_id: int, slots: Tensor) -> Tensor:
        """``[*slots.shape, head_dim]`` in the stored type."""
        return held_for(self._keys, layer_id, _KIND).read(slots).squeeze(-2)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages in every layer, as if one after another."""
        copy_pages(self._keys.values(), copies)

    def move_rows(self, sources: Tensor, targets: Tensor) -> None:
        """Copy keys in every layer from slots to slots; see ``KVPools.move_rows``."""
        move_rows(self._keys.values(), sources, targets)


def _check_type(dtype: DType) -> None:
    if dtype is DType.FLOAT8_E4M3:
        raise PoolError("index keys cannot be kept in float8_e4m3fn without a scale each; give the model's own type")


INDEX_KEYS: Final[CacheKey[IndexKeyPool]] = CacheKey("index keys", IndexKeyPool)
"""Finds the index keys in ``KVPools``."""
