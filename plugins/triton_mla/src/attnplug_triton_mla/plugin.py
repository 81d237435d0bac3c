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
from attnplug_sparse.plugin import FP8_DS_MLA
from attnplug_sparse.refusals import index_refusals
from attnplug_triton_mha.plugin import DTYPES, LIBRARY, NVFP4, fp8_refusals

FP8_PER_TOKEN_HEAD = "fp8_per_token_head"
FP8_FORMATS = frozenset({str(DType.FLOAT8_E4M3), FP8_PER_TOKEN_HEAD, FP8_DS_MLA.name})
COUNTERS = WorkspaceKind("triton-mla-counters", zeroed=True)
"""Arrival counters of split-KV programs: zero before and after each call."""


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="triton_mla",
            summary="MLA by Triton kernels: paged decode, verify and prefill, planned on the device",
            contract="1.0",
            factory="attnplug_triton_mla.factory:triton_mla",
            requires=((LIBRARY, "triton"),),
            check=refusals,
            preference=50,  # below the libraries: slower with many heads and large batches
            capabilities=Capabilities(
                kinds=frozenset({AttentionKind.MLA}),
                devices=frozenset({"cuda"}),
                min_sm=80,
                dtypes=DTYPES,
                kv_dtypes=DTYPES | FP8_FORMATS | {NVFP4},
                kv_matches_dtype=True,
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
                ragged_graphs=True,
                layouts=frozenset(CacheLayout),
                trees=True,
                index_dtypes=DTYPES | {DType.FLOAT8_E4M3},
                coordinators=frozenset({"hisparse"}),
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


def refusals(problem: Problem, role: Role | None, options: None) -> Iterator[Refusal]:
    """Yield refusals that capabilities cannot express: unsupported sparse indexes, and fp8 on older GPUs."""
    yield from fp8_refusals(problem, FP8_FORMATS)
    yield from index_refusals(problem, role)
