"""Backend specs of ``torch`` and ``fla``. Importing this module does not import flash-linear-attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attnplug import (
    AttentionKind,
    BackendSpec,
    CacheLayout,
    Capabilities,
    DType,
    GraphLevel,
    Problem,
    Refusal,
    Role,
    WorkspaceKind,
    hookimpl,
)

LIBRARY = "fla-core>=0.6,<0.7"
_KINDS = frozenset(kind for kind in AttentionKind if kind.is_linear)
_ANY_LAYOUT = frozenset(CacheLayout)
"""Linear states are not part of the KV cache, so its format and layout do not matter."""
_LEVELS = frozenset({"run", "batch", "graph", "chunks", "verify"})
MAX_KEY_DIM = 256
"""Maximum key dim of the library's delta-rule kernels."""
COUNTERS = WorkspaceKind("hybrid-linear-counters", zeroed=True)
"""Arrival counters of programs, int32: zero before and after each kernel."""


@hookimpl
def attnplug_workspace_kinds() -> list[WorkspaceKind]:
    return [COUNTERS]


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="torch",
            summary="linear attention with torch alone: correct everywhere, the reference for the rest",
            contract="1.0",
            factory="attnplug_hybrid_linear.torch_backend:TorchLinearBackend",
            capabilities=Capabilities(
                kinds=_KINDS,
                devices=None,
                dtypes=frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16}),
                kv_dtypes=None,
                roles=frozenset({Role.LINEAR}),
                layouts=_ANY_LAYOUT,
                max_speculative_tokens=64,
                invariant=_LEVELS,
            ),
        ),
        BackendSpec(
            name="fla",
            summary="linear attention in Triton: flash-linear-attention's chunks, and decode on states in place",
            contract="1.0",
            factory="attnplug_hybrid_linear.fla_factory:fla",
            requires=((LIBRARY, "fla"),),
            check=refusals,
            preference=100,
            capabilities=Capabilities(
                kinds=_KINDS,
                devices=frozenset({"cuda"}),
                min_sm=80,
                dtypes=frozenset({DType.BFLOAT16, DType.FLOAT16}),
                kv_dtypes=None,
                roles=frozenset({Role.LINEAR}),
                layouts=_ANY_LAYOUT,
                max_speculative_tokens=64,
                cuda_graph=GraphLevel.ALWAYS,
                invariant=_LEVELS,
            ),
        ),
    ]


def refusals(problem: Problem, role: Role | None, options: Any) -> Iterator[Refusal]:
    """Yield refusals that capabilities cannot express: the key dim of the delta rule."""
    if problem.model is not None and role is Role.LINEAR:
        delta = (AttentionKind.GDN, AttentionKind.KDA)
        widths = {layer.linear.key_dim for layer in problem.model.layers if layer.kind in delta and layer.linear}
        if widths and max(widths) > MAX_KEY_DIM:
            message = f"delta-rule keys of dim {max(widths)} are not supported, only up to {MAX_KEY_DIM}"
            yield Refusal("key_dim", message, max(widths), MAX_KEY_DIM)
