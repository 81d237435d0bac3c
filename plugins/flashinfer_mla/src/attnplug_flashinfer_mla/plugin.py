"""Backend spec of ``flashinfer_mla``. Importing this module does not import FlashInfer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from attnplug import (
    AttentionKind,
    BackendSpec,
    Capabilities,
    DType,
    ExtendPath,
    GraphLevel,
    Problem,
    Refusal,
    RefusalCode,
    Role,
    Setting,
    hookimpl,
)
from attnplug.kernels import requirement_refusal
from attnplug_flashinfer_mla.options import FlashInferMLAOptions, KernelName

DTYPES = frozenset({DType.BFLOAT16, DType.FLOAT16})
LIBRARY = "flashinfer-python>=0.6.12,<0.8"
READS_FP8 = "flashinfer-python>=0.6.14,<0.8"
"""Versions whose paged calls take ``ckv_scale`` and ``kpe_scale`` for an fp8 cache."""
PLANS_CUTLASS = "flashinfer-python>=0.7.0.dev0,<0.8"
"""Versions that plan the CUTLASS kernel. In earlier ones each call copied the layer's whole cache."""
KERNEL = "flashinfer_mla.kernel"
KERNEL_SMS = {"fa3": (90, 90), "cutlass": (100, 110)}
FP8_SM = 90
MAX_HEADS = 128
"""Maximum heads per rank: all heads of a query token must fit one query tile."""

CAPABILITIES = Capabilities(
    kinds=frozenset({AttentionKind.MLA}),
    devices=frozenset({"cuda"}),
    min_sm=80,
    dtypes=DTYPES,
    kv_dtypes=DTYPES | {DType.FLOAT8_E4M3},
    kv_matches_dtype=True,
    roles=frozenset({Role.PREFILL, Role.DECODE, Role.DRAFT}),
    mla_dims=frozenset({(512, 64)}),
    max_heads=MAX_HEADS,
    layers_alike=True,
    max_speculative_tokens=64,
    cuda_graph=GraphLevel.UNIFORM,
    extras=frozenset({"lse", "out", "q_rope"}),
    mla_extend=frozenset(ExtendPath),
)


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="flashinfer_mla",
            summary="MLA by FlashInfer: paged decode, verify and extend; prefill as MHA in one shot or by chunks",
            contract="1.0",
            factory="attnplug_flashinfer_mla.factory:FlashInferMLABackend",
            requires=((LIBRARY, "flashinfer"),),
            options=FlashInferMLAOptions,
            check=refusals,
            kernel_builds="attnplug_flashinfer_mla.jit_modules:kernel_builds",
            preference=100,
            capabilities=CAPABILITIES,
        )
    ]


@hookimpl
def attnplug_rankings() -> list[Path]:
    return [Path(__file__).parent / "tables"]


def refusals(problem: Problem, role: Role | None, options: FlashInferMLAOptions) -> Iterator[Refusal]:
    """Yield refusals that capabilities cannot express: fp8 cache support and limits of the requested kernel."""
    if problem.kv_dtype == DType.FLOAT8_E4M3:
        yield from _fp8_refusals(problem)
    yield from kernel_refusals(problem, options)
    if options.kernel == "cutlass" and (older := _version_refusal(PLANS_CUTLASS)) is not None:
        message = f"flashinfer-python {older.value} does not plan kernel=cutlass"
        yield Refusal("kernel", message, options.kernel, None, KERNEL, older.advice)


def _fp8_refusals(problem: Problem) -> Iterator[Refusal]:
    """Yield refusals of an fp8 cache: it requires SM 90, bfloat16 queries and ``READS_FP8``."""
    dtype, value, allowed = problem.dtype, str(problem.kv_dtype), [str(DType.BFLOAT16), str(DType.FLOAT16)]
    if problem.sm not in (None, FP8_SM):
        message = f"a cache in {value} requires SM {FP8_SM}; this GPU is SM {problem.sm}"
        matching = [name for name in allowed if dtype in (None, name)]
        yield Refusal(RefusalCode.KV_DTYPE, message, value, matching, Setting.KV_DTYPE)
    if dtype not in (None, DType.BFLOAT16):
        message = f"an fp8 cache is read with bfloat16 queries only, not with {dtype}"
        yield Refusal(RefusalCode.DTYPE, message, str(dtype), [str(DType.BFLOAT16)], Setting.DTYPE)
    if (older := _version_refusal(READS_FP8)) is not None:
        message = f"flashinfer-python {older.value} reads no fp8 cache"
        yield Refusal(RefusalCode.KV_DTYPE, message, value, allowed, Setting.KV_DTYPE, older.advice)


def kernel_refusals(problem: Problem, options: FlashInferMLAOptions) -> Iterator[Refusal]:
    """Yield refusals of the requested kernel. The backend repeats this check when it is built."""
    kernel, sm = options.kernel, problem.sm
    others = [name for name in get_args(KernelName) if name != kernel]
    low, high = KERNEL_SMS.get(kernel, (0, 1000))
    if sm is not None and not low <= sm <= high:
        wanted = f"SM {low}" if low == high else f"SM {low}–{high}"
        yield Refusal("kernel", f"kernel={kernel} requires {wanted}; this GPU is SM {sm}", kernel, others, KERNEL)
    if kernel != "cutlass":
        return
    if problem.cuda_graph > GraphLevel.NEVER:
        level = problem.cuda_graph.name
        message = f"CUDA graphs are requested at level {level}, but kernel=cutlass does not support CUDA graphs"
        yield Refusal(RefusalCode.CUDA_GRAPH, message, level, [GraphLevel.NEVER.name], KERNEL)
    if wrong := list(_cutlass_limits(problem)):
        yield Refusal("kernel", f"kernel=cutlass requires {'; '.join(wrong)}", kernel, others, KERNEL)


def _cutlass_limits(problem: Problem) -> Iterator[str]:
    """Yield violated limits of the CUTLASS kernel. It hard-codes all of these values and checks only the first two."""
    layers = () if problem.model is None else problem.model.full_layers
    for layer in [layer for layer in layers if layer.mla is not None][
        :1
    ]:  # layers_alike: the others have the same shape
        assert layer.mla is not None
        heads = layer.num_heads // problem.tensor_parallel
        if heads != MAX_HEADS:
            yield f"{MAX_HEADS} heads per rank, not {heads}"
        if layer.mla.row_dim != 576:
            yield f"row width 576, not {layer.mla.row_dim}"
        if abs(layer.scale - 192**-0.5) > 5e-7:
            yield f"scale {192**-0.5:.6f}, not {layer.scale:.6f}"
    if problem.page_size is not None and 128 % problem.page_size:
        yield f"a page size that divides 128, not {problem.page_size}"


def _version_refusal(requirement: str) -> Refusal | None:
    """Return the refusal of an installed FlashInfer outside ``requirement``. The spec reports a missing one."""
    refusal = requirement_refusal(requirement)
    return None if refusal is None or refusal.value is None else refusal
