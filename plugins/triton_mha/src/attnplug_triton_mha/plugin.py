"""Backend spec of ``triton_mha``. Importing this module does not import Triton."""

from __future__ import annotations

from collections.abc import Iterator, Set
from pathlib import Path

from attnplug import (
    AttentionKind,
    BackendSpec,
    CacheLayout,
    Capabilities,
    DType,
    Feature,
    GraphLevel,
    Problem,
    Refusal,
    RefusalCode,
    Role,
    Setting,
    WorkspaceKind,
    hookimpl,
)

LIBRARY = "triton>=3.6,<4"
DTYPES = frozenset({DType.BFLOAT16, DType.FLOAT16})
FP8_FORMATS = frozenset({DType.FLOAT8_E4M3, "fp8_per_token_head"})
FP8_SM = 89
"""First compute capability with an instruction that converts float8_e4m3fn."""
NVFP4 = "nvfp4"
MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 16
COUNTERS = WorkspaceKind("triton-mha-counters", zeroed=True)
"""Arrival counters of split-KV programs: zero before and after each call."""


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="triton_mha",
            summary="MHA and GQA by Triton kernels: paged decode, verify and extend, planned on the device",
            contract="1.0",
            factory="attnplug_triton_mha.factory:triton_mha",
            requires=((LIBRARY, "triton"),),
            check=refusals,
            preference=50,  # below flashattention, which prefills faster
            capabilities=Capabilities(
                kinds=frozenset({AttentionKind.MHA}),
                devices=frozenset({"cuda"}),
                min_sm=80,
                dtypes=DTYPES,
                kv_dtypes=DTYPES | FP8_FORMATS | {NVFP4},
                kv_matches_dtype=True,
                roles=frozenset({Role.PREFILL, Role.DECODE, Role.DRAFT}),
                features=frozenset({Feature.SLIDING_WINDOW, Feature.LOGIT_CAP, Feature.SINKS}),
                max_speculative_tokens=64,
                cuda_graph=GraphLevel.ALWAYS,
                needs_cpu_seq_lens=False,
                extras=frozenset({"lse", "out", "sinks"}),
                layouts=frozenset(CacheLayout),
                trees=True,
                invariant=frozenset({"run", "batch", "graph", "chunks", "verify"}),
            ),
        )
    ]


@hookimpl
def attnplug_rankings() -> list[Path]:
    return [Path(__file__).parent / "tables"]


@hookimpl
def attnplug_workspace_kinds() -> list[WorkspaceKind]:
    return [COUNTERS]


def fp8_refusals(problem: Problem, formats: Set[str]) -> Iterator[Refusal]:
    """Yield a refusal if the cache is in one of ``formats``, which store fp8, and the GPU cannot convert it."""
    if problem.kv_dtype in formats and problem.sm is not None and problem.sm < FP8_SM:
        message = f"a cache in {problem.kv_dtype} requires SM {FP8_SM} or newer; this GPU is SM {problem.sm}"
        allowed = sorted([NVFP4, *(str(dtype) for dtype in DTYPES if problem.dtype in (None, dtype))])
        yield Refusal(RefusalCode.KV_DTYPE, message, str(problem.kv_dtype), allowed, Setting.KV_DTYPE)


def refusals(problem: Problem, role: Role | None, options: None) -> Iterator[Refusal]:
    """Yield refusals that capabilities cannot express: head dims, and fp8 on older GPUs."""
    yield from fp8_refusals(problem, FP8_FORMATS)
    if role is None or role is Role.LINEAR or problem.model is None:
        return
    given = {(layer.head_dim, layer.v_head_dim): None for layer in problem.model.full_layers if layer.mla is None}
    for dims in given:
        if all(0 < width <= MAX_HEAD_DIM and width % HEAD_DIM_MULTIPLE == 0 for width in dims) and dims[0] >= dims[1]:
            continue
        yield Refusal(
            RefusalCode.HEAD_DIM,
            f"head dims (qk, v) {dims} are not supported, only multiples of {HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM}, "
            "with v not wider than qk",
            list(dims),
            f"multiples of {HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM}",
            role.setting,
        )
