"""Scratch memory of the split-KV kernel: partial results and arrival counters. Shared by contract (A2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import SCRATCH, BackendContext
from attnplug_triton_mha.plugin import COUNTERS


@dataclass(frozen=True, slots=True, eq=False)
class SplitPartials:
    """Partial results of split-KV attention, as flat views of the lane's workspace.

    ``values`` float32 ``[rows * width]`` are sums with weights ``2 ** (logit - top)``. ``weights`` float32
    ``[2 * rows]`` holds ``top`` of all rows, then the sums of their weights. ``counters`` int32 are zero before and
    after each call.
    """

    values: Tensor
    weights: Tensor
    counters: Tensor


class SplitScratch:
    """Allocator of one lane's partial results. It grows with the batch; views held by earlier plans stay valid."""

    def __init__(self, context: BackendContext, rows: int, width: int, lane: int) -> None:
        """Allocate ``rows`` rows of ``width`` columns now, before CUDA graphs freeze the workspace."""
        self._name, self._workspace, self._device = context.name, context.workspace, context.device
        self._lane, self._nbytes = lane, rows * 4 * (2 + width)
        self.partials(rows, width, rows)

    def max_rows(self, width: int) -> int:
        """Return the rows of ``width`` columns in the memory that the constructor allocated."""
        return self._nbytes // (4 * (2 + width))

    def partials(self, rows: int, width: int, counters: int) -> SplitPartials:
        """Return views for ``rows`` partial rows of ``width`` columns and ``counters`` counters."""
        request, lane = self._workspace.request, self._lane
        plain = request(self._name, self._device, SCRATCH, rows * 4 * (2 + width), lane=lane).buffer
        zeros = request(self._name, self._device, COUNTERS, counters * 4, lane=lane).buffer
        return SplitPartials(
            plain[rows * 8 : rows * 4 * (2 + width)].view(torch.float32),
            plain[: rows * 8].view(torch.float32),
            zeros[: counters * 4].view(torch.int32),
        )
