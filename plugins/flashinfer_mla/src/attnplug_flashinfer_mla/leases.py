"""Kernels lent to plans: a plan has its kernels to itself for as long as it lives."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Kernel = TypeVar("Kernel")


class Lease(Generic[Kernel]):
    """A kernel on loan. It goes back when the lease is dropped, with the plan that holds it."""

    __slots__ = ("_home", "kernel")

    def __init__(self, kernel: Kernel, home: deque[Kernel]) -> None:
        self.kernel, self._home = kernel, home

    def __del__(self) -> None:
        self._home.append(self.kernel)


class Leases(Generic[Kernel]):
    """The kernels of one purpose. One is made at once; more are made when more plans live at the same time.

    FlashInfer's wrappers remember what they were planned for, so a plan is a value only if nobody else plans its
    wrapper meanwhile (B5). A returned kernel is planned again in stream order, as memory is reused by torch: whoever
    plans on one stream and runs on another makes the one wait for the other.
    """

    def __init__(self, make: Callable[[], Kernel]) -> None:
        self._make = make
        self._free = deque([make()])

    def lend(self) -> Lease[Kernel]:
        try:
            kernel = self._free.popleft()
        except IndexError:
            kernel = self._make()
        return Lease(kernel, self._free)
