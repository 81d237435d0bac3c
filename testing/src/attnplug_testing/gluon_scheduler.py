"""Tensors, partitions, barriers and shared memory of ``gluon_interpreter``, and the scheduler of partitions."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_CHANGES = 0.1
"""Probability that a priority changes when somebody is chosen. Rare changes let one partition run far ahead."""


class GluonError(AssertionError):
    """A kernel deadlocks, has a race, or accesses memory outside a tensor."""


class _Stopped(BaseException):
    """Ends a partition after another one has failed."""


class Block(np.ndarray[Any, Any]):
    """A tensor of a kernel, or a number. Operators do not change it: ``x += y`` assigns to ``x`` only."""

    def to(self, dtype: type, bitcast: bool = False) -> Block:
        """Return values as ``float`` or ``int``; with ``bitcast``, bits of int32 as float32."""
        values = self.astype(np.int32).view(np.float32) if bitcast else self
        return block(values.astype(np.float64 if dtype is float else np.int64))

    def __floordiv__(self, other: Any) -> Any:  # towards zero, as on a GPU
        return np.sign(self) * np.sign(other) * np.floor_divide(np.abs(self), np.abs(other))

    def __mod__(self, other: Any) -> Any:
        return self - self // other * other


for _name in ("add", "sub", "mul", "floordiv", "mod", "truediv", "and", "or", "xor"):
    setattr(Block, f"__i{_name}__", getattr(Block, f"__{_name}__"))


def block(values: Any) -> Block:
    return np.asarray(values).view(Block)


class Scheduler:
    """Chooses what proceeds next: a partition of a program, or a copy or product that one has started."""

    def __init__(self, numbers: random.Random) -> None:
        self._random = numbers
        self._begin((), ())

    def _begin(self, program: tuple[int, ...], grid: tuple[int, ...]) -> None:
        self.program, self.grid = program, grid
        self.current = Partition("the kernel", self._random)
        self._partitions, self._pending = [self.current], list[Pending]()
        self._error: BaseException | None = None

    def run(self, program: tuple[int, ...], grid: tuple[int, ...], function: Callable[[], None]) -> None:
        """Run a program of a grid."""
        self._begin(program, grid)
        try:
            function()
            self._end()
            if self._pending:
                raise GluonError("the program ends before its copies")
        except BaseException as error:
            error.add_note(f"program {program} of {grid}")
            raise

    def specialize(self, partitions: Sequence[tuple[Any, tuple[Any, ...]]], *_: Any) -> None:
        """Run functions as partitions, the first one in the thread of the caller."""
        (first, arguments), *others = partitions
        me, threads = self.current, []
        for function, given in others:
            partition = Partition(function.__name__, self._random)
            self._partitions.append(partition)
            threads.append(threading.Thread(target=self._thread, args=(partition, function, given), daemon=True))
            threads[-1].start()
        me.name = first.__name__
        try:
            first(*arguments)
            self._end()
            self.pause(lambda: all(each is me or each.finished for each in self._partitions))
        except BaseException as error:
            self._fail(error)
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _thread(self, me: Partition, function: Any, arguments: tuple[Any, ...]) -> None:
        me.turn.acquire()
        try:
            if self._error is None:
                with np.errstate(all="ignore"):
                    function(*arguments)
                    self._end()
                    me.finished = True
                    self._next().turn.release()
        except BaseException as error:
            self._fail(error)

    def _end(self) -> None:
        if self.current.products or any(self.current.copies):
            raise GluonError(f"{self.current.name} ends before its products or copies")

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
            error.add_note(f"in {self.current.name}")
            for partition in self._partitions:
                partition.turn.release()

    def pause(self, ready: Callable[[], bool] = lambda: True, waits: str = "") -> None:
        """Let others proceed; return when the current partition is ``ready`` and chosen. ``waits``: what for."""
        me = self.current
        me.ready, me.waits = ready, waits
        chosen = self._next()
        if chosen is not me:
            chosen.turn.release()
            me.turn.acquire()
            if self._error is not None:
                raise _Stopped

    def _next(self) -> Partition:
        """Execute copies and products until a partition is chosen."""
        while True:
            everything: list[Partition | Pending] = [*self._partitions, *self._pending]
            ready = [each for each in everything if not each.finished and each.ready()]
            if not ready:
                waiting = [f"{each.name} waits {each.waits}" for each in self._partitions if not each.finished]
                raise GluonError("deadlock: " + "; ".join(waiting))
            if self._random.random() < _CHANGES:
                self._random.choice(ready).priority = self._random.random()
            chosen = max(ready, key=lambda each: each.priority)
            if isinstance(chosen, Partition):
                self.current = chosen
                return chosen
            chosen.finished = True
            self._pending.remove(chosen)
            chosen.execute()

    def start(self, execute: Callable[[], None], queue: list[Pending] | None = None) -> Pending:
        """Start a copy or a product. Those of a ``queue`` execute in their order."""
        pending = Pending(execute, queue, self._random)
        self._pending.append(pending)
        return pending


class Partition:
    """A thread of a program. It runs while it has its turn."""

    def __init__(self, name: str, numbers: random.Random) -> None:
        self.name, self.priority, self.turn = name, numbers.random(), threading.Semaphore(0)
        self.finished, self.waits = False, ""
        self.ready: Callable[[], bool] = lambda: True
        self.products: list[Pending] = []
        self.copies: list[list[Pending]] = []
        """Groups of ``cp.async``; the last one is not committed yet."""


class Pending:
    """A copy or a product that has been started."""

    __array_ufunc__ = None  # an operator on it is an error: no wait precedes it

    def __init__(self, execute: Callable[[], None], queue: list[Pending] | None, numbers: random.Random) -> None:
        self.execute, self.priority, self.finished = execute, numbers.random(), False
        self.result: Any = None
        self._queue = queue
        if queue is not None:
            queue.append(self)

    def ready(self) -> bool:
        return not self._queue or self._queue[0] is self


class Barrier:
    """An mbarrier: a phase completes after ``count`` arrivals and as many bytes as were announced."""

    def __init__(self, index: int) -> None:
        self.index, self.phases, self.bytes = index, 0, 0
        self.count, self.missing = 0, 0

    def add(self, arrivals: int, nbytes: int) -> None:
        self.missing -= arrivals
        self.bytes -= nbytes
        if self.missing < 0 or self.bytes < 0:
            raise GluonError(f"more arrivals or bytes than expected at barrier {self.index}, phase {self.phases}")
        if not self.missing and not self.bytes:
            self.phases, self.missing = self.phases + 1, self.count


class _Access:
    """Parts of a buffer that products read, and parts that copies write."""

    def __init__(self) -> None:
        self.read, self.written = list[Any](), list[Any]()


class Shared:
    """Shared memory: a buffer, several of them along the first dimension, or a part of one."""

    def __init__(self, scheduler: Scheduler, values: Any, accesses: Sequence[_Access]) -> None:
        self._scheduler, self.values, self._accesses = scheduler, values, accesses
        self.shape, self.dtype = values.shape, float

    @classmethod
    def allocate(cls, scheduler: Scheduler, shape: Sequence[int]) -> Shared:
        return cls(scheduler, np.full(shape, np.nan), [_Access() for _ in range(shape[0] if len(shape) > 2 else 1)])

    def index(self, number: Any) -> Shared:
        if not 0 <= number < len(self.values):
            raise GluonError(f"buffer {number} of {len(self.values)}")
        return Shared(self._scheduler, self.values[int(number)], self._accesses[int(number) :][:1])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        part = (slice(None),) * dim + (slice(start, start + length),)
        return Shared(self._scheduler, self.values[part], self._accesses)

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self._scheduler, self.values.transpose(order), self._accesses)

    def load(self, layout: Any = None) -> Block:
        self._scheduler.pause()
        self._check(writes=False)
        return block(self.values.copy())

    def store(self, values: Any) -> None:
        self._scheduler.pause()
        values = np.broadcast_to(values, self.shape)
        self._check(writes=not np.array_equal(self.values, values, equal_nan=True))
        self.values[...] = values

    def read(self) -> Callable[[], None]:
        """Begin a product's reads; return the function that ends them."""
        self._check(writes=False)
        return self._enter([access.read for access in self._accesses])

    def write(self) -> Callable[[], None]:
        """Begin a copy to this memory; return the function that ends it."""
        self._check(writes=True)
        self.values[...] = np.nan
        return self._enter([access.written for access in self._accesses])

    def _enter(self, users: Sequence[list[Any]]) -> Callable[[], None]:
        mine = self.values.view()
        for each in users:
            each.append(mine)

        def leave() -> None:
            for each in users:
                each[:] = [other for other in each if other is not mine]

        return leave

    def _check(self, writes: bool) -> None:
        for access in self._accesses:
            if any(np.may_share_memory(self.values, other) for other in access.written):
                raise GluonError("access of shared memory during a copy to it")
            if writes and any(np.may_share_memory(self.values, other) for other in access.read):
                raise GluonError("shared memory is overwritten while a product reads it")
