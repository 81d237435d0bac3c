"""Declaration of the backend. Imports no torch."""

from __future__ import annotations

from attnplug import AttentionKind, BackendSpec, Capabilities, DType, Role, hookimpl


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="fossil_linear",
            summary="Lightning attention, one token at a time",
            contract="1.0",
            factory="fossil_linear.backend:FossilLinear",
            capabilities=Capabilities(
                kinds=frozenset({AttentionKind.LIGHTNING}),
                devices=frozenset({"cpu", "cuda"}),
                dtypes=frozenset({DType.FLOAT32, DType.BFLOAT16}),
                roles=frozenset({Role.LINEAR}),
            ),
        )
    ]
