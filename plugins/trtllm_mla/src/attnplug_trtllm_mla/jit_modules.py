"""Modules that FlashInfer compiles just in time for TRT-LLM's kernels and for the fallback of this family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnplug import DType, Problem, Role
from attnplug.kernels import KernelBuild
from attnplug_flashinfer_mla.jit_modules import paged_module, ragged_modules

_FMHA = "fmha_gen"
"""FlashInfer's name of the module."""


def kernel_builds(problem: Problem, roles: frozenset[Role], options: Any) -> Sequence[KernelBuild]:
    """Return the launcher of TRT-LLM's kernels, whose binaries are downloaded, and the modules of the fallback."""
    return [KernelBuild("trtllm_gen_fmha", _load, _is_cached), *fallback_builds(problem, roles, options)]


def fallback_builds(problem: Problem, roles: frozenset[Role], options: Any) -> Sequence[KernelBuild]:
    """Return the modules of ``flashinfer_mla`` as a fallback. On these GPUs it reads no fp8 cache."""
    paged = [] if problem.kv_dtype == DType.FLOAT8_E4M3 else [paged_module(problem, "fa2")]
    return [*paged, *ragged_modules(problem, roles, "fa2")]


def _load() -> None:
    """Load the module for decode and for prefill. FlashInfer caches it separately for each."""
    from flashinfer.mla import _core
    from flashinfer.prefill import get_trtllm_gen_fmha_module

    _core.get_trtllm_gen_fmha_module()
    get_trtllm_gen_fmha_module()


def _is_cached() -> bool:
    """Return True if the module's file exists. Its ``JitSpec`` is not asked: generating that downloads headers."""
    from flashinfer.jit import env

    return any((folder / _FMHA / f"{_FMHA}.so").exists() for folder in (env.FLASHINFER_AOT_DIR, env.FLASHINFER_JIT_DIR))
