"""The cache: page ids and their references, layouts as data, slot tables, and the pools that hold the memory."""

from __future__ import annotations

from attnplug.kv.buffer import PagedBuffer, torch_dtype
from attnplug.kv.caches import CacheKey, KVPools, PagedCache
from attnplug.kv.layout import LayoutName, PageLayout, split_table
from attnplug.kv.page_copy import PageCopy
from attnplug.kv.pools import LinearStatePool, MHAPool, MLAPool

__all__ = [
    "CacheKey",
    "KVPools",
    "LayoutName",
    "LinearStatePool",
    "MHAPool",
    "MLAPool",
    "PageCopy",
    "PageLayout",
    "PagedBuffer",
    "PagedCache",
    "split_table",
    "torch_dtype",
]
