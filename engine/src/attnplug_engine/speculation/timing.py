"""Timing of the parts of a round."""

from __future__ import annotations

import time

import torch

from attnplug.machine.runtime import runtime_of


class Timing:
    """Time stamps of one round: before verify, behind it, behind the draft's extend, and at its end."""

    def __init__(self, device: torch.device) -> None:
        self._module = runtime_of(device).module
        self._marks: list[float | torch.Event] = []
        self.mark()

    def mark(self) -> None:
        """Record the end of a part."""
        if self._module is None:
            self._marks.append(time.perf_counter())
            return
        event = self._module.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    @property
    def done(self) -> bool:
        """Return True if the device has reached the last mark."""
        last = self._marks[-1]
        return True if isinstance(last, float) else last.query()

    def seconds(self) -> list[float]:
        """Return the seconds of each part, once the device has finished all."""
        found = []
        for before, after in zip(self._marks, self._marks[1:], strict=False):
            if isinstance(before, float) and isinstance(after, float):
                found.append(after - before)
            elif not isinstance(before, float) and not isinstance(after, float):
                found.append(before.elapsed_time(after) / 1000)
        return found
