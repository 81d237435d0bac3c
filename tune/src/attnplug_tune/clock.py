"""Timing of call chains: CUDA events on a GPU, the host's clock elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from attnplug.machine.runtime import runtime_of
from attnplug_tune.shapes import Task

_TARGET_S = 0.04
"""Target time of all repetitions of one chain."""
_FEWEST, _MOST = 5, 30
_SLOW_S = 0.2
"""A slower chain is repeated only twice. A backend that slow is never chosen."""
_WARM_UPS = 2
"""Warm-up runs before a capture. They compile kernels and create library handles."""
_L2_BYTES = 256 << 20
"""More than the L2 cache of any GPU. Reading this much evicts everything, and leaves no dirty lines whose write-back
would be timed."""
_CYCLES_PER_S = 2e9
_HEAD_START_S = 2e-4


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """Calls of one side for consecutive layers on one stream, so that no two overlap."""

    side: str
    """Name of a backend, or of its library called directly."""
    task: Task
    calls: int
    run: Callable[[], None]
    captured: bool = False
    """True if it runs in a CUDA graph."""
    replan: Callable[[], object] | None = None
    """Host-side planning before replays of the graph."""
    host_counts: bool = False
    """True if host time counts where the host is slower than the device."""
    planned_by: str = ""
    """Backend that planned, if the side is ``auto``."""


class Clock(Protocol):
    """Protocol for clocks, which repeat chains and time them. Tests use one with known times."""

    def now(self) -> float:
        """Monotonic seconds, for budgets."""
        ...

    def warm_up(self, chain: Chain) -> None:
        """Run a chain for the first time, which compiles and loads its kernels."""
        ...

    def times(self, chain: Chain) -> list[float]:
        """Seconds of each repetition of a chain. Call ``warm_up`` first."""
        ...


class HostClock:
    """Host time of calls, until the device has finished them."""

    def __init__(self, device: torch.device) -> None:
        module = runtime_of(device).module
        self._wait = (lambda: None) if module is None else module.synchronize

    def now(self) -> float:
        return time.monotonic()

    def warm_up(self, chain: Chain) -> None:
        chain.run()

    def times(self, chain: Chain) -> list[float]:
        found = [self._once(chain)]
        fewest = _FEWEST if found[0] < _SLOW_S else 2
        while len(found) < fewest or (sum(found) < _TARGET_S and len(found) < _MOST):
            found.append(self._once(chain))
        return found

    def _once(self, chain: Chain) -> float:
        self._wait()
        started = time.perf_counter()
        chain.run()
        self._wait()
        return time.perf_counter() - started


class CudaClock:
    """Clock based on CUDA events. L2 is flushed before each repetition, and each call reads different rows.

    Graphs, and chains whose host time does not count, are enqueued while the device is still busy, so that it never
    waits for the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flush = torch.zeros(_L2_BYTES // 4, dtype=torch.float32, device=device)
        self._sum = torch.empty((), dtype=torch.float32, device=device)
        self._stream = torch.cuda.Stream(device)

    def now(self) -> float:
        return time.monotonic()

    def warm_up(self, chain: Chain) -> None:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS if chain.captured else 1):
                chain.run()
        current.wait_stream(self._stream)
        torch.cuda.synchronize()

    def times(self, chain: Chain) -> list[float]:
        run = self._graph(chain) if chain.captured else chain.run
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        host_s = time.perf_counter() - started
        torch.cuda.synchronize()
        head_start = None if chain.host_counts and not chain.captured else min(_HEAD_START_S + 1.5 * host_s, 0.02)
        first = self._elapsed([self._marked(run, head_start)])[0]
        count = min(max(int(_TARGET_S / max(first, 1e-9)), _FEWEST if first < _SLOW_S else 2), _MOST)
        return self._elapsed([self._marked(run, head_start) for _ in range(count)])

    def _graph(self, chain: Chain) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            chain.run()
        if chain.replan is not None:
            chain.replan()
        return graph.replay  # the bound method keeps the graph alive

    def _marked(self, run: Callable[[], None], head_start: float | None) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.sum(self._flush, dim=0, out=self._sum)
        if head_start is None:
            torch.cuda.synchronize()
        else:
            torch.cuda._sleep(int(head_start * _CYCLES_PER_S))
        begin.record()
        run()
        end.record()
        return begin, end

    @staticmethod
    def _elapsed(marks: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> list[float]:
        torch.cuda.synchronize()
        return [1e-3 * begin.elapsed_time(end) for begin, end in marks]


def clock_for(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else HostClock(device)
