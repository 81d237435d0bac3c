"""Ranks that are threads of one process: what tests of tensor parallelism share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")


class Threads:
    """Ranks that are threads of this process, and a record of what each exchanged."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.slots: list[Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def rank(self, rank: int) -> ThreadRank:
        return ThreadRank(self, rank)


class ThreadRank:
    def __init__(self, threads: Threads, rank: int) -> None:
        self.rank, self.size, self._threads = rank, threads.size, threads
        self.calls: list[str] = []

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.calls.append("all_reduce")
        return torch.stack(self._exchange(tensor)).sum(dim=0)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        self.calls.append("all_gather")
        return torch.cat(self._exchange(tensor), dim)

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._threads.slots[self.rank] = tensor
        self._threads.barrier.wait()
        found = [slot.clone() for slot in self._threads.slots if slot is not None]
        self._threads.barrier.wait()
        return found


def in_ranks(size: int, run: Callable[[ThreadRank], _T]) -> list[_T]:
    """Results of ``run(parallel)`` on each of ``size`` ranks. When one fails, the others do not wait for it."""
    threads = Threads(size)

    def run_one(rank: int) -> _T:
        try:
            return run(threads.rank(rank))
        except BaseException:
            threads.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        made = [pool.submit(run_one, rank) for rank in range(size)]
    errors = [error for future in made if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in made]
