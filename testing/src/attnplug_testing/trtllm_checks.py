"""Checks of every backend of the TRT-LLM family (trtllm_mla, tokenspeed_mla, cutedsl_mla)."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from attnplug import AttentionBackend, BackendContext, BackendSpec, DType, ForwardMode, Problem
from attnplug_conformance.arithmetic import relative_error
from attnplug_conformance.checks.cache import check_written
from attnplug_conformance.diagnosis import check_padding
from attnplug_testing.kernel_scene import KernelCase, KernelScene, mla
from attnplug_trtllm_mla.kernels import to_float8

Build = Callable[[BackendContext], AttentionBackend]
FP8 = DType.FLOAT8_E4M3
TOLERANCE = 1.5e-2
"""Relative error of bfloat16, per token and head."""


def skip_unless_served(spec: BackendSpec, device: str) -> None:
    """Skip the test on a GPU that the backend refuses, with its reasons."""
    if device != "cuda":
        return
    major, minor = torch.cuda.get_device_capability()
    if reasons := spec.refusals(Problem(device="cuda", sm=10 * major + minor)):
        pytest.skip("; ".join(map(str, reasons)))


def scene(case: KernelCase, device: str, build: Build) -> KernelScene:
    """Return a scene. Over an fp8 cache its queries are rounded to fp8 beforehand, as the backend would round them."""
    stage = KernelScene(case, device, build)
    if case.kv_dtype == FP8:
        stage.q = to_float8(stage.q).to(stage.dtype)
    return stage


def lengths(count: int, longest: int, new: int | tuple[int, int], seed: int) -> tuple[tuple[int, int], ...]:
    """Draw ``(prefix, new)`` per request: prefixes of no row, one row, whole pages, or up to ``longest`` rows."""
    chance = random.Random(seed)
    prefixes = [chance.choice([0, 1, 31, 63, 64, 65, 127, 128, chance.randint(2, longest)]) for _ in range(count)]
    return tuple((p, new if isinstance(new, int) else chance.randint(*new)) for p in prefixes)


def check_absorbed(case: KernelCase, device: str, build: Build) -> KernelScene:
    """Check output, log-sum-exp, padding, and that exactly the requests' rows are in the cache afterwards."""
    stage = scene(case, device, build)
    before = stage.snapshot()
    out, lse = stage.results()
    check_written(stage, before)
    wanted, wanted_lse = stage.wanted()
    tokens = len(wanted)
    assert relative_error(out[:tokens], wanted) <= TOLERANCE
    check_padding(out, tokens)
    if lse is not None:
        assert relative_error(lse[:tokens], wanted_lse) <= (1e-5 if device == "cpu" else TOLERANCE)
        assert (lse[tokens:] == float("-inf")).all()
    return stage


def check_decode(build: Build, device: str, kv_dtype: DType | None, page_size: int, heads: int) -> None:
    """Check a decode batch of five requests."""
    longest = 300 if device == "cpu" else 3000
    scales = (0.37, 0.37) if kv_dtype else (1.0, 1.0)
    case = mla(lengths(5, longest, 1, seed=heads + page_size), ForwardMode.DECODE, page_size, heads,
               kv_dtype=kv_dtype, kv_scales=scales, padding=heads % 3)  # fmt: skip
    check_absorbed(case, device, build)


def check_verify(build: Build, device: str, kv_dtype: DType | None, new: int) -> None:
    """Check the verification of ``new`` drafted tokens for each of four requests."""
    case = mla(lengths(4, 300, new, seed=new), ForwardMode.TARGET_VERIFY, (32, 64)[new % 2], 16,
                   kv_dtype=kv_dtype, padding=new % 4)  # fmt: skip
    check_absorbed(case, device, build)
