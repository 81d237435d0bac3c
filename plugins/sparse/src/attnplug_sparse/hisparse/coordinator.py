"""The coordinator: what a backend asks for rows, and an engine to give them back."""

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
    """What was read and moved since the start, in all layers."""

    read: int
    """Rows of earlier steps that decoding requests attended to."""
    loaded: int
    """Those of them that had to be copied to the device. A row that several queries of a request need counts once."""
    staged: int
    """Rows that were copied to the device for prefills."""
    written: int
    """New rows that were copied to the host."""
    row_nbytes: int

    @property
    def hit_rate(self) -> float | None:
        return 1 - self.loaded / self.read if self.read else None

    @property
    def moved_nbytes(self) -> int:
        """Bytes that were copied, in both directions."""
        return (self.loaded + self.staged + self.written) * self.row_nbytes

    def __str__(self) -> str:
        hits = "no rows read" if self.hit_rate is None else f"{self.hit_rate:.1%} of {self.read} rows hit"
        to_device, to_host = (rows * self.row_nbytes / 2**20 for rows in (self.loaded + self.staged, self.written))
        return f"{hits}, {to_device:.1f} MiB to the device, {to_host:.1f} MiB to the host"


class _Swap(Protocol):
    def swap_in(self, number: int, positions: Tensor, new_slots: LogicalSlots, geometry: Geometry) -> DeviceSlots: ...


class HiSparse:
    """Keeps all rows in host memory, and brings those that sparse layers choose to the device (A10).

    Each new row is written to the host when it is written to the device, so a row is on the host from its first step
    on. A request may therefore lose its rows on the device at any time, and nothing is ever waited for. Host pages are
    those of the page table. Each running request has a hot buffer in every layer, found by its row of the slot table
    (``Geometry.table_rows``), and filled by what it chooses: what was not used for longest makes room.

    Requests with more than ``HotSizes.nodes`` new rows are prefilled: all that their new rows may choose is copied to
    the device, for one layer at a time. All work is on one stream.
    """

    def __init__(self, pool: HotPool, host: HostRows) -> None:
        self.pool, self.host = pool, host
        device = pool.cells.device
        self.tables = HotTables(len(pool.layer_ids), pool.sizes, device)
        self._new = torch.arange(pool.sizes.max_tokens, device=device)
        self._swap: _Swap = self._by_kernels() if device.type == "cuda" else TorchSwap(pool, host, self.tables)

    def _by_kernels(self) -> _Swap:
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
        """Bytes on the device beside the pool: the tables."""
        return self.tables.nbytes

    @property
    def host_nbytes(self) -> int:
        return self.host.nbytes

    def host_pages(self, layer_id: int) -> Tensor:
        """``[pages, page_size, 1, row_dim]`` in host memory, in the stored type: all of a layer's rows."""
        stored, size = self.pool.rows(layer_id), self.host.page_size
        cells = self.host.cells[self.pool.number(layer_id)].view(stored.dtype)
        return cells.view(self.host.num_pages, size, *stored.shape[2:])

    def release(self, row: int) -> None:
        """Empty the hot buffers of the request in this row of the slot table; its pages are the table's to free."""
        self.tables.release(row)

    def hot_rows(self, row: int) -> int:
        """How many rows the request in this row of the slot table has on the device, in all layers. Waits."""
        return int((self.tables.held[:, row] >= 0).sum())

    def statistics(self) -> HotStatistics:
        """Waits for the device."""
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
                f"layer {layer_id}: a batch has no table_rows, by which HiSparse finds the requests' hot buffers; give "
                "Geometry each request's row of the slot table"
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
                f"layer {layer_id}: a request may choose {needed} rows, and its hot buffer has {sizes.buffer_size}"
            )
        self.pool.write_new(layer_id, DeviceSlots(self._new[:tokens]), rows)
        slots = self._swap.swap_in(self.pool.number(layer_id), positions, LogicalSlots(new_slots), geometry)
        return SelectedSlots(slots.slots)
