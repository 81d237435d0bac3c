"""The HiSparse coordinator."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from attnplug import BackendError, Geometry
from attnplug.sparse import SelectedPositions, SelectedSlots
from attnplug_sparse.hisparse.addresses import DeviceSlots, LogicalSlots
from attnplug_sparse.hisparse.host_rows import HostRows
from attnplug_sparse.hisparse.hot_pool import HotPool
from attnplug_sparse.hisparse.tables import HotTables
from attnplug_sparse.hisparse.torch_swap import TorchSwap


@dataclass(frozen=True, slots=True)
class HotStatistics:
    """Counts of rows and entries of all layers since the start or the last reset."""

    read: int
    """Rows of earlier steps that decoding requests selected."""
    loaded: int
    """Rows among them that were copied to the device. A row that several queries of a request select counts once."""
    staged: int
    """Rows copied to the device for prefills."""
    written: int
    """New rows copied to the host."""
    to_device_nbytes: int
    to_host_nbytes: int

    def __add__(self, other: HotStatistics) -> HotStatistics:
        return HotStatistics(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    @property
    def hit_rate(self) -> float | None:
        return 1 - self.loaded / self.read if self.read else None

    def __str__(self) -> str:
        hits = "no rows read" if self.hit_rate is None else f"{self.hit_rate:.1%} of {self.read} rows hit"
        to_device, to_host = self.to_device_nbytes / 2**20, self.to_host_nbytes / 2**20
        return f"{hits}, {to_device:.1f} MiB to the device, {to_host:.1f} MiB to the host"


class _Swap(Protocol):
    def swap_in(self, number: int, positions: Tensor, new_slots: LogicalSlots, geometry: Geometry) -> DeviceSlots: ...


class HiSparse:
    """Coordinator that keeps all latent rows in host memory and loads selected rows to the device (A10).

    Writes go through: each new row is written to device and host in the same step. So a request may lose its rows on
    the device at any time, and nothing has to be written back. Host pages are those of the page table. Each running
    request has a hot buffer per layer, an LRU cache of selected rows, found by its row of the slot table
    (``Geometry.table_rows``).

    Requests with more than ``HotSizes.nodes`` new rows are prefills: all rows that they may select are copied to the
    device, one layer at a time. All work is on one stream.

    A model with compressed layers has ``entries``, a second set of buffers for those that an index selects. An entry is
    written when its last token is. Entries of a step in progress are in no hot buffer, because drafts among their
    tokens may be rejected.
    """

    def __init__(self, pool: HotPool, host: HostRows, entries: HiSparse | None = None) -> None:
        self.pool, self.host, self.entries = pool, host, entries
        device = pool.cells.device
        self.tables = HotTables(len(pool.layer_ids), pool.sizes, device)
        self._new = torch.arange(pool.sizes.max_tokens, device=device)
        self._swap: _Swap = self._triton_swap() if device.type == "cuda" else TorchSwap(pool, host, self.tables)

    def _triton_swap(self) -> _Swap:
        try:
            from attnplug_sparse.hisparse.triton_swap import TritonSwap
        except ImportError as error:
            raise BackendError(f"HiSparse on a GPU needs Triton, which cannot be imported: {error}") from error
        swap: _Swap = TritonSwap(self.pool, self.host, self.tables)
        return swap

    @property
    def name(self) -> str:
        return "hisparse"

    @property
    def device_nbytes(self) -> int:
        """Bytes of the tables on the device, without the pools."""
        return self.tables.nbytes + (0 if self.entries is None else self.entries.device_nbytes)

    @property
    def host_nbytes(self) -> int:
        return self.host.nbytes + (0 if self.entries is None else self.entries.host_nbytes)

    def host_pages(self, layer_id: int) -> Tensor:
        """All rows of a layer, ``[pages, rows per page, 1, row_dim]`` in host memory, in the stored type."""
        stored, size = self.pool.rows(layer_id), self.host.page_rows
        cells = self.host.cells[self.pool.number(layer_id)].view(stored.dtype)
        return cells.view(self.host.num_pages, size, *stored.shape[2:])

    def release(self, row: int) -> None:
        """Empty the hot buffers of the request in this row of the slot table. Its pages are freed by the table."""
        self.tables.release(row)
        if self.entries is not None:
            self.entries.release(row)

    def hot_rows(self, row: int) -> int:
        """Return the number of rows and entries on the device for a row of the slot table, in all layers. Synchronises
        with the device."""
        entries = 0 if self.entries is None else self.entries.hot_rows(row)
        return int((self.tables.held[:, row] >= 0).sum()) + entries

    def statistics(self) -> HotStatistics:
        """Return the counts. Synchronises with the device."""
        read, loaded, staged, written = self.tables.counters.tolist()
        row_nbytes = self.pool.cells.shape[1]
        own = HotStatistics(read, loaded, staged, written, (loaded + staged) * row_nbytes, written * row_nbytes)
        return own if self.entries is None else own + self.entries.statistics()

    def reset_statistics(self) -> None:
        self.tables.counters.zero_()
        if self.entries is not None:
            self.entries.reset_statistics()

    def load_selected(
        self, layer_id: int, rows: Tensor, new_slots: Tensor, selected: SelectedPositions, geometry: Geometry
    ) -> SelectedSlots:
        """See ``Coordinator.load_selected``. Slots are int32."""
        tokens, sizes = rows.shape[0], self.pool.sizes
        positions = selected.positions
        if geometry.table_rows is None:
            raise BackendError(
                f"layer {layer_id}: the batch has no table_rows, by which HiSparse finds hot buffers; give Geometry "
                "each request's row of the slot table"
            )
        if max(tokens, geometry.requests) > sizes.max_tokens or geometry.max_seq_len > sizes.max_context:
            raise BackendError(
                f"a batch of {geometry.requests} requests with {tokens} new rows, and with up to "
                f"{geometry.max_seq_len} rows each, is more than HiSparse was built for: {sizes.max_tokens} and "
                f"{sizes.max_context}"
            )
        needed = positions.shape[1]
        if sizes.window is None:  # rows of one window together are no more than those of the first
            needed *= min(geometry.max_new, sizes.nodes)
        if needed > sizes.buffer_size:
            raise BackendError(
                f"layer {layer_id}: a request may select {needed} rows, and its hot buffer has {sizes.buffer_size}"
            )
        self.pool.write_new(layer_id, DeviceSlots(self._new[:tokens]), rows)
        slots = self._swap.swap_in(self.pool.number(layer_id), positions, LogicalSlots(new_slots), geometry)
        return SelectedSlots(slots.slots)

    def load_entries(
        self, layer_id: int, entries: Tensor, new_slots: Tensor, selected: SelectedPositions, geometry: Geometry
    ) -> SelectedSlots:
        """See ``Coordinator.load_entries``. Slots are int32."""
        if self.entries is None:
            raise BackendError(f"layer {layer_id}: HiSparse was built without a pool of entries; give it one")
        return self.entries.load_selected(layer_id, entries, new_slots, selected, geometry)
