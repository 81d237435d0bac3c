"""Kernels lent to plans: a plan has its kernels to itself for as long as it lives."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Plannable(Protocol):
    @property
    def ready(self) -> bool: ...


Kernel = TypeVar("Kernel", bound=Plannable)


class Lease(Generic[Kernel]):
    """A kernel on loan. It goes back when the lease is dropped, with the plan that holds it."""

    __slots__ = ("_home", "kernel")

    def __init__(self, kernel: Kernel, home: deque[Kernel]) -> None:
        self.kernel, self._home = kernel, home

    def __del__(self) -> None:
        self._home.append(self.kernel)


class Leases(Generic[Kernel]):
    """The kernels for one purpose in one lane.

    One is made at once. More are made when several plans live at the same time, or when the returned kernels are still
    sending their last plan: planning never waits for the device.

    FlashInfer's wrappers remember what they were planned for, so a plan is a value only if nobody else plans its
    wrapper meanwhile (B5). A returned kernel is planned again in stream order, as torch reuses memory. Whoever plans on
    one stream and runs on another must make one wait for the other.
    """

    def __init__(self, make: Callable[[], Kernel]) -> None:
        self._make = make
        self._free = deque([make()])

    def lend(self) -> Lease[Kernel]:
        for _ in range(len(self._free)):
            if self._free[0].ready:
                return Lease(self._free.popleft(), self._free)
            self._free.rotate(-1)
        return Lease(self._make(), self._free)
