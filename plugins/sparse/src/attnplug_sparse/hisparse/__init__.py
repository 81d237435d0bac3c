"""HiSparse: a coordinator that keeps all latent rows in host memory and the hot ones on the device (A10)."""

from __future__ import annotations

from attnplug_sparse.hisparse.addresses import DeviceSlots, HostSlots, LogicalSlots, host_slots
from attnplug_sparse.hisparse.coordinator import HiSparse, HotStatistics
from attnplug_sparse.hisparse.host_rows import HOST_ROWS, HostRows
from attnplug_sparse.hisparse.hot_pool import HotPool
from attnplug_sparse.hisparse.sizes import HotSizes

__all__ = [
    "HOST_ROWS",
    "DeviceSlots",
    "HiSparse",
    "HostRows",
    "HostSlots",
    "HotPool",
    "HotSizes",
    "HotStatistics",
    "LogicalSlots",
    "host_slots",
]
