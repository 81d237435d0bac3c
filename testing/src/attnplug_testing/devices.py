"""The devices that a test runs on: a GPU where there is one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")],
    ),
]

INTERPRETED = pytest.mark.skipif(
    torch.cuda.is_available() or find_spec("triton") is None,
    reason="Triton is not installed, or there is a GPU, beside which nothing is interpreted in one process",
)
"""On tests of kernels in Triton's interpreter."""


@contextmanager
def nothing_waits(device: str) -> Iterator[None]:
    """Inside, whatever waits for a GPU raises; on a CPU there is nobody to wait for."""
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
