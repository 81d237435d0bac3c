"""Staging buffers: numbers that the host sends to fixed device addresses with one copy per step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from torch import Tensor

from attnplug.machine.runtime import runtime_of

_STAGES = 2
"""Host buffers: one is filled while the copy of the other may be in flight."""

Host = TypeVar("Host")


class Staging(Generic[Host]):
    """``memory [nbytes]`` on the device and its host buffers. ``fields`` makes the host's view of the bytes of one
    buffer."""

    def __init__(self, nbytes: int, device: torch.device, fields: Callable[[Tensor], Host]) -> None:
        self.memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        runtime = runtime_of(device)
        self._stages: list[tuple[Tensor, Host, torch.Event | None]] = []
        for _ in range(_STAGES):
            own = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=runtime.pinned)
            self._stages.append((own, fields(own), None if runtime.module is None else runtime.module.Event()))

    @contextmanager
    def write(self) -> Iterator[Host]:
        """Yield a host buffer to write; send it to the device afterwards. It holds what was written the time before
        last.

        Waits until the device has read that; with at most one other step in flight, it has.
        """
        own, host, event = self._stages.pop(0)
        self._stages.append((own, host, event))
        if event is not None:
            event.synchronize()
        yield host
        self.memory.copy_(own, non_blocking=True)
        if event is not None:
            event.record()
