"""Declaration of the backend. Imports no torch."""

from __future__ import annotations

from attnplug import AttentionKind, BackendSpec, CacheLayout, Capabilities, DType, Feature, hookimpl


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="fossil_wrapper",
            summary="one child for prefill and one for decode",
            contract="1.0",
            factory="fossil_wrapper.backend:build",
            capabilities=Capabilities(
                kinds=frozenset({AttentionKind.MHA}),
                devices=frozenset({"cpu", "cuda"}),
                dtypes=frozenset({DType.FLOAT32, DType.BFLOAT16}),
                layouts=frozenset({CacheLayout.TOKEN_MAJOR, CacheLayout.HEAD_MAJOR, CacheLayout.STRIDED}),
                features=frozenset({Feature.SLIDING_WINDOW}),
                extras=frozenset({"lse", "out"}),
            ),
        )
    ]
