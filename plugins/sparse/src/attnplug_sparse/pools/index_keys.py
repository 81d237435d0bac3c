"""Cache of index keys, by which sparse layers select the rows they attend to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from attnplug import DType, LayerSpec, PoolError
from attnplug.kernels import CacheKey, RowFormat, RowPool, distinct_layers
from attnplug.sparse import IndexerDims
from attnplug_sparse.pools.scaled_rows import ScaledRows

_SCALE = torch.float32.itemsize


class IndexKeyPool(RowPool):
    """Index keys of all layers among ``layers`` that have an index of their own: per layer ``[pages, page_size,
    head_dim]``.

    Pages and slots are those of the latent rows: one page table addresses both. ``dtype`` is the model's own, or fp8.
    In fp8 a page of bytes ``[page_size, head_dim + 4]`` holds all its keys first, and then a float32 scale for each
    key, as DeepGEMM's kernels read it.
    """

    kind = "index key"
    contents = ("index keys",)

    def __init__(
        self, layers: Sequence[LayerSpec], *, num_pages: int, page_size: int, dtype: DType, device: torch.device | str
    ) -> None:
        super().__init__(_formats(layers, dtype), num_pages=num_pages, page_size=page_size, dtype=dtype, device=device)

    @classmethod
    def over(
        cls, layers: Sequence[LayerSpec], tensors: Mapping[int, Tensor], layout: str, *, page_size: int, dtype: DType
    ) -> IndexKeyPool:
        """Pool over a host's tensors by layer id, without a copy; ``layout`` is as in ``MLAPool.over``.

        In fp8 the tensors are bytes, ``dim`` is ``head_dim + 4``, and each page is contiguous.
        """
        return cls._over_host(_formats(layers, dtype), tensors, layout, page_size, dtype)

    @staticmethod
    def key_nbytes(dims: IndexerDims, dtype: DType) -> int:
        """Bytes per key, its scale included."""
        form = _format(dims, dtype)
        return form.width * form.stored.itemsize

    def keys(self, layer_id: int) -> Tensor:
        """``[pages, page_size, head_dim]`` as stored: the cache itself. In fp8 bytes ``[…, head_dim + 4]``, which are
        keys and scales by whole pages."""
        return self.rows(layer_id).squeeze(2)

    def read_keys(self, layer_id: int, slots: Tensor) -> Tensor:
        """``[*slots.shape, head_dim]``: in the stored type, or float32 from fp8."""
        return self.read_rows(layer_id, slots)


def _formats(layers: Sequence[LayerSpec], dtype: DType) -> dict[int, RowFormat]:
    """Formats of the keys of layers that have an index of their own, by layer id."""
    if not dtype.is_element:
        raise PoolError(f"index keys cannot be kept as {dtype}, which is a latent row of MLA; give another type")
    own = [layer for layer in layers if layer.indexer is not None and layer.indexer.shares is None]
    by_id = distinct_layers(own, IndexKeyPool.kind)
    return {layer_id: _format(layer.indexer, dtype) for layer_id, layer in by_id.items() if layer.indexer is not None}


def _format(dims: IndexerDims, dtype: DType) -> RowFormat:
    if dtype is DType.FLOAT8_E4M3:
        return RowFormat(dims.head_dim + _SCALE, torch.uint8, partial(_scaled_keys, head_dim=dims.head_dim))
    return RowFormat.plain(dims.head_dim, dtype)


def _scaled_keys(pages: Tensor, head_dim: int) -> ScaledRows:
    """Index keys in fp8 over bytes ``[pages, page_size, 1, head_dim + 4]``: all keys of a page, then all its scales."""
    count, page_size, _, width = pages.shape
    if head_dim % _SCALE:
        raise PoolError(f"index keys of {head_dim} numbers cannot be kept in fp8; give a multiple of {_SCALE}")
    if pages.stride()[1:] != (width, width, 1) and page_size > 1:
        raise PoolError(f"a page of index keys in fp8 must be contiguous, and strides are {pages.stride()}")
    whole = pages.as_strided((count, page_size * width), (pages.stride(0), 1))
    values = whole[:, : page_size * head_dim].view(torch.float8_e4m3fn).unflatten(1, (page_size, 1, head_dim))
    scales = whole[:, page_size * head_dim :].view(torch.float32).unflatten(1, (page_size, 1, 1))
    return ScaledRows(pages, values, scales)


INDEX_KEYS: Final[CacheKey[IndexKeyPool]] = CacheKey("index keys", IndexKeyPool, "select")
"""Key of the index keys in ``KVPools``."""
