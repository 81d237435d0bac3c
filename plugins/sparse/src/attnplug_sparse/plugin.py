"""Plugin entry point: the spec of ``torch_sparse``, and FlashMLA's KV format. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from attnplug import (
    AttentionKind,
    BackendSpec,
    CacheLayout,
    Capabilities,
    DType,
    Feature,
    KVFormat,
    Problem,
    Refusal,
    RefusalCode,
    Role,
    RowPart,
    Setting,
    hookimpl,
)

FP8_DS_MLA = KVFormat(
    name="fp8_ds_mla",
    summary="latent rows of FlashMLA's sparse kernels: e4m3, one float32 scale per 128 values, rotary part in bfloat16",
    codec="attnplug_sparse.pools.scaled_rows",
    parts=(RowPart("float8_e4m3fn"), RowPart("float32", per=128)),
    rope="bfloat16",
    holds=frozenset({"mla"}),
    error=0.05,
    kernels={"cuda": "attnplug_sparse.pools.scaled_rows:row_writer"},
)
"""A row of 512 + 64 values has 656 bytes."""


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="torch_sparse",
            summary="Sparse and compressed MLA with torch alone: correct everywhere, the reference for the rest",
            contract="1.0",
            factory="attnplug_sparse.torch_sparse.backend:TorchSparseBackend",
            check=_check_layers,
            capabilities=Capabilities(
                kinds=frozenset({AttentionKind.MLA}),
                devices=None,
                dtypes=frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16}),
                kv_dtypes=None,
                index_dtypes=None,
                roles=frozenset({Role.PREFILL, Role.DECODE, Role.DRAFT}),
                features=frozenset(Feature),
                max_speculative_tokens=64,
                extras=frozenset({"entries", "lse", "out", "selected", "sinks"}),
                layouts=frozenset(CacheLayout),
                trees=True,
                coordinators=frozenset({"hisparse"}),
                invariant=frozenset({"run", "batch", "graph", "chunks", "verify"}),
            ),
        )
    ]


@hookimpl
def attnplug_kv_formats() -> list[KVFormat]:
    return [FP8_DS_MLA]


def _check_layers(problem: Problem, role: Role | None, options: None) -> Iterator[Refusal]:
    """Refuse models without sparse or compressed layers, which ``torch_native`` serves faster, and levels of invariance
    of compressed layers that are tested on a CPU only."""
    model = problem.model
    if model is None or role is Role.LINEAR or not model.full_layers:
        return
    if not any(layer.indexer is not None or layer.compressed is not None for layer in model.full_layers):
        yield Refusal(
            RefusalCode.FEATURE,
            f"it serves models with sparse or compressed layers, and {model.name} has none; use torch_native",
            sorted({str(feature) for layer in model.full_layers for feature in layer.features}),
            [Feature.COMPRESSED.value, Feature.SPARSE.value],
            None if role is None else role.setting,
        )
    if model.compressed_layers and problem.device != "cpu" and (levels := sorted(problem.invariant - {"run"})):
        yield Refusal(
            RefusalCode.INVARIANCE,
            f"invariance {', '.join(levels)} is requested; for compressed layers this backend claims it on a CPU only, "
            f"and run on {problem.device}",
            levels,
            ["run"],
            Setting.BATCH_INVARIANT,
        )
