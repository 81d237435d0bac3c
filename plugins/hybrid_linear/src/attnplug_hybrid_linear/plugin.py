"""What the plugin says of its backends. Imports neither torch nor a kernel library."""

from __future__ import annotations

from attnplug import CONTRACT_VERSION, AttentionKind, BackendSpec, Capabilities, DType, Role, hookimpl


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="torch",
            summary="linear attention with torch alone: correct everywhere, the reference for the rest",
            contract=CONTRACT_VERSION,
            factory="attnplug_hybrid_linear.torch_backend:TorchLinearBackend",
            capabilities=Capabilities(
                kinds=frozenset(kind for kind in AttentionKind if kind.is_linear),
                devices=frozenset({"cpu", "cuda"}),
                dtypes=frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16}),
                kv_dtypes=frozenset(DType),  # states are no KV cache: any type of that will do
                roles=frozenset({Role.LINEAR}),
                max_speculative_tokens=64,
            ),
        )
    ]
