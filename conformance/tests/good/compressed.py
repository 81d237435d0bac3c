"""A good backend of compressed layers: torch_native. Mutants are small changes of what it is given."""

from __future__ import annotations

from dataclasses import replace  # noqa: F401 # broken variants use it

from attnplug import COMPRESSED, AttentionKind, BackendSpec, Capabilities, DType, Feature  # noqa: F401 # broken variants use it
from attnplug.host import TorchNativeBackend

SPEC = BackendSpec(
    name="good_compressed",
    summary="good",
    contract="0.9",
    factory="good_compressed:Backend",
    capabilities=Capabilities(
        kinds=frozenset({AttentionKind.MLA}),
        devices=frozenset({"cpu"}),
        dtypes=frozenset({DType.FLOAT32}),
        features=frozenset({Feature.SLIDING_WINDOW, Feature.SINKS, Feature.SPARSE, Feature.COMPRESSED}),
        max_speculative_tokens=8,
        extras=frozenset({"entries", "lse", "out", "selected", "sinks"}),
    ),
)


class Backend(TorchNativeBackend):
    def choose(self, index, layer, dims, plan):
        return super().choose(index, layer, dims, plan)

    def attend(self, q, layer, plan, new, extras):
        return super().attend(q, layer, plan, new, extras)
