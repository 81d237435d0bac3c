"""Device tables that map positions to rows of the hot buffers, at fixed addresses."""

from __future__ import annotations

import torch
from torch import Tensor

from attnplug_sparse.hisparse.sizes import HotSizes


class HotTables:
    """Tables of all layers and requests. A column is a row of one hot buffer.

    ``held`` ``[layers, requests, columns]`` int32 is the position in a column, -1 for none. A position that is not in
    it is not in the buffer. ``hints`` ``[layers, requests, positions]`` int16 is the column of a position, valid only
    if ``held`` agrees. So evicting a position clears nothing, and releasing a request clears ``held`` only. ``order``
    ``[layers, requests, columns]`` int16 lists the columns, least recently used first.
    """

    def __init__(self, layers: int, sizes: HotSizes, device: torch.device | str) -> None:
        buffers, columns = (layers, sizes.max_requests), sizes.buffer_size
        self.held: Tensor = torch.full((*buffers, columns), -1, dtype=torch.int32, device=device)
        self.hints: Tensor = torch.zeros(*buffers, sizes.max_positions, dtype=torch.int16, device=device)
        numbers = torch.arange(columns, dtype=torch.int16, device=device)
        self.order: Tensor = numbers.expand(*buffers, columns).contiguous()
        self.counters: Tensor = torch.zeros(4, dtype=torch.int64, device=device)
        """Counts of rows: read from earlier steps by decodes, loaded for these, staged for prefills, written to the
        host."""

    @property
    def nbytes(self) -> int:
        tensors = (self.held, self.hints, self.order, self.counters)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def release(self, row: int) -> None:
        """Empty a request's buffers in all layers by one operation, without synchronising."""
        self.held[:, row] = -1
