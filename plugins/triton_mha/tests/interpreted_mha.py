"""The backend on a scene: on a CPU in Triton's interpreter, on a GPU with the configurations of the table."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from attnplug import AttentionBackend, BackendContext, DType
from attnplug_testing.batches import declaring
from attnplug_testing.kernel_scene import KernelCase, KernelScene, check_stored
from attnplug_testing.kernel_scene import check as check_scene
from attnplug_triton_mha.configurations import MHAKernelConfig

Choose = Callable[[int, int, int, int], MHAKernelConfig]
MULTIPROCESSORS = 3
"""Of the imaginary GPU: few, since each is a loop in Python, and enough to divide a request."""
CODED_TOLERANCE = 2e-2
"""Coded rows are multiplied in fp16, for queries of any type."""


def small(rows: int, requests: int, kv_heads: int, format: int) -> MHAKernelConfig:
    """Short steps and low tiles, so that small batches have many of both; merged in both ways."""
    tile = 16 if rows <= 16 else 64
    return MHAKernelConfig(
        tile, 16, 4, 2, programs=2, single=requests > 2, separate_merge=requests % 2 == 0, overlap=False
    )


FIXED = MHAKernelConfig(64, 16, 4, 2, programs=2, overlap=False, split=16)
"""Configuration of batches with levels of invariance: the shortest splits have one step."""


def build(context: BackendContext, choose: Choose | None = None) -> AttentionBackend:
    on_cpu = context.device.type == "cpu"
    if on_cpu:
        if torch.cuda.is_available():
            pytest.skip("there is a GPU, for which Triton compiles: nothing is interpreted beside it in one process")
        os.environ["TRITON_INTERPRET"] = "1"  # for importers outside of this folder's conftest
    from attnplug_triton_mha.backend import TritonMHABackend

    context = declaring(context, "triton_mha")
    if on_cpu:
        return TritonMHABackend(context, choose=choose or small, invariant=(FIXED,), multiprocessors=MULTIPROCESSORS)
    return TritonMHABackend(context) if choose is None else TritonMHABackend(context, choose=choose)


def on(case: KernelCase, device: str) -> KernelCase:
    """Adapt the case to a device: float32 on a CPU, because the interpreter rounds bfloat16 toward zero."""
    return replace(case, dtype=DType.FLOAT32) if device == "cpu" and case.dtype is DType.BFLOAT16 else case


def scene(case: KernelCase, device: str, choose: Choose | None = None) -> KernelScene:
    return KernelScene(on(case, device), device, lambda context: build(context, choose))


def check(case: KernelCase, device: str, choose: Choose | None = None) -> KernelScene:
    stage = scene(case, device, choose)
    return check_scene(stage) if case.kv_dtype is None else check_stored(stage, CODED_TOLERANCE)
