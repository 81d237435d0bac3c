"""Caches that sparse and compressed layers have besides their latent rows, addressed by the same page table."""

from __future__ import annotations

from attnplug_sparse.pools.compressed import COMPRESSED, CompressedPool, EntryCache, EntryShape, compressed_page_bytes
from attnplug_sparse.pools.index_keys import INDEX_KEYS, IndexKeyPool

__all__ = [
    "COMPRESSED",
    "INDEX_KEYS",
    "CompressedPool",
    "EntryCache",
    "EntryShape",
    "IndexKeyPool",
    "compressed_page_bytes",
]
