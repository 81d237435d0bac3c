"""What passes between the host and captured steps without a copy: memory of the host that kernels read and write.

Between two replays a GPU idles, and copies there make it idle longer: 20 to 25 µs with one each way on an H200, 4 µs
without. So the first kernel of a captured step takes its numbers from where the host wrote them, and the last one
puts the tokens where the host reads them. A graph knows fixed addresses alone. Hence letters lie in a ring, and a
number on the device says whose turn it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from torch import Tensor

LETTERS = 2
"""One is written while a step may still read the other."""

Host = TypeVar("Host")


def recorded(device: torch.device) -> torch.cuda.Event | None:
    """An event that is over when the device has come this far; ``None`` where it always has."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


class Delivery:
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


class Letters(Generic[Host]):
    """Letters of ``nbytes`` to captured steps, each answered by up to ``tokens`` tokens.

    ``inbox`` ``[LETTERS, nbytes]`` and ``outbox`` ``[LETTERS, tokens]`` are the host's memory, ``memory`` is where a
    step keeps its letter on the device, and ``turn`` the number of the letter that the next one takes. ``fields`` makes
    what the host writes over the bytes of a letter.
    """

    def __init__(self, nbytes: int, tokens: int, device: torch.device, fields: Callable[[Tensor], Host]) -> None:
        pinned = device.type == "cuda"
        self.memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.inbox = torch.zeros(LETTERS, nbytes, dtype=torch.uint8, pin_memory=pinned)
        self.outbox = torch.zeros(LETTERS, tokens, dtype=torch.int64, pin_memory=pinned)
        self.turn = torch.zeros(1, dtype=torch.int32, device=device)
        self.hosts = [fields(letter) for letter in self.inbox]
        self._next = 0
        self._deliveries: list[Delivery | None] = [None] * LETTERS
        """The last answer of each letter."""
        # Who stops using an engine leaves a step behind, and torch gives pinned memory to others at once: it does not
        # know of kernels that use it. When the process ends there are no others.
        weakref.finalize(self, _wait_for, self._deliveries).atexit = False

    @contextmanager
    def sent(self) -> Iterator[Host]:
        """The next letter, to be written before the step is replayed. It holds what was written ``LETTERS`` steps ago.

        Waits until the device has read that, and reads what it answered; with at most one other step under way both
        were done.
        """
        if (older := self._deliveries[self._next]) is not None:
            older.tokens()
        yield self.hosts[self._next]

    def answered(self, count: int) -> Delivery:
        """The first tokens of the step that was replayed with the last letter. Call it once after each replay."""
        delivery = Delivery(self.outbox[self._next, :count], recorded(self.turn.device))
        self._deliveries[self._next] = delivery
        self._next = (self._next + 1) % LETTERS
        return delivery

    def restart(self) -> None:
        """Begin with the first letter again: after a step was captured, and so was run without being counted here."""
        self.turn.zero_()
        self._next, self._deliveries[:] = 0, [None] * LETTERS


def _wait_for(deliveries: Sequence[Delivery | None]) -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return  # a capture begins by waiting for everything, and must not wait once it has begun
    for delivery in deliveries:
        if delivery is not None:
            delivery.tokens()
