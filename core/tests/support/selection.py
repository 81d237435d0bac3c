"""Backends and models to select from, as plain data: nothing here can be built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attnplug import AttentionKind, BackendSpec, Capabilities, DType, LayerSpec, ModelSpec, Role
from attnplug.declare.spec import Registered, Source
from attnplug.declare.version import CONTRACT_VERSION
from attnplug.host import MLADims, Registry
from attnplug.linear import LinearDims

MHA = LayerSpec(0, AttentionKind.MHA, 8, 2, 64, 64, 0.125)
MLA = LayerSpec(0, AttentionKind.MLA, 16, 16, 192, 128, 0.07, mla=MLADims(512, 128, 64))
GDN = LayerSpec(1, AttentionKind.GDN, 4, 4, 16, 16, 0.25, linear=LinearDims(4, 2, 16, 16, 8, 4))

LLAMA = ModelSpec("llama", "llama", (MHA,), 4096)
DEEPSEEK = ModelSpec("deepseek", "deepseek_v3", (MLA,), 4096)
HYBRID = ModelSpec("hybrid", "qwen3_next", (MHA, GDN), 4096)
LINEAR_ONLY = ModelSpec("mamba", "mamba2", (GDN,), 4096)

PLAIN = Capabilities(kinds={"mha"}, devices={"cpu", "cuda"}, dtypes=set(DType))
CPU_FLOAT32 = Capabilities(kinds={"mha"}, devices={"cpu"}, dtypes={"float32"})
LINEAR = Capabilities(kinds={"gdn"}, devices={"cpu"}, dtypes=set(DType), roles={"linear"})


def backend(name: str, capabilities: Capabilities = PLAIN, *, target: str = "nowhere", **fields: Any) -> Registered:
    spec = BackendSpec(
        name=name,
        summary="a backend of a test",
        contract=CONTRACT_VERSION,
        capabilities=capabilities,
        **{"factory": "attnplug:nothing", **fields},
    )
    return Registered(spec, Source(name, target, f"{name}-dist", "1.2"))


def registry(*backends: Registered) -> Registry:
    return Registry({each.spec.name: each for each in backends})


def names(found: Mapping[Role, Any]) -> dict[str, str | None]:
    return {str(role): choice.chosen.spec.name if choice.chosen else None for role, choice in found.items()}
