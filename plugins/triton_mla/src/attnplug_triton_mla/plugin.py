"""What the plugin says of its backend. Triton is imported when the backend is built, and not before."""

from __future__ import annotations

from collections.abc import Iterator

from attnplug import (
    CONTRACT_VERSION,
    AttentionKind,
    BackendSpec,
    CacheLayout,
    Capabilities,
    DType,
    ExtendPath,
    GraphLevel,
    LayerSpec,
    Problem,
    Refusal,
    RefusalCode,
    Role,
    Setting,
    WorkspaceKind,
    hookimpl,
    module_refusal,
)
from attnplug_triton_mla.options import TritonMLAOptions

DTYPES = frozenset({DType.BFLOAT16, DType.FLOAT16})
LIBRARY = "triton>=3.6,<4"
MOST_HEADS = 128
"""Heads a rank can have. The kernels would take more, and nobody has tested them with more."""
FP8_SM = 89
"""The first GPUs on which Triton converts from float8_e4m3fn."""
COUNTERS = WorkspaceKind("triton-mla-counters", zeroed=True)
"""Counters that every call leaves at zero."""


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="triton_mla",
            summary="MLA by Triton kernels: paged decode, verify and absorbed extend, planned on the device",
            contract=CONTRACT_VERSION,
            factory="attnplug_triton_mla.factory:triton_mla",
            requires=(LIBRARY,),
            options=TritonMLAOptions,
            check=refusals,
            preference=50,  # below the libraries': faster at few requests, slower with many heads and large batches
            capabilities=Capabilities(
                kinds=frozenset({AttentionKind.MLA}),
                devices=frozenset({"cuda"}),
                min_sm=80,
                dtypes=DTYPES,
                kv_dtypes=DTYPES | {DType.FLOAT8_E4M3},
                roles=frozenset({Role.PREFILL, Role.DECODE, Role.DRAFT}),
                mla_dims=frozenset({(512, 64), (512, 0), (256, 64), (256, 0)}),
                max_speculative_tokens=8,
                cuda_graph=GraphLevel.ALWAYS,
                needs_cpu_seq_lens=False,
                extras=frozenset({"lse", "out"}),
                mla_extend=frozenset({ExtendPath.ABSORBED}),
                layouts=frozenset({CacheLayout.TOKEN_MAJOR, CacheLayout.HEAD_MAJOR}),
            ),
        )
    ]


@hookimpl
def attnplug_workspace_kinds() -> list[WorkspaceKind]:
    return [COUNTERS]


def refusals(problem: Problem, role: Role | None, options: TritonMLAOptions) -> Iterator[Refusal]:
    """What the capabilities cannot say: types that must agree, what one plan asks of all layers, a Triton in pieces."""
    dtype, kv_dtype = problem.dtype, problem.kv_dtype
    if kv_dtype is DType.FLOAT8_E4M3:
        if problem.sm is not None and problem.sm < FP8_SM:
            message = f"an fp8 cache is read on SM {FP8_SM} or newer, this is SM {problem.sm}"
            allowed = [str(DType.BFLOAT16), str(DType.FLOAT16)] if dtype is None else [str(dtype)]
            yield Refusal(RefusalCode.KV_DTYPE, message, str(kv_dtype), allowed, Setting.KV_DTYPE)
    elif {dtype, kv_dtype} == DTYPES:
        message = f"a cache in {kv_dtype} cannot be read with {dtype} queries"
        allowed = [str(dtype), str(DType.FLOAT8_E4M3)]
        yield Refusal(RefusalCode.KV_DTYPE, message, str(kv_dtype), allowed, Setting.KV_DTYPE)
    if problem.model is not None and role is not None:
        layers = [layer for layer in problem.model.full_layers if layer.mla is not None]
        yield from _layer_refusals(layers, problem.tensor_parallel)
    if (missing := module_refusal("triton", LIBRARY)) is not None:
        yield missing


def _layer_refusals(layers: list[LayerSpec], ranks: int) -> Iterator[Refusal]:
    heads = max((layer.num_heads // ranks for layer in layers), default=0)
    if heads > MOST_HEADS:
        message = f"{heads} heads on one rank are too many, at most {MOST_HEADS}"
        yield Refusal("heads", message, heads, MOST_HEADS, Setting.TENSOR_PARALLEL)
    shapes = sorted({(layer.num_heads // ranks, *_dims(layer)) for layer in layers})
    if len(shapes) > 1:
        listed = "; ".join(f"{heads} heads, kv_lora_rank {rank}, rope {rope}" for heads, rank, rope in shapes)
        yield Refusal("layers", f"one plan serves all layers, but they differ: {listed}", [list(s) for s in shapes])


def _dims(layer: LayerSpec) -> tuple[int, int]:
    assert layer.mla is not None
    return layer.mla.kv_lora_rank, layer.mla.qk_rope_head_dim
