"""CUDA graph capture of a function that runs on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from attnplug.machine.runtime import runtime_of

WARM_UPS = 2
"""Runs before a capture. Kernels are compiled and libraries create their handles in them, which a capture cannot do."""


class CaptureFunction(Protocol):
    """Records a function and returns a function that replays it. All recordings share one memory pool."""

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]: ...


class GraphCapture:
    """CUDA graphs over one memory pool, captured on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._runtime = runtime_of(device)
        self._stream = self._runtime.module.Stream(device)
        self._pool = self._runtime.module.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        module = self._runtime.module
        current = module.current_stream()
        self._stream.wait_stream(current)
        with module.stream(self._stream):
            for _ in range(WARM_UPS):
                run()
        current.wait_stream(self._stream)
        graph = self._runtime.graph()
        # Other threads may use the device meanwhile. What this thread must not do is an error in this mode as well.
        with module.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        replay: Callable[[], None] = graph.replay
        return replay
