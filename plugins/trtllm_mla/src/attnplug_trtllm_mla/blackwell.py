"""What the backends of this family declare alike. Imports no kernel library."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attnplug import (
    AttentionKind,
    CacheLayout,
    Capabilities,
    DType,
    ExtendPath,
    GraphLevel,
    PageSizes,
    Problem,
    Refusal,
    RefusalCode,
    Role,
    module_refusal,
)
from attnplug_flashinfer_mla.plugin import layer_refusals

SMS = (100, 103)
KERNEL_PAGES = (32, 64)
LIBRARY = "flashinfer-python>=0.6.18,<0.8"


def capabilities(
    *,
    kv_dtypes: frozenset[DType] = frozenset({DType.BFLOAT16, DType.FLOAT8_E4M3}),
    roles: frozenset[Role] = frozenset({Role.PREFILL, Role.DECODE, Role.DRAFT}),
    mla_extend: frozenset[ExtendPath] = frozenset(ExtendPath),
) -> Capabilities:
    """What all of them can do, unless a variant narrows it."""
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
        max_speculative_tokens=64,
        cuda_graph=GraphLevel.UNIFORM,
        extras=frozenset({"lse", "out"}),
        mla_extend=mla_extend,
        layouts=frozenset({CacheLayout.TOKEN_MAJOR, CacheLayout.HEAD_MAJOR}),
    )


def refusals(problem: Problem, role: Role | None, options: Any) -> Iterator[Refusal]:
    """What the capabilities cannot say."""
    if problem.sm is not None and SMS[0] < problem.sm < SMS[-1]:  # others are outside the declared range
        listed = " or ".join(map(str, SMS))
        yield Refusal(RefusalCode.SM, f"it needs SM {listed}, this is SM {problem.sm}", problem.sm, list(SMS))
    if problem.model is not None and role is not None:
        yield from layer_refusals(problem)
    if (missing := module_refusal("flashinfer", LIBRARY)) is not None:
        yield missing
