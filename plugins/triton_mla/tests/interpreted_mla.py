"""The backend on a scene: in Triton's interpreter on a CPU, on a GPU with what the table says."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from attnplug import AttentionBackend, BackendContext, DType
from attnplug.host import MLADims
from attnplug_triton_mla.configurations import Configuration
from support.batches import declaring
from support.mla_scene import DEEPSEEK, LAYER, MLACase, MLAScene, relative_error

Choose = Callable[..., Configuration]
MULTIPROCESSORS = 3
"""Of the imaginary GPU: few, since each is a loop in Python, and enough to divide a request."""
NARROW = MLADims(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16)
TOLERANCE = {DType.FLOAT32: 1e-6, DType.FLOAT16: 1e-3, DType.BFLOAT16: 5e-3}
"""The interpreter rounds to bfloat16 toward zero, so on a CPU nothing is judged in it."""


def small(rows: int, requests: int, tokens: int, **_: bool) -> Configuration:
    """Short steps and low tiles, so that small batches have many of both."""
    tile, merge = 16 if rows <= 16 else 32, "kernel" if requests < 4 else "last"
    return Configuration(tile, 16, 4, 2, start_steps=1, merge=merge, merge_columns=512)


def build(context: BackendContext, choose: Choose | None = None) -> AttentionBackend:
    on_cpu = context.device.type == "cpu"
    if on_cpu:
        if torch.cuda.is_available():
            pytest.skip("there is a GPU, for which Triton compiles: nothing is interpreted beside it in one process")
        os.environ["TRITON_INTERPRET"] = "1"  # for whoever is not under this folder's conftest
    from attnplug_triton_mla.backend import TritonMLABackend

    context = declaring(context, "triton_mla")
    if on_cpu:
        interpreted = context.declared.index_dtypes | {DType.FLOAT32}  # bfloat16 is not
        context = replace(context, declared=replace(context.declared, index_dtypes=interpreted))
        return TritonMLABackend(context, choose=choose or small, multiprocessors=MULTIPROCESSORS)
    return TritonMLABackend(context) if choose is None else TritonMLABackend(context, choose=choose)


def on(case: MLACase, device: str) -> MLACase:
    """The case as it runs on a device: on a CPU narrow, and in float32 rather than bfloat16."""
    if device != "cpu":
        return case
    narrow = replace(case, dims=NARROW) if case.dims is DEEPSEEK else case
    return replace(narrow, dtype=DType.FLOAT32) if case.dtype is DType.BFLOAT16 else narrow


def scene(case: MLACase, device: str, choose: Choose | None = None) -> MLAScene:
    return MLAScene(on(case, device), device, lambda context: build(context, choose))


def check(case: MLACase, device: str, choose: Choose | None = None) -> MLAScene:
    """Output and log-sum-exp are float64's, padding gives zero and -inf, and nothing but new rows was written."""
    stage = scene(case, device, choose)
    out, lse = stage.absorbed()
    wanted, wanted_lse = stage.wanted_absorbed()
    tokens, tolerance = len(wanted), TOLERANCE[stage.case.dtype]
    assert relative_error(out[:tokens], wanted) <= tolerance
    assert (out[tokens:] == 0).all()
    assert lse is not None
    assert relative_error(lse[:tokens], wanted_lse) <= tolerance
    assert (lse[tokens:] == float("-inf")).all()
    assert int((~stage.pool.rows(LAYER).float().isnan()).any(-1).sum()) == sum(stage.totals)
    return stage
