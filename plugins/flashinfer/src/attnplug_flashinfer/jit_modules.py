"""Modules that FlashInfer compiles just in time for ``flashinfer``."""

from __future__ import annotations

from collections.abc import Sequence

from attnplug import Problem, Role
from attnplug.kernels import KernelBuild, torch_dtype
from attnplug_flashinfer.options import FlashInferOptions
from attnplug_flashinfer.plugin import DTYPES, FA3_SM
from attnplug_flashinfer_mla.jit_modules import prefill_module


def kernel_builds(problem: Problem, roles: frozenset[Role], options: FlashInferOptions) -> Sequence[KernelBuild]:
    """Return the modules that a problem can reach: fa2, and the kernel of long extends, for each layer shape."""
    assert problem.model is not None and problem.dtype is not None and problem.kv_dtype is not None
    kernels: dict[str, None] = {"fa2": None}
    if roles != {Role.DECODE}:
        fa3 = problem.sm == FA3_SM and problem.kv_dtype in DTYPES
        kernels[("fa3" if fa3 else "fa2") if options.kernel == "auto" else options.kernel] = None
    variants = {
        (layer.head_dim, layer.sliding_window is not None, layer.logit_cap is not None): None
        for layer in problem.model.full_layers
    }
    dtype, kv_dtype = torch_dtype(problem.dtype), torch_dtype(problem.kv_dtype)
    return [
        prefill_module(kernel, dtype, kv_dtype, (dim, dim), window=window, cap=cap)
        for kernel in kernels
        for dim, window, cap in variants
    ]
