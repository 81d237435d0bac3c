"""Devices to parametrize tests by: the CPU, and a GPU if there is one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch

GPU_MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU_MARKS)]

INTERPRETED = pytest.mark.skipif(
    torch.cuda.is_available() or find_spec("triton") is None,
    reason="Triton is not installed, or there is a GPU: a process cannot both compile and interpret kernels",
)
"""Mark of tests that run kernels in Triton's interpreter."""


@contextmanager
def nothing_waits(device: str) -> Iterator[None]:
    """Raise if an operation synchronizes with the GPU. Does nothing on a CPU."""
    if device != "cuda":
        yield
        return
    torch.cuda.synchronize()
    with warnings.catch_warnings(action="ignore"):  # torch calls the mode a prototype at every change
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        with warnings.catch_warnings(action="ignore"):
            torch.cuda.set_sync_debug_mode("default")
