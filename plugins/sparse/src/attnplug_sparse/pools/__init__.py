"""Caches of sparse and compressed layers: index keys, entries, and latent rows with scales of their own."""

from __future__ import annotations

from attnplug_sparse.pools.compressed import COMPRESSED, CompressedPool, EntryCache, EntryShape, compressed_page_bytes
from attnplug_sparse.pools.index_keys import INDEX_KEYS, IndexKeyPool
from attnplug_sparse.pools.scaled_rows import latent_format, latent_row_nbytes

__all__ = [
    "COMPRESSED",
    "INDEX_KEYS",
    "CompressedPool",
    "EntryCache",
    "EntryShape",
    "IndexKeyPool",
    "compressed_page_bytes",
    "latent_format",
    "latent_row_nbytes",
]
