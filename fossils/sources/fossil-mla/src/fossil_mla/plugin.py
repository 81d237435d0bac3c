"""Declaration of the backend. Imports no torch."""

from __future__ import annotations

from attnplug import (
    AttentionKind,
    BackendSpec,
    CacheLayout,
    Capabilities,
    DType,
    ExtendPath,
    GraphLevel,
    hookimpl,
)


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="fossil_mla",
            summary="absorbed, chunked and captured",
            contract="1.0",
            factory="fossil_mla.backend:FossilMLA",
            capabilities=Capabilities(
                kinds=frozenset({AttentionKind.MLA}),
                devices=frozenset({"cpu", "cuda"}),
                dtypes=frozenset({DType.FLOAT32, DType.BFLOAT16}),
                layouts=frozenset({CacheLayout.TOKEN_MAJOR, CacheLayout.STRIDED}),
                mla_extend=frozenset({ExtendPath.ABSORBED, ExtendPath.ONE_SHOT, ExtendPath.CHUNKED}),
                cuda_graph=GraphLevel.UNIFORM,
                ragged_graphs=True,
                max_speculative_tokens=4,
                extras=frozenset({"lse"}),
            ),
        )
    ]
