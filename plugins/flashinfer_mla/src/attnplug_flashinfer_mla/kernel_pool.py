"""Pool of planned kernels: a plan has exclusive use of its kernels as long as it lives."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Plannable(Protocol):
    """A kernel that can be planned again once ``ready``."""

    @property
    def ready(self) -> bool: ...


Kernel = TypeVar("Kernel", bound=Plannable)


class KernelHandle(Generic[Kernel]):
    """Exclusive use of a kernel. The kernel returns to its pool when the handle is collected with its plan."""

    __slots__ = ("_home", "kernel")

    def __init__(self, kernel: Kernel, home: deque[Kernel]) -> None:
        self.kernel, self._home = kernel, home

    def __del__(self) -> None:
        self._home.append(self.kernel)


class KernelPool(Generic[Kernel]):
    """Kernels of one purpose in one lane.

    One kernel is created immediately. More are created if several plans are alive, or if returned kernels are still
    copying their last plan to the device: planning never waits for the device.

    FlashInfer's wrappers store the call that they were planned for, so a plan is immutable only if its wrapper is not
    planned again meanwhile (B5). A returned kernel is planned again in stream order, as torch reuses memory. A caller
    that plans on one stream and runs on another must synchronize them.
    """

    def __init__(self, make: Callable[[], Kernel]) -> None:
        self._make = make
        self._free = deque([make()])

    def acquire(self) -> KernelHandle[Kernel]:
        """Return a handle of a ready kernel; create one if there is none."""
        for _ in range(len(self._free)):
            if self._free[0].ready:
                return KernelHandle(self._free.popleft(), self._free)
            self._free.rotate(-1)
        return KernelHandle(self._make(), self._free)
