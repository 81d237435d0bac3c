"""Declaration of the backend. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attnplug import (
    AttentionKind,
    BackendSpec,
    CacheLayout,
    Capabilities,
    DType,
    Feature,
    Problem,
    Refusal,
    RefusalCode,
    Role,
    hookimpl,
)

LARGEST_PAGE = 256


@dataclass(frozen=True)
class FossilOptions:
    accumulate: Literal["float32", "float64"] = "float32"


def check(problem: Problem, role: Role | None, options: FossilOptions) -> list[Refusal]:
    size = problem.page_size
    if size is None or size <= LARGEST_PAGE:
        return []
    return [Refusal(RefusalCode.PAGE_SIZE, f"page size {size} exceeds {LARGEST_PAGE}", size, LARGEST_PAGE, "page_size")]


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="fossil_mha",
            summary="one request at a time",
            contract="1.0",
            factory="fossil_mha.backend:FossilMHA",
            capabilities=Capabilities(
                kinds=frozenset({AttentionKind.MHA}),
                devices=frozenset({"cpu", "cuda"}),
                dtypes=frozenset({DType.FLOAT32, DType.BFLOAT16}),
                layouts=frozenset({CacheLayout.TOKEN_MAJOR, CacheLayout.HEAD_MAJOR, CacheLayout.STRIDED}),
                features=frozenset({Feature.SLIDING_WINDOW}),
                extras=frozenset({"lse", "out"}),
                invariant=frozenset({"run", "batch"}),
            ),
            options=FossilOptions,
            check=check,
        )
    ]
