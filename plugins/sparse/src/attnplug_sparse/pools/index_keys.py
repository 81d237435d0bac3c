"""Cache of index keys, by which sparse layers select the rows they attend to."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from attnplug import DType, KVFormat, LayerSpec, PoolError, RowPart
from attnplug.kernels import CacheKey, CodedRows, RowFormat, RowPool, as_format
from attnplug.sparse import IndexerDims
from attnplug_sparse.pools.scaled_rows import decode as decode
from attnplug_sparse.pools.scaled_rows import encode_groups

_SCALE = torch.float32.itemsize
_FLOAT8 = KVFormat(
    DType.FLOAT8_E4M3.value,
    "e4m3 keys with one float32 scale each, by whole pages, as DeepGEMM's kernels read them",
    (RowPart("float8_e4m3fn"), RowPart("float32", per=None)),
    0.05,
    codec=__name__,
    holds=frozenset({"index"}),
    kernels={"cuda": "attnplug_sparse.pools.scaled_rows:row_writer"},
)


def encode(rows: Tensor) -> tuple[Tensor, Tensor]:
    return encode_groups(rows, rows.shape[-1])


def index_format(dtype: KVFormat | str) -> KVFormat:
    """Return the format of index keys in ``dtype``: in fp8 they have a scale each, unlike rows of layers.

    Raises PoolError for a format that holds no index keys.
    """
    format = _FLOAT8 if str(dtype) == _FLOAT8.name else as_format(dtype)
    if "index" not in format.holds:
        raise PoolError(f"index keys cannot be kept as {format.name}, which holds {', '.join(sorted(format.holds))}")
    return format


class IndexKeyPool(RowPool):
    """Index keys of all layers among ``layers`` that have an index of their own: per layer ``[pages, page_size,
    head_dim]``.

    Pages and slots are those of the latent rows: one page table addresses both. ``dtype`` is a format that holds index
    keys, or the name of one that core declares.
    In fp8 a page of bytes ``[page_size, head_dim + 4]`` holds all its keys first, and then a float32 scale for each
    key, as DeepGEMM's kernels read it. A host's tensors (``over``) are then bytes, ``dim`` is ``head_dim + 4``, and
    each page is contiguous.
    """

    kind = "index key"
    contents = ("index keys",)

    @classmethod
    def serves(cls, layer: LayerSpec) -> bool:
        return layer.indexer is not None and layer.indexer.shares is None

    @classmethod
    def formats(cls, layer: LayerSpec, dtype: KVFormat | str, *scales: float) -> tuple[RowFormat, ...]:
        dims, format, (scale,) = layer.indexer, index_format(dtype), scales
        assert dims is not None
        group = _SCALE if format is _FLOAT8 else format.group
        if dims.head_dim % group:
            raise PoolError(
                f"index keys of {dims.head_dim} numbers cannot be kept as {format}; give a multiple of {group}"
            )
        form = RowFormat.of(format, dims.head_dim, scale=scale)
        return (replace(form, wrap=partial(_by_page, width=dims.head_dim)) if format is _FLOAT8 else form,)

    @staticmethod
    def key_nbytes(dims: IndexerDims, dtype: KVFormat | str) -> int:
        """Bytes per key, its scale included."""
        return index_format(dtype).row_nbytes(dims.head_dim)

    def keys(self, layer_id: int) -> Tensor:
        """``[pages, page_size, head_dim]`` as stored: the cache itself. In fp8 bytes ``[…, head_dim + 4]``, which are
        keys and scales by whole pages."""
        return self.rows(layer_id).squeeze(2)

    def read_keys(self, layer_id: int, slots: Tensor) -> Tensor:
        """``[*slots.shape, head_dim]``: in the stored type, or as decoded."""
        return self.read_rows(layer_id, slots)


def _by_page(pages: Tensor, width: int) -> CodedRows:
    """Index keys over bytes ``[pages, page_size, 1, width + 4]``: all keys of a page, then all its scales."""
    count, size, _, nbytes = pages.shape
    if pages.stride()[1:] != (nbytes, nbytes, 1) and size > 1:
        raise PoolError(f"a page of index keys in fp8 must be contiguous, and strides are {pages.stride()}")
    whole = pages.as_strided((count, size * nbytes), (pages.stride(0), 1))
    values = whole[:, : size * width].view(torch.float8_e4m3fn).unflatten(1, (size, 1, width))
    scales = whole[:, size * width :].view(torch.float32).unflatten(1, (size, 1, 1))
    return CodedRows(pages, _FLOAT8, width, views=(values, scales))


INDEX_KEYS: Final[CacheKey[IndexKeyPool]] = CacheKey("index keys", IndexKeyPool, "select")
"""Key of the index keys in ``KVPools``."""
