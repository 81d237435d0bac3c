"""Memory of the kernels: partial results, and counters that every call leaves at zero. Shared by contract (A2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import SCRATCH, WorkspaceKind, WorkspaceOwner

COUNTERS = WorkspaceKind("triton-mla-counters", zeroed=True)


@dataclass(frozen=True, slots=True, eq=False)
class Partials:
    """``values`` for slots of ``[tile, rank]``, ``lse`` float32 of ``[tile]``, and ``counters`` int32, all flat."""

    values: Tensor
    lse: Tensor
    counters: Tensor


class Scratch:
    """Asks for more where a batch needs more; what an earlier plan holds stays its own."""

    def __init__(self, name: str, workspace: WorkspaceOwner, device: torch.device, rank: int) -> None:
        self._name, self._workspace, self._device, self._rank = name, workspace, device, rank
        self._made: dict[tuple[int, int, torch.dtype], Partials] = {}

    def partials(self, slots: int, tile: int, dtype: torch.dtype) -> Partials:
        """For ``slots`` partial results of ``tile`` rows each."""
        found = self._made.get((slots, tile, dtype))
        if found is None:
            found = self._made[slots, tile, dtype] = self._make(slots, tile, dtype)
        return found

    def _make(self, slots: int, tile: int, dtype: torch.dtype) -> Partials:
        rows = slots * tile
        split = rows * 4
        plain = self._workspace.request(self._name, self._device, SCRATCH, split + rows * self._rank * dtype.itemsize)
        counters = self._workspace.request(self._name, self._device, COUNTERS, slots * 4)
        return Partials(
            plain.buffer[split : split + rows * self._rank * dtype.itemsize].view(dtype),
            plain.buffer[:split].view(torch.float32),
            counters.buffer[: slots * 4].view(torch.int32),
        )
