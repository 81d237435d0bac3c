"""The HiSparse coordinator."""

from __future__ import annotations

from dataclasses import dataclass
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
    """Row counts of all layers since the start or the last reset."""

    read: int
    """Rows of earlier steps that decoding requests selected."""
    loaded: int
    """Rows among them that were copied to the device. A row that several queries of a request select counts once."""
    staged: int
    """Rows copied to the device for prefills."""
    written: int
    """New rows copied to the host."""
    row_nbytes: int

    @property
    def hit_rate(self) -> float | None:
        return 1 - self.loaded / self.read if self.read else None

    @property
    def moved_nbytes(self) -> int:
        """Bytes copied, in both directions."""
        return (self.loaded + self.staged + self.written) * self.row_nbytes

    def __str__(self) -> str:
        hits = "no rows read" if self.hit_rate is None else f"{self.hit_rate:.1%} of {self.read} rows hit"
        to_device, to_host = (rows * self.row_nbytes / 2**20 for rows in (self.loaded + self.staged, self.written))
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
    """

    def __init__(self, pool: HotPool, host: HostRows) -> None:
        self.pool, self.host = pool, host
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
        """Bytes of the tables on the device, without the pool."""
        return self.tables.nbytes

    @property
    def host_nbytes(self) -> int:
        return self.host.nbytes

    def host_pages(self, layer_id: int) -> Tensor:
        """All rows of a layer, ``[pages, page_size, 1, row_dim]`` in host memory, in the stored type."""
        stored, size = self.pool.rows(layer_id), self.host.page_size
        cells = self.host.cells[self.pool.number(layer_id)].view(stored.dtype)
        return cells.view(self.host.num_pages, size, *stored.shape[2:])

    def release(self, row: int) -> None:
        """Empty the hot buffers of the request in this row of the slot table. Its pages are freed by the table."""
        self.tables.release(row)

    def hot_rows(self, row: int) -> int:
        """Return the number of rows on the device for a row of the slot table, in all layers. Synchronises."""
        return int((self.tables.held[:, row] >= 0).sum())

    def statistics(self) -> HotStatistics:
        """Return the counts. Synchronises with the device."""
        read, loaded, staged, written = self.tables.counters.tolist()
        return HotStatistics(read, loaded, staged, written, self.pool.cells.shape[1])

    def reset_statistics(self) -> None:
        self.tables.counters.zero_()

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
        needed = positions.shape[1] * min(geometry.max_new, sizes.nodes)
        if needed > sizes.buffer_size:
            raise BackendError(
                f"layer {layer_id}: a request may select {needed} rows, and its hot buffer has {sizes.buffer_size}"
            )
        self.pool.write_new(layer_id, DeviceSlots(self._new[:tokens]), rows)
        slots = self._swap.swap_in(self.pool.number(layer_id), positions, LogicalSlots(new_slots), geometry)
        return SelectedSlots(slots.slots)
