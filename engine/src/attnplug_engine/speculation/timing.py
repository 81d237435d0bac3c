"""Timing of the parts of a round."""

from __future__ import annotations

import time

import torch


class Timing:
    """Time stamps of one round: before verify, behind it, behind the draft's extend, and at its end."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[float | torch.cuda.Event] = []
        self.mark()

    def mark(self) -> None:
        """Record the end of a part."""
        if not self._on_gpu:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    @property
    def done(self) -> bool:
        """Return True if the device has reached the last mark."""
        last = self._marks[-1]
        return last.query() if isinstance(last, torch.cuda.Event) else True

    def seconds(self) -> list[float]:
        """Return the seconds of each part, once the device has finished all."""
        found = []
        for before, after in zip(self._marks, self._marks[1:], strict=False):
            if isinstance(before, torch.cuda.Event) and isinstance(after, torch.cuda.Event):
                found.append(before.elapsed_time(after) / 1000)
            elif isinstance(before, float) and isinstance(after, float):
                found.append(after - before)
        return found
