"""Pinned-memory mailbox between the host and captured decode steps.

An H200 idles 20–25 µs between graph replays if inputs and sampled tokens are copied with ``cudaMemcpyAsync``, and 4 µs
without copies. So the first kernel of a graph reads its inputs directly from pinned host memory and the last one writes
the sampled tokens back to it. Because a graph's addresses are fixed, the mailbox is a ring of two slots and a device
counter selects the current one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from attnplug.machine.runtime import runtime_of
from attnplug_engine.execution.step_output import StepOutput, record_event

SLOTS = 2
"""One slot is written while a step may still read the other."""

Host = TypeVar("Host")


class Mailbox(Generic[Host]):
    """Ring of ``SLOTS`` slots: inputs of ``nbytes`` for captured steps, and up to ``tokens`` sampled tokens of each.

    ``input_slots`` ``[SLOTS, nbytes]`` and ``output_slots`` ``[SLOTS, tokens]`` are pinned host memory. A step copies
    its inputs to ``memory [nbytes]`` on the device. ``slot [1]`` is the device counter: the slot that the next step
    uses. ``fields`` makes the host's view of the bytes of one slot.
    """

    def __init__(self, nbytes: int, tokens: int, device: torch.device, fields: Callable[[Tensor], Host]) -> None:
        runtime = runtime_of(device)
        pinned = runtime.pinned
        self.memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.input_slots = torch.zeros(SLOTS, nbytes, dtype=torch.uint8, pin_memory=pinned)
        self.output_slots = torch.zeros(SLOTS, tokens, dtype=torch.int64, pin_memory=pinned)
        self.slot = torch.zeros(1, dtype=torch.int32, device=device)
        self.host_slots = [fields(slot) for slot in self.input_slots]
        self._next = 0
        self._outputs: list[StepOutput | None] = [None] * SLOTS
        """The last output of each slot."""
        # An engine that is dropped may leave a step running. torch reuses pinned memory at once, because it does not
        # know that kernels use it; so wait. At process exit nothing reuses it.
        weakref.finalize(
            self, _wait_for, self._outputs, None if runtime.graph is None else runtime.module
        ).atexit = False

    @contextmanager
    def write(self) -> Iterator[Host]:
        """Yield the next slot's inputs, to be written before the step is replayed.

        They hold what was written ``SLOTS`` steps ago. Waits until the device has read that and reads its output; with
        at most one other step in flight, both have happened.
        """
        if (older := self._outputs[self._next]) is not None:
            older.tokens()
        yield self.host_slots[self._next]

    def step_output(self, count: int) -> StepOutput:
        """Return the first ``count`` tokens of the last replay. Call it once after each replay."""
        output = StepOutput(self.output_slots[self._next, :count], record_event(self.slot.device))
        self._outputs[self._next] = output
        self._next = (self._next + 1) % SLOTS
        return output

    def reset(self) -> None:
        """Start at slot 0 again. Call it after a capture, whose warm-up runs advance the device counter only."""
        self.slot.zero_()
        self._next, self._outputs[:] = 0, [None] * SLOTS


def _wait_for(outputs: Sequence[StepOutput | None], module: Any) -> None:
    if module is not None and module.is_available() and module.is_current_stream_capturing():
        return  # a capture first waits for the device, and must not wait after it has begun
    for output in outputs:
        if output is not None:
            output.tokens()
