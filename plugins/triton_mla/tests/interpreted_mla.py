"""The backend on a scene: in Triton's interpreter on a CPU, on a GPU with what the table says."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from attnplug import BackendContext, DType
from attnplug_triton_mla.configurations import Configuration
from support.mla_scene import MLACase, MLAScene

MULTIPROCESSORS = 5
"""Of the imaginary GPU: few, since each is a loop in Python, and enough to divide a request."""


def small(rows: int, requests: int, invariant: bool) -> Configuration:
    """Short steps and low tiles, so that small batches have many of both."""
    return Configuration(16 if rows <= 16 else 32, 16, 4, 2, merge="kernel" if requests < 4 else "last")


def build(context: BackendContext, choose: Callable[[int, int, bool], Configuration] | None = None):
    if context.device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # where this is not under our own conftest
        from attnplug_triton_mla.backend import TritonMLABackend

        return TritonMLABackend(context, choose=choose or small, multiprocessors=MULTIPROCESSORS)
    from attnplug_triton_mla.backend import TritonMLABackend

    return TritonMLABackend(context) if choose is None else TritonMLABackend(context, choose=choose)


def on(case: MLACase, device: str) -> MLACase:
    """The case as it runs on a device; on a CPU in float32, where nothing hides behind rounding."""
    return replace(case, dtype=DType.FLOAT32) if device == "cpu" and case.dtype is DType.BFLOAT16 else case


def scene(case: MLACase, device: str, choose: Callable[[int, int, bool], Configuration] | None = None) -> MLAScene:
    return MLAScene(on(case, device), device, lambda context: build(context, choose))
