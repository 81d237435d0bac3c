"""Capturing what a step does on the device, to do it again with one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

WARM_UPS = 2
"""Runs before a capture: kernels are compiled and libraries make their handles then, which a capture cannot."""


class Capture(Protocol):
    """Records a function and returns what does the same again. All that is recorded shares memory."""

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]: ...


class GraphCapture:
    """CUDA graphs over one pool of memory, captured on a stream of their own."""

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
        # Other threads may use the device meanwhile; what this one must not do is an error all the same.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        replay: Callable[[], None] = graph.replay
        return replay
