"""triton_mla on a scene: in Triton's interpreter on a CPU, with its table's configurations on a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch

from attnplug import AttentionBackend, BackendContext, DType
from attnplug.host import MLADims
from attnplug_testing.batches import declaring
from attnplug_testing.kernel_scene import DEEPSEEK, KernelCase, KernelScene
from attnplug_testing.kernel_scene import check as check_scene
from attnplug_triton_mla.configurations import MLAKernelConfig

Choose = Callable[..., MLAKernelConfig]
MULTIPROCESSORS = 3
"""Multiprocessors of the simulated GPU: few, since each is a loop in Python, but enough to split a request."""
NARROW = MLADims(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16)


def small(rows: int, requests: int, tokens: int, **_: bool) -> MLAKernelConfig:
    """Return a configuration of small tiles, so that small batches have many."""
    tile = 16 if rows <= 16 else 32
    merge: Literal["last", "kernel"] = "kernel" if requests < 4 else "last"
    return MLAKernelConfig(tile, 16, 4, 2, start_steps=1, merge=merge, merge_columns=512)


FIXED = MLAKernelConfig(32, 16, 4, 2, start_steps=1, split=16, grows=True)
"""Configuration of batches with levels of invariance: the shortest splits have one step."""


def build(context: BackendContext, choose: Choose | None = None) -> AttentionBackend:
    on_cpu = context.device.type == "cpu"
    if on_cpu:
        if torch.cuda.is_available():
            pytest.skip("there is a GPU: a process cannot both compile and interpret kernels")
        os.environ["TRITON_INTERPRET"] = "1"  # for the conformance command, which loads no pytest plugin
    from attnplug_triton_mla.backend import TritonMLABackend
    from attnplug_triton_mla.ragged import RaggedConfig

    context = declaring(context, "triton_mla")
    if on_cpu:
        interpreted = (context.declared.index_dtypes or frozenset()) | {DType.FLOAT32}  # bfloat16 is not
        context = replace(context, declared=replace(context.declared, index_dtypes=interpreted))
        ragged = RaggedConfig(32, 16, 4, 2)
        return TritonMLABackend(
            context, choose=choose or small, fixed=(FIXED,), ragged=ragged, multiprocessors=MULTIPROCESSORS
        )
    return TritonMLABackend(context) if choose is None else TritonMLABackend(context, choose=choose)


def on(case: KernelCase, device: str) -> KernelCase:
    """Return the case as it runs on a device: on a CPU with narrow rows in float32, because the interpreter rounds to
    bfloat16 toward zero."""
    if device != "cpu":
        return case
    narrow = replace(case, mla=NARROW) if case.mla is DEEPSEEK else case
    return replace(narrow, dtype=DType.FLOAT32) if case.dtype is DType.BFLOAT16 else narrow


def scene(case: KernelCase, device: str, choose: Choose | None = None) -> KernelScene:
    return KernelScene(on(case, device), device, lambda context: build(context, choose))


def check(case: KernelCase, device: str, choose: Choose | None = None) -> KernelScene:
    return check_scene(scene(case, device, choose))
