"""The cache of index keys, by which sparse layers choose the rows that they attend to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from attnplug.declare.errors import PoolError
from attnplug.declare.model import IndexerDims, LayerSpec
from attnplug.declare.problem import DType
from attnplug.kv.buffer import PagedBuffer, torch_dtype
from attnplug.kv.caches import CacheKey
from attnplug.kv.foreign import check_tensors, foreign_buffer, foreign_bytes, page_views
from attnplug.kv.layers import check_size, distinct_layers
from attnplug.kv.layout import PageLayout
from attnplug.kv.row_pool import RowPool, Rows
from attnplug.kv.scaled_rows import ScaledRows, index_key_bytes


class IndexKeyPool(RowPool):
    """Index keys of all layers among ``layers`` that compute an index: per layer ``[pages, page_size, head_dim]``.

    Pages and slots are those of the layers' other rows: one page table leads to both. ``dtype`` is the model's own, or
    fp8. In fp8 a page of bytes ``[page_size, head_dim + 4]`` holds all its keys first, and then a float32 scale for
    each, as DeepGEMM's kernels read it.
    """

    kind = "index key"
    content = "index keys"

    def __init__(
        self, layers: Sequence[LayerSpec], *, num_pages: int, page_size: int, dtype: DType, device: torch.device | str
    ) -> None:
        check_size(num_pages, page_size)
        _check_type(dtype)
        held: dict[int, Rows] = {}
        for layer_id, dims in _own_indexers(layers).items():
            if dtype is DType.FLOAT8_E4M3:
                shape = num_pages, page_size, 1, index_key_bytes(dims.head_dim)
                memory = torch.zeros(shape, dtype=torch.uint8, device=device)
                held[layer_id] = ScaledRows.index_keys(memory, dims.head_dim)
            else:
                layout = PageLayout.token_major(num_pages, page_size, 1, dims.head_dim)
                held[layer_id] = PagedBuffer.allocate(layout, dtype=dtype, device=device)
        self._hold(held, dtype)

    @classmethod
    def over(
        cls, layers: Sequence[LayerSpec], tensors: Mapping[int, Tensor], layout: str, *, page_size: int, dtype: DType
    ) -> IndexKeyPool:
        """A pool over a host's tensors, by layer id, without a copy; ``layout`` is as in ``MLAPool.over``.

        In fp8 the tensors are bytes, ``dim`` is ``head_dim + 4``, and each page is contiguous.
        """
        check_size(1, page_size)
        _check_type(dtype)
        own = _own_indexers(layers)
        check_tensors(tensors, own, cls.kind)
        held: dict[int, Rows] = {}
        for layer_id, dims in own.items():
            scaled, name = dtype is DType.FLOAT8_E4M3, f"the {cls.content} of layer {layer_id}"
            width = index_key_bytes(dims.head_dim) if scaled else dims.head_dim
            (pages,) = page_views(tensors[layer_id], layout, page_size, 1, (width,), name)
            if scaled:
                held[layer_id] = ScaledRows.index_keys(foreign_bytes(pages, dtype, name), dims.head_dim)
            else:
                held[layer_id] = foreign_buffer(pages, dtype, 1.0, name)
        return cls._over(held, dtype)

    @staticmethod
    def key_nbytes(dims: IndexerDims, dtype: DType) -> int:
        """What a key takes."""
        scaled = dtype is DType.FLOAT8_E4M3
        return index_key_bytes(dims.head_dim) if scaled else dims.head_dim * torch_dtype(dtype).itemsize

    def keys(self, layer_id: int) -> Tensor:
        """``[pages, page_size, head_dim]`` as stored: the cache itself. In fp8 bytes ``[…, head_dim + 4]``, which are
        keys and scales by whole pages."""
        return self._of(layer_id).pages.squeeze(2)

    def write(self, layer_id: int, slots: Tensor, keys: Tensor) -> None:
        """Store ``keys`` ``[tokens, head_dim]`` at flat ``slots`` ``[tokens]`` int64.

        A key with the slot -1 is padding and is not written. Waits for no device.
        """
        self._write(layer_id, slots, keys.unsqueeze(1))

    def read_keys(self, layer_id: int, slots: Tensor) -> Tensor:
        """``[*slots.shape, head_dim]``: in the stored type, or float32 from fp8."""
        return self._read(layer_id, slots)


def _own_indexers(layers: Sequence[LayerSpec]) -> dict[int, IndexerDims]:
    """The layers that compute an index, by id."""
    own = [layer for layer in layers if layer.indexer is not None and layer.indexer.shares is None]
    by_id = distinct_layers(own, IndexKeyPool.kind)
    return {layer_id: layer.indexer for layer_id, layer in by_id.items() if layer.indexer is not None}


def _check_type(dtype: DType) -> None:
    if not dtype.is_element:
        raise PoolError(f"index keys cannot be kept as {dtype}, which is a latent row of MLA; give another type")


INDEX_KEYS: Final[CacheKey[IndexKeyPool]] = CacheKey("index keys", IndexKeyPool, "select")
"""Finds the index keys in ``KVPools``."""
