"""What the plugin says of its backend. FlashMLA is imported when the backend is built, and not before."""

from __future__ import annotations

from attnplug import (
    CONTRACT_VERSION,
    AttentionKind,
    BackendSpec,
    Capabilities,
    DType,
    GraphLevel,
    PageSizes,
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
        )
    ]
