"""Pool of latent rows, or of entries, on the device: one block of memory, shared by all layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from attnplug import KVFormat, LayerSpec, MLAPool, PoolError
from attnplug.kernels import CacheKey, PageCopy
from attnplug_sparse.hisparse.addresses import DeviceSlots
from attnplug_sparse.hisparse.sizes import HotSizes


class HotPool(MLAPool):
    """Latent rows by ``DeviceSlots``. All layers share one memory, and slots tell their rows apart:

    - ``0 …``: new rows of a step in batch order, of the running layer. A new entry is in the row of its last token.
    - ``staging …``: one row for every row of the host's pages, of the running layer. A prefill reads its prefix there.
    - ``hot …``: hot buffers, ``[layers, requests, buffer_size]``.

    So new and staged rows take the memory of one layer only. Pages of this pool are not those of the page table.
    """

    shared = True

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        sizes: HotSizes,
        *,
        num_pages: int,
        page_size: int,
        dtype: KVFormat | str,
        device: torch.device | str,
        scales: Mapping[int, float] | None = None,
    ) -> None:
        """``num_pages`` is the number of pages of the page table, ``scales`` are as in ``MLAPool``."""
        sizes.check(layers)
        self.sizes = sizes
        self.staging = sizes.max_tokens
        self.hot = self.staging + num_pages * (page_size // sizes.ratio)
        rows = self.hot + len(layers) * sizes.max_requests * sizes.buffer_size
        if rows > torch.iinfo(torch.int32).max:
            raise PoolError(
                f"{rows} rows on the device are more than int32 can count; lower `max_batch`, `num_pages`, or the "
                "device_buffer_size of `hisparse_config`",
                settings=["max_batch", "num_pages", "hisparse_config"],
            )
        num_pages = -(-rows // page_size)
        super().__init__(layers, num_pages=num_pages, page_size=page_size, dtype=dtype, device=device, scales=scales)
        self._numbers = {layer.layer_id: number for number, layer in enumerate(layers)}
        self.cells: Tensor = self.rows(layers[0].layer_id).view(torch.uint8).flatten(0, 2)
        """The whole memory as bytes, ``[rows, row_bytes]`` uint8."""

    def number(self, layer_id: int) -> int:
        """Return the index of a layer among the pool's layers."""
        try:
            return self._numbers[layer_id]
        except KeyError:
            raise PoolError(f"layer {layer_id} has no hot rows; layers {sorted(self._numbers)} have") from None

    def first_of(self, number: int) -> int:
        """Return the first slot of a layer's hot buffers; ``number`` is its index."""
        return self.hot + number * self.sizes.max_requests * self.sizes.buffer_size

    def write_new(self, layer_id: int, slots: DeviceSlots, rows: Tensor) -> None:
        """Store a step's new rows of a layer, valid until the next layer's are written."""
        super().write(layer_id, slots.slots, rows)

    def write(self, layer_id: int, slots: Tensor, rows: Tensor) -> None:
        """Refused: a backend that writes by slots of the page table would overwrite other rows."""
        raise PoolError(
            f"rows of layer {layer_id} cannot be written by slots of the page table, which HiSparse keeps on the host; "
            "the backend has to write through its coordinator, as SparseAttention does"
        )

    def by_slot(self, layer_id: int) -> None:
        """Return ``None``: slots of the page table are not slots of this pool."""

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Do nothing: rows here belong to positions of requests, not to pages."""

    def move_rows(self, sources: Tensor, targets: Tensor) -> None:
        """Do nothing: only rows of the last step are moved, which are in no hot buffer yet."""


HOT_ENTRIES: Final[CacheKey[HotPool]] = CacheKey("hot entries", HotPool)
"""Key in ``KVPools`` of the entries on the device, if all of them are in host memory."""
