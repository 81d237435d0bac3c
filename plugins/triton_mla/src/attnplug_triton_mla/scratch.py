"""Memory of the kernels: partial results, and counters that every call leaves at zero. Shared by contract (A2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import SCRATCH
from attnplug.host import WorkspaceOwner
from attnplug_triton_mla.plugin import COUNTERS


@dataclass(frozen=True, slots=True, eq=False)
class Partials:
    """``values`` for slots of ``[tile, rank]`` and ``counters`` int32, all flat, and ``weights`` ``[2, tile, slots]``.

    Values are sums with weights ``2 ** (logit - top)``; ``weights`` holds ``top`` and the weights' sum.
    """

    values: Tensor
    weights: Tensor
    counters: Tensor


class Scratch:
    """The memory of one lane. Asks for more if a batch needs more; what an earlier plan holds stays valid."""

    def __init__(
        self, name: str, workspace: WorkspaceOwner, device: torch.device, rank: int, rows: int, lane: int
    ) -> None:
        """``rows`` of partial results are allocated at once, before graphs freeze the workspace."""
        self._name, self._workspace, self._device, self._rank, self._lane = name, workspace, device, rank, lane
        self._made: dict[tuple[int, int], Partials] = {}
        self._reserve(rows, rows)

    def partials(self, slots: int, tile: int) -> Partials:
        """For ``slots`` partial results of ``tile`` rows each."""
        if self._plain.buffer is not self._from:
            self._made.clear()  # the workspace has grown: everybody uses the new memory
        found = self._made.get((slots, tile))
        if found is None:
            rows = slots * tile
            self._reserve(rows, slots)
            plain, counters = self._plain.buffer, self._counters.buffer
            found = self._made[slots, tile] = Partials(
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
        self._from = self._plain.buffer
