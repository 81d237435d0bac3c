"""Modules that FlashInfer compiles just in time, and the hook of the spec that lists those of this backend.

A module is compiled by the function that FlashInfer's wrappers call when they plan: it caches loaded modules by its
arguments, so a wrapper finds what was loaded here. Modules of the wheels ``flashinfer-jit-cache`` count as cached.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from attnplug import ExtendPath, LayerSpec, Problem, Role
from attnplug.kernels import KernelBuild, torch_dtype
from attnplug_flashinfer_mla.options import FlashInferMLAOptions

RAGGED_DIMS = frozenset({(192, 128)})
"""Key and value dims that the ragged kernels were tested with. Other models extend absorbed."""
LOADERS = {
    "batch_prefill": ("flashinfer.prefill:get_batch_prefill_module",),
    "batch_mla": (
        "flashinfer.mla._core:get_batch_mla_module",
        "flashinfer.mla._batch_mla._backends._fa_common:get_batch_mla_module",  # since 0.7
    ),
    "cutlass_mla": (
        "flashinfer.mla._core:get_mla_module",
        "flashinfer.mla._batch_mla._backends.cutlass_backend:get_mla_module",  # since 0.7
    ),
}
"""Functions that compile and load a module, by its kind. The first one that the installed version has is called."""
GENERATORS = {
    "batch_prefill": ("flashinfer.jit.attention.modules:gen_batch_prefill_module",),
    "batch_prefill_fa2": (
        "flashinfer.jit.attention.modules:_gen_batch_prefill_primary_module",  # since 0.7
        "flashinfer.jit.attention.modules:gen_batch_prefill_module",
    ),
    "batch_mla": ("flashinfer.jit.attention.modules:gen_batch_mla_module",),
    "cutlass_mla": ("flashinfer.jit.mla:gen_mla_module",),
}
"""Functions that return a module's ``JitSpec`` and compile nothing."""


def jit_module(kind: str, *arguments: Any) -> KernelBuild:
    """Return the build of a module of FlashInfer. ``arguments`` are those of its loader."""
    name = "_".join([kind, *(str(each).removeprefix("torch.") for each in arguments)])
    return KernelBuild(name, partial(_load, kind, *arguments), partial(_is_cached, kind, *arguments))


def prefill_module(
    kernel: str,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    dims: tuple[int, int],
    *,
    window: bool = False,
    cap: bool = False,
) -> KernelBuild:
    """Return the build of a paged and ragged MHA module, for queries and results in ``dtype``."""
    no_position_encoding, fp16_reduction = 0, False
    return jit_module(
        "batch_prefill",
        *(kernel, dtype, kv_dtype, dtype, torch.int32, *dims),
        *(no_position_encoding, window, cap, fp16_reduction),
    )


def kernel_builds(problem: Problem, roles: frozenset[Role], options: FlashInferMLAOptions) -> Sequence[KernelBuild]:
    """Return the modules that ``flashinfer_mla`` loads for a problem: the paged one, and the ragged one of prefills."""
    kernel: str = ("fa3" if problem.sm == 90 else "fa2") if options.kernel == "auto" else options.kernel
    decode = []
    if kernel == "cutlass":
        decode, kernel = [jit_module("cutlass_mla")], "fa2"  # fa2 runs other batches
    ragged = [] if options.disable_ragged else ragged_modules(problem, roles, kernel)
    return [*decode, paged_module(problem, kernel), *ragged]


def paged_module(problem: Problem, kernel: str) -> KernelBuild:
    """Return the build of the module that attends to latent rows: decode, verify and absorbed extends."""
    assert problem.dtype is not None and problem.kv_dtype is not None
    dims, profiled = _latent_layer(problem).mla, False
    assert dims is not None
    dtype, kv_dtype, rows = torch_dtype(problem.dtype), torch_dtype(problem.kv_dtype), dims.kv_lora_rank
    return jit_module("batch_mla", kernel, dtype, kv_dtype, dtype, torch.int32, rows, dims.qk_rope_head_dim, profiled)


def ragged_modules(problem: Problem, roles: frozenset[Role], kernel: str) -> list[KernelBuild]:
    """Return the build of the module that prefills MLA as MHA; empty if no request can reach it."""
    assert problem.dtype is not None
    layer, dtype = _latent_layer(problem), torch_dtype(problem.dtype)
    assert layer.mla is not None
    dims = (layer.mla.qk_nope_head_dim + layer.mla.qk_rope_head_dim, layer.v_head_dim)
    if roles == {Role.DECODE} or problem.mla_extend is ExtendPath.ABSORBED or dims not in RAGGED_DIMS:
        return []
    return [prefill_module(kernel, dtype, dtype, dims)]


def _latent_layer(problem: Problem) -> LayerSpec:
    """Return the first of the latent layers, which are alike."""
    assert problem.model is not None
    return next(layer for layer in problem.model.full_layers if layer.mla is not None)


def _load(kind: str, *arguments: Any) -> None:
    _resolve(LOADERS[kind])(*arguments)


def _is_cached(kind: str, *arguments: Any) -> bool:
    generator = "batch_prefill_fa2" if kind == "batch_prefill" and arguments[0] == "fa2" else kind
    return bool(_resolve(GENERATORS[generator])(*arguments).is_compiled)


def _resolve(references: Sequence[str]) -> Any:
    """Return the first of several functions that the installed FlashInfer has."""
    for reference in references:
        module, _, name = reference.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            if reference == references[-1]:
                raise
    raise AssertionError("there is a reference")
