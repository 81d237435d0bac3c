"""Which positions lie in which rows of the hot buffers: tables on the device, at fixed addresses."""

from __future__ import annotations

import torch
from torch import Tensor

from attnplug_sparse.hisparse.sizes import HotSizes


class HotTables:
    """Tables of all layers and requests. A column is a row of one hot buffer.

    ``held`` ``[layers, requests, columns]`` int32 is the position that lies in a column, -1 for none: what is not there
    is not in the buffer. ``hints`` ``[layers, requests, positions]`` int16 is the column in which a position lies, if
    ``held`` agrees. So nothing is cleared when a position leaves, and a request that ends clears ``held`` alone.
    ``order`` ``[layers, requests, columns]`` int16 has all columns, the least recently used first.
    """

    def __init__(self, layers: int, sizes: HotSizes, device: torch.device | str) -> None:
        buffers, columns = (layers, sizes.max_requests), sizes.buffer_size
        self.held: Tensor = torch.full((*buffers, columns), -1, dtype=torch.int32, device=device)
        self.hints: Tensor = torch.zeros(*buffers, sizes.max_context, dtype=torch.int16, device=device)
        numbers = torch.arange(columns, dtype=torch.int16, device=device)
        self.order: Tensor = numbers.expand(*buffers, columns).contiguous()
        self.counters: Tensor = torch.zeros(4, dtype=torch.int64, device=device)
        """Rows that attention read of earlier steps, those of them that were copied for it, rows that were copied for
        prefills, and rows that were written to the host."""

    @property
    def nbytes(self) -> int:
        tensors = (self.held, self.hints, self.order, self.counters)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def release(self, row: int) -> None:
        """Empty a request's buffers in all layers. Asks for one operation and waits for nothing."""
        self.held[:, row] = -1
