"""Caches of sparse and compressed layers: index keys and entries."""

from __future__ import annotations

from attnplug_sparse.pools.compressed import COMPRESSED, CompressedPool, EntryCache, EntryShape, compressed_page_bytes
from attnplug_sparse.pools.index_keys import INDEX_KEYS, IndexKeyPool, index_format

__all__ = [
    "COMPRESSED",
    "INDEX_KEYS",
    "CompressedPool",
    "EntryCache",
    "EntryShape",
    "IndexKeyPool",
    "compressed_page_bytes",
    "index_format",
]
