"""The latent rows that are on the device: one block of memory in which all layers lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnplug.declare.errors import PoolError
from attnplug.declare.model import LayerSpec
from attnplug.declare.problem import DType
from attnplug.hisparse.addresses import DeviceSlots
from attnplug.hisparse.sizes import HotSizes
from attnplug.kv.page_copy import PageCopy
from attnplug.kv.pools import MLAPool


class HotPool(MLAPool):
    """Latent rows by ``DeviceSlots``. Every layer has the same memory as its cache, and slots tell layers apart:

    - ``0 …``: the new rows of a step, in the order of the batch; of the layer that runs.
    - ``staging …``: a place for every slot of the page table; of the layer that runs. A prefill reads its prefix there.
    - ``hot …``: hot buffers, ``[layers, requests, buffer_size]``.

    So new and staged rows take the memory of one layer. Pages of this pool are no pages of the page table.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        sizes: HotSizes,
        *,
        num_pages: int,
        page_size: int,
        dtype: DType,
        device: torch.device | str,
    ) -> None:
        """``num_pages`` are those of the page table."""
        sizes.check(layers)
        self.sizes = sizes
        self.staging = sizes.max_tokens
        self.hot = self.staging + num_pages * page_size
        rows = self.hot + len(layers) * sizes.max_requests * sizes.buffer_size
        if rows > torch.iinfo(torch.int32).max:
            raise PoolError(
                f"{rows} rows on the device are more than int32 can count; lower `max_batch`, `num_pages`, or the "
                "device_buffer_size of `hisparse_config`",
                settings=["max_batch", "num_pages", "hisparse_config"],
            )
        first = layers[:1]
        super().__init__(first, num_pages=-(-rows // page_size), page_size=page_size, dtype=dtype, device=device)
        self._numbers = {layer.layer_id: number for number, layer in enumerate(layers)}
        self._hold(dict.fromkeys(self._numbers, self._layers[first[0].layer_id]), dtype)
        self.cells: Tensor = self.rows(first[0].layer_id).view(torch.uint8).flatten(0, 2)
        """``[rows, row bytes]`` uint8: all of it, as stored."""

    @property
    def nbytes(self) -> int:
        return self.cells.numel()

    def number(self, layer_id: int) -> int:
        """Which of the pool's layers it is."""
        try:
            return self._numbers[layer_id]
        except KeyError:
            raise PoolError(f"layer {layer_id} has no hot rows; layers {sorted(self._numbers)} have") from None

    def first_of(self, number: int) -> int:
        """The slot at which the hot buffers of a layer begin."""
        return self.hot + number * self.sizes.max_requests * self.sizes.buffer_size

    def write_new(self, layer_id: int, slots: DeviceSlots, rows: Tensor) -> None:
        """Store a step's new rows. They are the layer's until the next layer's are written."""
        super().write(layer_id, slots.slots, rows)

    def write(self, layer_id: int, slots: Tensor, rows: Tensor) -> None:
        """Refused: a backend that writes by the page table's slots would write to other rows."""
        raise PoolError(
            f"rows of layer {layer_id} were to be written by slots of the page table, and HiSparse keeps those on the "
            "host; the backend has to write through its coordinator, as SparseAttention does"
        )

    def by_slot(self, layer_id: int) -> None:
        """Nothing: no slot of the page table is a slot of this pool."""

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Nothing: rows here belong to positions of requests, and not to pages."""

    def move_rows(self, sources: Tensor, targets: Tensor) -> None:
        """Nothing: only rows of the last step are moved, and these are in no hot buffer yet."""
