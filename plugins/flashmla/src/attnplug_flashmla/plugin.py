"""What the plugin says of its backend. FlashMLA is imported when the backend is built, and not before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attnplug import (
    CONTRACT_VERSION,
    AttentionKind,
    BackendSpec,
    CacheLayout,
    Capabilities,
    DType,
    GraphLevel,
    LayerSpec,
    PageSizes,
    Problem,
    Refusal,
    RefusalCode,
    Role,
    Setting,
    hookimpl,
    module_refusal,
)

DTYPES = frozenset({DType.BFLOAT16, DType.FLOAT16})
LIBRARY = "sgl-flash-mla>=1.0,<2"
MOST_HEADS = 128
"""Heads a rank can have. The kernel would take more, and nobody has tested it with more."""


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="flashmla",
            summary="MLA decode and verify by FlashMLA on Hopper GPUs; prefill is another backend's",
            contract=CONTRACT_VERSION,
            factory="attnplug_flashmla.factory:FlashMLABackend",
            requires=(LIBRARY,),
            check=refusals,
            preference=90,  # FlashInfer's calls take a third of the host's time, and need no second backend for prefill
            capabilities=Capabilities(
                kinds=frozenset({AttentionKind.MLA}),
                devices=frozenset({"cuda"}),
                min_sm=90,
                max_sm=90,
                dtypes=DTYPES,
                roles=frozenset({Role.DECODE}),
                page_sizes=PageSizes.of(64),
                mla_dims=frozenset({(512, 64)}),
                max_speculative_tokens=8,
                cuda_graph=GraphLevel.UNIFORM,
                needs_cpu_seq_lens=False,
                extras=frozenset({"lse", "out"}),
                mla_extend=frozenset(),
                layouts=frozenset({CacheLayout.TOKEN_MAJOR, CacheLayout.HEAD_MAJOR}),
            ),
        )
    ]


def refusals(problem: Problem, role: Role | None, options: Any) -> Iterator[Refusal]:
    """What the capabilities cannot say: types that must agree, heads a rank has, and whether FlashMLA is whole."""
    dtype, kv_dtype = problem.dtype, problem.kv_dtype
    if {dtype, kv_dtype} == DTYPES:
        message = f"a cache in {kv_dtype} cannot be read with {dtype} queries"
        yield Refusal(RefusalCode.KV_DTYPE, message, str(kv_dtype), [str(dtype)], Setting.KV_DTYPE)
    if problem.model is not None and role is not None:
        layers = [layer for layer in problem.model.full_layers if layer.mla is not None]
        yield from _head_refusals(layers, problem.tensor_parallel)
    if (missing := module_refusal("flash_mla", LIBRARY)) is not None:
        yield missing


def _head_refusals(layers: list[LayerSpec], ranks: int) -> Iterator[Refusal]:
    heads = sorted({layer.num_heads // ranks for layer in layers})
    if heads and heads[-1] > MOST_HEADS:
        message = f"{heads[-1]} heads on one rank are too many, at most {MOST_HEADS}"
        yield Refusal("heads", message, heads[-1], MOST_HEADS, Setting.TENSOR_PARALLEL)
    if len(heads) > 1:
        listed = ", ".join(map(str, heads))
        yield Refusal("layers", f"one plan serves all layers, but they have {listed} heads on a rank", heads)
