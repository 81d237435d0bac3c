"""Sampled tokens of one step, on their way from the device to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from attnplug.machine.runtime import runtime_of


def record_event(device: torch.device) -> torch.Event | None:
    """Record an event on the current stream; None on a device without streams, which is synchronous."""
    module = runtime_of(device).module
    if module is None:
        return None
    event: torch.Event = module.Event()
    event.record()
    return event


class StepOutput:
    """Sampled tokens of one step in host memory, valid when the event ``done`` is. A later step may reuse the
    memory."""

    def __init__(self, memory: Tensor, done: torch.Event | None) -> None:
        self._memory, self._done = memory, done
        self._tokens: list[int] | None = None

    def tokens(self) -> list[int]:
        """Return the sampled tokens. Blocks until the step has finished."""
        if self._tokens is None:
            if self._done is not None:
                self._done.synchronize()
            self._tokens = self._memory.tolist()
        return self._tokens
