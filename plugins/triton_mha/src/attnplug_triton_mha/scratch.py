"""Memory of the kernel: partial results, and counters that every call leaves at zero. Shared by contract (A2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import SCRATCH
from attnplug.host import WorkspaceOwner
from attnplug_triton_mha.plugin import COUNTERS


@dataclass(frozen=True, slots=True, eq=False)
class Partials:
    """``values`` ``[rows * width]`` and ``weights`` ``[2 * rows]`` float32, ``counters`` int32, all flat.

    Values are sums with weights ``2 ** (logit - top)``; ``weights`` holds ``top`` and then the weights' sum, of all
    rows.
    """

    values: Tensor
    weights: Tensor
    counters: Tensor


class Scratch:
    """The memory of one lane. Asks for more if a batch needs more; what an earlier plan holds stays valid."""

    def __init__(
        self, name: str, workspace: WorkspaceOwner, device: torch.device, rows: int, width: int, lane: int
    ) -> None:
        """``rows`` of ``width`` columns are allocated at once, before graphs freeze the workspace."""
        self._name, self._workspace, self._device, self._lane = name, workspace, device, lane
        self.partials(rows, width, rows)

    def partials(self, rows: int, width: int, counters: int) -> Partials:
        """For ``rows`` rows of partial results, ``width`` columns each, and as many counters as are asked for."""
        request, lane = self._workspace.request, self._lane
        plain = request(self._name, self._device, SCRATCH, rows * 4 * (2 + width), lane=lane).buffer
        zeros = request(self._name, self._device, COUNTERS, counters * 4, lane=lane).buffer
        return Partials(
            plain[rows * 8 : rows * 4 * (2 + width)].view(torch.float32),
            plain[: rows * 8].view(torch.float32),
            zeros[: counters * 4].view(torch.int32),
        )
