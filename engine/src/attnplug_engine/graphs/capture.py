"""CUDA graph capture of a function that runs on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

WARM_UPS = 2
"""Runs before a capture. Kernels are compiled and libraries create their handles in them, which a capture cannot do."""


class CaptureFunction(Protocol):
    """Records a function and returns a function that replays it. All recordings share one memory pool."""

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]: ...


class GraphCapture:
    """CUDA graphs over one memory pool, captured on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                run()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile. What this thread must not do is an error in this mode as well.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        replay: Callable[[], None] = graph.replay
        return replay
