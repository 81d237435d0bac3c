"""What the plugin says of its backends. FlashMLA is imported when one is built, and not before."""

from __future__ import annotations

from collections.abc import Iterator

from attnplug import (
    CONTRACT_VERSION,
    AttentionKind,
    BackendSpec,
    Capabilities,
    DType,
    Feature,
    GraphLevel,
    PageSizes,
    Problem,
    Refusal,
    RefusalCode,
    Role,
    hookimpl,
)

LIBRARY = "sgl-flash-mla>=1.0,<2"
PAGE = 64
"""Tokens of a page, as the kernel reads them."""


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="flashmla",
            summary="MLA decode and verify by FlashMLA on Hopper GPUs; prefill is another backend's",
            contract=CONTRACT_VERSION,
            factory="attnplug_flashmla.factory:FlashMLABackend",
            requires=((LIBRARY, "flash_mla"),),
            preference=90,  # FlashInfer's calls take a third of the host's time, and need no second backend for prefill
            capabilities=Capabilities(
                kinds=frozenset({AttentionKind.MLA}),
                devices=frozenset({"cuda"}),
                min_sm=90,
                max_sm=90,
                dtypes=frozenset({DType.BFLOAT16, DType.FLOAT16}),
                kv_matches_dtype=True,
                roles=frozenset({Role.DECODE}),
                page_sizes=PageSizes.of(PAGE),
                mla_dims=frozenset({(512, 64)}),
                max_heads=128,  # the kernel would take more, and nobody has tested it with more
                layers_alike=True,
                max_speculative_tokens=8,
                cuda_graph=GraphLevel.UNIFORM,
                needs_cpu_seq_lens=False,
                extras=frozenset({"lse", "out"}),
                mla_extend=frozenset(),
            ),
        ),
        BackendSpec(
            name="flashmla_sparse",
            summary="MLA over the rows that an index chooses by FlashMLA on Hopper GPUs, bfloat16 or 656 bytes a row",
            contract=CONTRACT_VERSION,
            factory="attnplug_flashmla.factory:SparseFlashMLABackend",
            requires=((LIBRARY, "flash_mla"),),
            preference=90,
            check=_check_sparse,
            capabilities=Capabilities(
                kinds=frozenset({AttentionKind.MLA}),
                devices=frozenset({"cuda"}),
                min_sm=90,
                max_sm=90,
                dtypes=frozenset({DType.BFLOAT16}),
                kv_dtypes=frozenset({DType.BFLOAT16, DType.FP8_DS_MLA}),
                index_dtypes=frozenset({DType.BFLOAT16, DType.FLOAT8_E4M3}),
                roles=frozenset({Role.PREFILL, Role.DECODE, Role.DRAFT}),
                page_sizes=PageSizes.of(PAGE),
                mla_dims=frozenset({(512, 64)}),
                features=frozenset({Feature.SPARSE}),
                max_heads=128,
                max_speculative_tokens=64,
                cuda_graph=GraphLevel.UNIFORM,
                needs_cpu_seq_lens=False,
                extras=frozenset({"lse", "out", "selected"}),
            ),
        ),
    ]


def _check_sparse(problem: Problem, role: Role | None, options: None) -> Iterator[Refusal]:
    """Dense layers are the other backend's."""
    layers = [] if problem.model is None else problem.model.full_layers
    dense = [layer.layer_id for layer in layers if layer.indexer is None]
    if dense and role is not Role.LINEAR:
        yield Refusal(
            RefusalCode.FEATURE,
            f"it attends to the rows that an index chooses, and {len(dense)} of {len(layers)} layers have no index",
            dense,
            setting=None if role is None else role.setting,
        )
