"""Backend spec of ``triton_mla``. Importing this module does not import Triton."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from attnplug import (
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
    Role,
    WorkspaceKind,
    hookimpl,
)
from attnplug_sparse.refusals import index_refusals
from attnplug_triton_mla.options import TritonMLAOptions

DTYPES = frozenset({DType.BFLOAT16, DType.FLOAT16})
LIBRARY = "triton>=3.6,<4"
COUNTERS = WorkspaceKind("triton-mla-counters", zeroed=True)
"""Arrival counters of split-KV programs: zero before and after each call."""


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="triton_mla",
            summary="MLA by Triton kernels: paged decode, verify and prefill, planned on the device",
            contract="0.9",
            factory="attnplug_triton_mla.factory:triton_mla",
            requires=((LIBRARY, "triton"),),
            options=TritonMLAOptions,
            check=refusals,
            preference=50,  # below the libraries: slower with many heads and large batches
            capabilities=Capabilities(
                kinds=frozenset({AttentionKind.MLA}),
                devices=frozenset({"cuda"}),
                min_sm=80,
                dtypes=DTYPES,
                kv_dtypes=DTYPES | {DType.FLOAT8_E4M3},
                kv_matches_dtype=True,
                min_fp8_sm=89,  # the first with an instruction that converts float8_e4m3fn
                roles=frozenset({Role.PREFILL, Role.DECODE, Role.DRAFT}),
                mla_dims=frozenset({(512, 64), (512, 0), (256, 64), (256, 0)}),
                max_heads=128,  # tested up to this number
                layers_alike=True,
                max_speculative_tokens=64,
                cuda_graph=GraphLevel.ALWAYS,
                needs_cpu_seq_lens=False,
                features=frozenset({Feature.SPARSE}),
                extras=frozenset({"lse", "out", "q_rope", "selected"}),
                mla_extend=frozenset(ExtendPath),
                layouts=frozenset(CacheLayout),
                trees=True,
                index_dtypes=DTYPES | {DType.FLOAT8_E4M3},
                coordinators=frozenset({"hisparse"}),
            ),
        )
    ]


@hookimpl
def attnplug_rankings() -> list[Path]:
    return [Path(__file__).parent / "tables"]


@hookimpl
def attnplug_workspace_kinds() -> list[WorkspaceKind]:
    return [COUNTERS]


def refusals(problem: Problem, role: Role | None, options: TritonMLAOptions) -> Iterator[Refusal]:
    """Yield refusals that capabilities cannot express: unsupported sparse indexes."""
    yield from index_refusals(problem, role)
