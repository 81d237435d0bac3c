"""Sampled tokens of one step, on their way from the device to the host."""

from __future__ import annotations

import torch
from torch import Tensor


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """An event that is over when the device has come this far; ``None`` where it always has."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


class StepOutput:
    """The tokens of one step, in memory of the host that a later one may write to again; there when it is ``done``."""

    def __init__(self, memory: Tensor, done: torch.cuda.Event | None) -> None:
        self._memory, self._done = memory, done
        self._tokens: list[int] | None = None

    def tokens(self) -> list[int]:
        """Waits for the step, the first time."""
        if self._tokens is None:
            if self._done is not None:
                self._done.synchronize()
            self._tokens = self._memory.tolist()
        return self._tokens
