"""Scratch memory of the split-KV kernels: partial results and arrival counters. Shared by contract (A2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import SCRATCH, BackendContext
from attnplug_triton_mla.plugin import COUNTERS


@dataclass(frozen=True, slots=True, eq=False)
class MLAPartials:
    """Partial results of split-KV latent attention, as views of the lane's workspace.

    ``values`` float32, flat, has one slot ``[tile, rank]`` per partial result: sums with weights
    ``2 ** (logit - top)``. ``weights`` float32 ``[2, tile, slots]`` holds ``top`` and the sums of the weights.
    ``counters`` int32 ``[slots]`` are zero before and after each call.
    """

    values: Tensor
    weights: Tensor
    counters: Tensor


class MLAScratch:
    """Allocator of one lane's partial results. It grows with the batch; views held by earlier plans stay valid."""

    def __init__(self, context: BackendContext, rank: int, rows: int, lane: int) -> None:
        """Allocate ``rows`` partial rows of ``rank`` columns now, before CUDA graphs freeze the workspace."""
        self._name, self._workspace, self._device = context.name, context.workspace, context.device
        self._rank, self._lane, self.max_rows = rank, lane, rows
        self._views: dict[tuple[int, int], MLAPartials] = {}
        self._reserve(rows, rows)

    def partials(self, slots: int, tile: int) -> MLAPartials:
        """Return views for ``slots`` partial results of ``tile`` rows each. Views are cached by size."""
        if self._plain.buffer is not self._viewed:
            self._views.clear()  # another user has grown the workspace: everyone moves to the new memory
        found = self._views.get((slots, tile))
        if found is None:
            rows = slots * tile
            self._reserve(rows, slots)
            plain, counters = self._plain.buffer, self._counters.buffer
            found = self._views[slots, tile] = MLAPartials(
                plain[rows * 8 : rows * 4 * (2 + self._rank)].view(torch.float32),
                plain[: rows * 8].view(torch.float32).view(2, tile, slots),
                counters[: slots * 4].view(torch.int32),
            )
        return found

    def _reserve(self, rows: int, counters: int) -> None:
        nbytes = rows * 4 * (2 + self._rank)
        request, lane = self._workspace.request, self._lane
        self._plain = request(self._name, self._device, SCRATCH, nbytes, lane=lane)
        self._counters = request(self._name, self._device, COUNTERS, counters * 4, lane=lane)
        self._viewed = self._plain.buffer
