"""The plan stream: plans of what comes next are made on a side stream, while the main stream runs what comes before."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(slots=True, eq=False)
class Section:
    """Some work on the side stream, with the memory that it reads, and its end."""

    read: Sequence[object]
    done: torch.cuda.Event | None = None


class PlanStream:
    """A side stream. On a CPU there is none, and all runs in the order of the calls.

    Who waits for whom: a section begins when the main stream has done what it was asked for before. The main stream
    waits for a section before the first batch that was planned there runs.

    Memory: what a section allocates is used again by later sections alone, and each of them begins after whatever the
    main stream was asked to read before. What a section reads is held here until the main stream has waited for it, so
    that the main stream cannot use it again before that.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._sections: deque[Section] = deque()  # that the main stream has not waited for, the oldest first

    @contextmanager
    def section(self, *read: object) -> Iterator[Section]:
        """What is done inside is done on the side stream. ``read`` holds the memory that it reads."""
        section = Section(read)
        self._sections.append(section)
        if self._stream is None:
            yield section
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            try:
                yield section
            finally:
                section.done = torch.cuda.Event()
                section.done.record(self._stream)

    def wait(self, section: Section) -> None:
        """Have the main stream wait for a section, and so for those before it; for none twice."""
        if section not in self._sections:
            return
        if section.done is not None:
            torch.cuda.current_stream(self._device).wait_event(section.done)
        past = None
        while past is not section:
            past = self._sections.popleft()
            past.read = ()

    def join(self) -> None:
        """Have the main stream wait for all sections."""
        if self._sections:
            self.wait(self._sections[-1])
