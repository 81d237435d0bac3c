"""Capabilities and checks shared by the Blackwell MLA backends. Imports no kernel library."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attnplug import (
    AttentionKind,
    Capabilities,
    DType,
    ExtendPath,
    GraphLevel,
    PageSizes,
    Problem,
    Refusal,
    RefusalCode,
    Role,
)
from attnplug_flashinfer_mla.plugin import MAX_HEADS

SMS = (100, 103)
KERNEL_PAGES = (32, 64)
LIBRARY = "flashinfer-python>=0.6.18,<0.8"
FLASHINFER = (LIBRARY, "flashinfer")
"""Requirement of every backend of this family."""


def capabilities(
    *,
    kv_dtypes: frozenset[DType] = frozenset({DType.BFLOAT16, DType.FLOAT8_E4M3}),
    roles: frozenset[Role] = frozenset({Role.PREFILL, Role.DECODE, Role.DRAFT}),
    mla_extend: frozenset[ExtendPath] = frozenset(ExtendPath),
) -> Capabilities:
    """Return the capabilities of the family. A variant passes what it narrows."""
    return Capabilities(
        kinds=frozenset({AttentionKind.MLA}),
        devices=frozenset({"cuda"}),
        min_sm=SMS[0],
        max_sm=SMS[-1],
        dtypes=frozenset({DType.BFLOAT16}),  # the kernels return bfloat16, whatever their inputs
        kv_dtypes=kv_dtypes,
        roles=roles,
        page_sizes=PageSizes.of(*KERNEL_PAGES),
        mla_dims=frozenset({(512, 64)}),
        max_heads=MAX_HEADS,
        layers_alike=True,
        max_speculative_tokens=64,
        cuda_graph=GraphLevel.UNIFORM,
        extras=frozenset({"lse", "out"}),
        mla_extend=mla_extend,
    )


def refusals(problem: Problem, role: Role | None, options: Any) -> Iterator[Refusal]:
    """Yield refusals that capabilities cannot express: SM versions inside the declared range without kernels."""
    if problem.sm is not None and SMS[0] < problem.sm < SMS[-1]:  # capabilities refuse those outside
        listed = " or ".join(map(str, SMS))
        yield Refusal(RefusalCode.SM, f"requires SM {listed}; this GPU is SM {problem.sm}", problem.sm, list(SMS))
