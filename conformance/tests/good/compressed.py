"""A correct backend of compressed layers: torch_sparse. Mutants change its inputs slightly."""

from __future__ import annotations

from dataclasses import replace  # noqa: F401 # broken variants use it

from attnplug import AttentionKind, BackendSpec, Capabilities, DType, Feature  # broken variants use it
from attnplug_sparse.pools import COMPRESSED  # noqa: F401 # broken variants use it
from attnplug_sparse.torch_sparse import TorchSparseBackend

SPEC = BackendSpec(
    name="good_compressed",
    summary="good",
    contract="1.0",
    factory="good_compressed:Backend",
    capabilities=Capabilities(
        kinds=frozenset({AttentionKind.MLA}),
        devices=frozenset({"cpu"}),
        dtypes=frozenset({DType.FLOAT32}),
        features=frozenset({Feature.SLIDING_WINDOW, Feature.SINKS, Feature.SPARSE, Feature.COMPRESSED}),
        max_speculative_tokens=8,
        extras=frozenset({"entries", "lse", "out", "selected", "sinks"}),
        invariant=frozenset({"run", "batch", "graph", "chunks", "verify"}),
    ),
)


class Backend(TorchSparseBackend):
    def choose(self, index, layer, dims, plan):
        return super().choose(index, layer, dims, plan)

    def attend(self, q, layer, plan, new, extras):
        return super().attend(q, layer, plan, new, extras)
