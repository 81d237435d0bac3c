"""HiSparse: a coordinator that keeps latent rows and entries in host memory and the hot ones on the device (A10)."""

from __future__ import annotations

from attnplug_sparse.hisparse.addresses import DeviceSlots, HostSlots, LogicalSlots, host_slots
from attnplug_sparse.hisparse.coordinator import HiSparse, HotStatistics
from attnplug_sparse.hisparse.host_rows import HOST_ENTRIES, HOST_ROWS, HostRows
from attnplug_sparse.hisparse.hot_pool import HOT_ENTRIES, HotPool
from attnplug_sparse.hisparse.sizes import HotLayers, HotSizes, rows_and_entries

__all__ = [
    "HOST_ENTRIES",
    "HOST_ROWS",
    "HOT_ENTRIES",
    "DeviceSlots",
    "HiSparse",
    "HostRows",
    "HostSlots",
    "HotLayers",
    "HotPool",
    "HotSizes",
    "HotStatistics",
    "LogicalSlots",
    "host_slots",
    "rows_and_entries",
]
