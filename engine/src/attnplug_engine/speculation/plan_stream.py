"""Plan stream: the next plans are made on a side stream while the main stream runs earlier work."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from attnplug.machine.runtime import runtime_of


@dataclass(slots=True, eq=False)
class Section:
    """Work on the side stream, with the memory that it reads and its end event."""

    read: Sequence[object]
    done: torch.Event | None = None


class PlanStream:
    """A side stream. On a CPU there is none, and everything runs in call order.

    Synchronization: a section begins when the main stream has finished the work it was given before. The main stream
    waits for a section before the first batch runs that was planned in it.

    Memory: what a section allocates is reused by later sections only, and each of these begins behind all reads that
    the main stream was given before. What a section reads is held here until the main stream has waited for it, so that
    the main stream cannot reuse it earlier.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = runtime_of(device).module
        self._stream = None if self._module is None else self._module.Stream(device)
        self._sections: deque[Section] = deque()  # not yet awaited by the main stream, oldest first

    @contextmanager
    def section(self, *read: object) -> Iterator[Section]:
        """Run the body on the side stream. ``read`` holds the memory that it reads."""
        section = Section(read)
        self._sections.append(section)
        if self._stream is None:
            yield section
            return
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            try:
                yield section
            finally:
                section.done = done = self._module.Event()
                done.record(self._stream)

    def wait(self, section: Section) -> None:
        """Make the main stream wait for a section, and so for earlier ones; for none twice."""
        if section not in self._sections:
            return
        if section.done is not None:
            self._module.current_stream(self._device).wait_event(section.done)
        awaited = None
        while awaited is not section:
            awaited = self._sections.popleft()
            awaited.read = ()

    def join(self) -> None:
        """Make the main stream wait for all sections."""
        if self._sections:
            self.wait(self._sections[-1])
