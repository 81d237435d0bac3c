"""Spec of acme's backend. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attnplug import AttentionKind, BackendSpec, Capabilities, DType, hookimpl


@dataclass(frozen=True)
class AcmeOptions:
    """Options that a user sets with ``--backend-option acme.KEY=VALUE``."""

    accumulate: Literal["float32", "float64"] = "float32"


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="acme",
            summary="one request at a time, without tricks",
            contract="1.0",
            factory="acme_attention.backend:AcmeBackend",
            capabilities=Capabilities(
                kinds=frozenset({AttentionKind.MHA}),
                devices=frozenset({"cpu"}),
                dtypes=frozenset({DType.FLOAT32, DType.BFLOAT16}),
            ),
            options=AcmeOptions,
            preference=10,
        )
    ]
