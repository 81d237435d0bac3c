"""Protocol for coordinators, which keep part of the KV cache outside the pools."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from attnplug.contract.geometry import Geometry
from attnplug.contract.sparse import SelectedPositions, SelectedSlots


@runtime_checkable
class Coordinator(Protocol):
    """Keeps latent rows outside the pools, e.g. in host memory, and loads those that attention reads (A10).

    It is built after the pools and before the backends. A backend captures it in its constructor; it is not part of a
    batch.
    """

    @property
    def name(self) -> str:
        """Name in ``Capabilities.coordinators``, messages and reports."""
        ...

    @property
    def device_nbytes(self) -> int:
        """Bytes held on the device, not counting the pools."""
        ...

    @property
    def host_nbytes(self) -> int:
        """Bytes held in host memory."""
        ...

    def load_selected(
        self, layer_id: int, rows: Tensor, new_slots: Tensor, selected: SelectedPositions, geometry: Geometry
    ) -> SelectedSlots:
        """Write a layer's new rows, and load the selected rows into the MLA pool.

        ``rows`` ``[tokens, row_dim]`` or ``[tokens, 1, row_dim]`` are the new rows of the batch with this geometry, and
        ``new_slots`` ``[tokens]`` their slots by the page table, -1 for padding. Returns the pool's slots ``[tokens,
        width]`` of the selected rows, -1 where ``selected`` has -1. They are valid until the next call. Does not
        synchronise with the host and can be captured in a CUDA graph.
        """
        ...

    def release(self, row: int) -> None:
        """Free everything kept for the request in this row of the slot table, which has finished or was aborted.

        Allowed in every state of a request. Waits for copies of its rows that are in flight. Does nothing for a row
        without any.
        """
        ...
