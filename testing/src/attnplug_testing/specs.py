"""One layer of each kind, and backend specs that claim everything except what a test removes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from attnplug import AttentionKind, BackendSpec, Capabilities, DType, Feature, GraphLevel, LayerSpec, ModelSpec, Role
from attnplug.declare.version import CONTRACT_VERSION
from attnplug.host import MLADims
from attnplug.linear import LinearDims

MHA = LayerSpec(0, AttentionKind.MHA, 8, 2, 64, 64, 0.125)
MLA = LayerSpec(0, AttentionKind.MLA, 16, 16, 192, 128, 0.07, mla=MLADims(512, 128, 64))
GDN = LayerSpec(0, AttentionKind.GDN, 4, 4, 16, 16, 0.25, linear=LinearDims(4, 2, 16, 16, 8, 4))

EVERYTHING = Capabilities(
    kinds=frozenset(AttentionKind),
    devices=frozenset({"cpu", "cuda"}),
    dtypes=frozenset(DType),
    roles=frozenset(Role),
    features=frozenset(Feature),
    max_speculative_tokens=1 << 40,
    trees=True,
    cuda_graph=GraphLevel.ALWAYS,
)


def spec(capabilities: Capabilities = EVERYTHING, **changes: Any) -> BackendSpec:
    """Return the spec of a backend ``fast`` with these capabilities; ``changes`` replace its other fields."""
    fields: dict[str, Any] = {
        "name": "fast",
        "summary": "a backend of a test",
        "contract": CONTRACT_VERSION,
        "factory": "attnplug:nothing",
    }
    return BackendSpec(**{**fields, "capabilities": capabilities, **changes})


def model(*layers: LayerSpec) -> ModelSpec:
    """Return a model with these layers, numbered from 0."""
    return ModelSpec("m", "test", tuple(replace(layer, layer_id=i) for i, layer in enumerate(layers)), 4096)


def claiming(**less: Any) -> BackendSpec:
    """Return a spec that claims everything, with these capabilities replaced."""
    return spec(replace(EVERYTHING, **less))


sizes = st.sampled_from([1, 2, 8, 16, 48, 64, 128])
page_sizes = st.none() | st.frozensets(sizes, min_size=1)
