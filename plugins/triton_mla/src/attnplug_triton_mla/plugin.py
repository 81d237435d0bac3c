"""What the plugin says of its backend. Triton is imported when the backend is built, and not before."""

from __future__ import annotations

from collections.abc import Iterator

from attnplug import (
    CONTRACT_VERSION,
    AttentionKind,
    BackendSpec,
    CacheLayout,
    Capabilities,
    DType,
    ExtendPath,
    Feature,
    GraphLevel,
    Problem,
    Refusal,
    RefusalCode,
    Role,
    Setting,
    WorkspaceKind,
    hookimpl,
    index_refusals,
)
from attnplug_triton_mla.options import TritonMLAOptions

DTYPES = frozenset({DType.BFLOAT16, DType.FLOAT16})
LIBRARY = "triton>=3.6,<4"
FP8_SM = 89
"""The first GPUs on which Triton converts from float8_e4m3fn."""
COUNTERS = WorkspaceKind("triton-mla-counters", zeroed=True)
"""Counters that every call leaves at zero."""


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="triton_mla",
            summary="MLA by Triton kernels: paged decode, verify and absorbed extend, planned on the device",
            contract=CONTRACT_VERSION,
            factory="attnplug_triton_mla.factory:triton_mla",
            requires=((LIBRARY, "triton"),),
            options=TritonMLAOptions,
            check=refusals,
            preference=50,  # below the libraries': faster at few requests, slower with many heads and large batches
            capabilities=Capabilities(
                kinds=frozenset({AttentionKind.MLA}),
                devices=frozenset({"cuda"}),
                min_sm=80,
                dtypes=DTYPES,
                kv_dtypes=DTYPES | {DType.FLOAT8_E4M3},
                kv_matches_dtype=True,
                roles=frozenset({Role.PREFILL, Role.DECODE, Role.DRAFT}),
                mla_dims=frozenset({(512, 64), (512, 0), (256, 64), (256, 0)}),
                max_heads=128,  # the kernels would take more, and nobody has tested them with more
                layers_alike=True,
                max_speculative_tokens=64,
                cuda_graph=GraphLevel.ALWAYS,
                needs_cpu_seq_lens=False,
                features=frozenset({Feature.SPARSE}),
                extras=frozenset({"lse", "out", "q_rope", "selected"}),
                mla_extend=frozenset({ExtendPath.ABSORBED}),
                layouts=frozenset(CacheLayout),
                trees=True,
                index_dtypes=DTYPES | {DType.FLOAT8_E4M3},
                hisparse=True,
            ),
        )
    ]


@hookimpl
def attnplug_workspace_kinds() -> list[WorkspaceKind]:
    return [COUNTERS]


def refusals(problem: Problem, role: Role | None, options: TritonMLAOptions) -> Iterator[Refusal]:
    """What the capabilities cannot say: which GPUs read an fp8 cache, and which indexes are served."""
    if problem.kv_dtype is DType.FLOAT8_E4M3 and problem.sm is not None and problem.sm < FP8_SM:
        message = f"an fp8 cache is read on SM {FP8_SM} or newer, this is SM {problem.sm}"
        allowed = sorted(map(str, DTYPES)) if problem.dtype is None else [str(problem.dtype)]
        yield Refusal(RefusalCode.KV_DTYPE, message, str(problem.kv_dtype), allowed, Setting.KV_DTYPE)
    yield from index_refusals(problem, role)
