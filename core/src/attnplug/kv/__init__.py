"""The cache: page ids and their references, layouts as data, slot tables, and the pools that hold the memory."""

from __future__ import annotations

from attnplug.kv.allocator import BadPages, OutOfPages, PageAllocator, PageCopy
from attnplug.kv.buffer import PagedBuffer, torch_dtype
from attnplug.kv.caches import CacheKey, KVPools, PagedCache
from attnplug.kv.layout import LayoutName, PageLayout, split_table
from attnplug.kv.pools import LinearStatePool, MHAPool, MLAPool
from attnplug.kv.table import SlotTable

__all__ = [
    "BadPages",
    "CacheKey",
    "KVPools",
    "LayoutName",
    "LinearStatePool",
    "MHAPool",
    "MLAPool",
    "OutOfPages",
    "PageAllocator",
    "PageCopy",
    "PageLayout",
    "PagedBuffer",
    "PagedCache",
    "SlotTable",
    "split_table",
    "torch_dtype",
]
