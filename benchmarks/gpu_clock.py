"""Timing on a GPU: on the device, on the host, while the device is busy, and in graphs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Call = Callable[[int], object]
"""Function of the call's index, which selects the layer's cache."""


def device_us(calls: Mapping[str, Callable[[], object]], rounds: int, before: Callable[[], None]) -> dict[str, float]:
    """Median device microseconds of calls. They alternate in both orders; ``before`` runs untimed."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        marks = {}
        for name in list(calls)[:: -1 if number % 2 else 1]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before()
            begin.record()
            calls[name]()
            end.record()
            marks[name] = begin, end
        torch.cuda.synchronize()
        for name, (begin, end) in marks.items():
            times[name].append(1e3 * begin.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}


def host_us(calls: Mapping[str, Call], rounds: int, count: int) -> dict[str, list[float]]:
    """Host microseconds per call, for each round: ``count`` calls in a row without synchronization, alternating."""
    for call in calls.values():
        call(0)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            for number in range(count):
                call(number)
            times[name].append(1e6 * (time.perf_counter() - started) / count)
    torch.cuda.synchronize()
    return times


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}


def while_busy(call: Call, load: Callable[[], None], rounds: int = 10) -> dict[str, Any]:
    """Host microseconds of a call with queued device work, and True if that work was still running afterwards."""
    call(0)
    times, running = [], []
    for _ in range(rounds):
        torch.cuda.synchronize()
        load()
        done = torch.cuda.Event()
        done.record()
        started = time.perf_counter()
        call(0)
        times.append(1e6 * (time.perf_counter() - started))
        running.append(not done.query())
    torch.cuda.synchronize()
    return {"median_us": statistics.median(times), "max_us": max(times), "device_still_busy": all(running)}


def sync_error(call: Call) -> str | None:
    """Error of torch's sync debug mode for a call; None if the call does not synchronize."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(0)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def capture(body: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Capture ``body``; returns the graph and its result. ``body`` runs once before, to compile and load kernels."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = body()
    return graph, out
