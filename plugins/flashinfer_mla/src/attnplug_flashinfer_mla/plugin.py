"""What the plugin says of its backend. FlashInfer is imported when the backend is built, and not before."""

from __future__ import annotations

from collections.abc import Iterator

from attnplug import (
    CONTRACT_VERSION,
    AttentionKind,
    BackendSpec,
    Capabilities,
    DType,
    ExtendPath,
    GraphLevel,
    LayerSpec,
    Problem,
    Refusal,
    RefusalCode,
    Role,
    hookimpl,
    module_refusal,
    requirement_refusal,
)
from attnplug_flashinfer_mla.options import FlashInferMLAOptions

DTYPES = frozenset({DType.BFLOAT16, DType.FLOAT16})
LIBRARY = "flashinfer-python>=0.6.12,<0.8"
READS_FP8 = "flashinfer-python>=0.6.14,<0.8"
"""Versions whose paged calls take the scales of an fp8 cache."""
MOST_HEADS = 128
"""Heads a rank can have: a query token's heads must fit one tile of the kernels."""

CAPABILITIES = Capabilities(
    kinds=frozenset({AttentionKind.MLA}),
    devices=frozenset({"cuda"}),
    min_sm=80,
    dtypes=DTYPES,
    kv_dtypes=DTYPES | {DType.FLOAT8_E4M3},
    roles=frozenset({Role.PREFILL, Role.DECODE, Role.DRAFT}),
    mla_dims=frozenset({(512, 64)}),
    max_speculative_tokens=64,
    cuda_graph=GraphLevel.UNIFORM,
    extras=frozenset({"lse", "out"}),
    mla_extend=frozenset(ExtendPath),
)


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="flashinfer_mla",
            summary="MLA by FlashInfer: paged decode, verify and extend; prefill as MHA in one shot or by chunks",
            contract=CONTRACT_VERSION,
            factory="attnplug_flashinfer_mla.factory:FlashInferMLABackend",
            requires=(LIBRARY,),
            options=FlashInferMLAOptions,
            check=refusals,
            preference=100,
            capabilities=CAPABILITIES,
        )
    ]


def refusals(problem: Problem, role: Role | None) -> Iterator[Refusal]:
    """What the capabilities cannot say: types that must agree, heads a rank has, and what this FlashInfer lacks."""
    yield from _type_refusals(problem)
    if problem.model is not None and role is not None:
        yield from layer_refusals(problem)
    if (missing := module_refusal("flashinfer", LIBRARY)) is not None:
        yield missing
    if problem.kv_dtype is DType.FLOAT8_E4M3:
        yield from _fp8_refusals()


def _type_refusals(problem: Problem) -> Iterator[Refusal]:
    """The cache has the queries' type; or it is fp8, where queries are bfloat16 and the device is SM 90."""
    dtype, kv_dtype = problem.dtype, problem.kv_dtype
    on_sm_90 = problem.sm in (None, 90)
    allowed = [str(dtype)] if dtype in DTYPES else []
    if kv_dtype is DType.FLOAT8_E4M3:
        if dtype not in (None, DType.BFLOAT16):
            message = f"an fp8 cache is read with bfloat16 queries only, not with {dtype}"
            yield Refusal(RefusalCode.DTYPE, message, str(dtype), [str(DType.BFLOAT16)], "--dtype")
        if not on_sm_90:
            message = f"an fp8 cache is read on SM 90 only, this is SM {problem.sm}"
            yield Refusal(RefusalCode.KV_DTYPE, message, str(kv_dtype), allowed, "--kv-dtype")
    elif {dtype, kv_dtype} == DTYPES:
        if dtype is DType.BFLOAT16 and on_sm_90:
            allowed.append(str(DType.FLOAT8_E4M3))
        message = f"a cache in {kv_dtype} cannot be read with {dtype} queries"
        yield Refusal(RefusalCode.KV_DTYPE, message, str(kv_dtype), allowed, "--kv-dtype")


def layer_refusals(problem: Problem) -> Iterator[Refusal]:
    """Of layers that no plan of ours could serve: too many heads, or layers that differ."""
    assert problem.model is not None
    layers = [layer for layer in problem.model.full_layers if layer.mla is not None]
    ranks = problem.tensor_parallel
    heads = {layer.num_heads // ranks for layer in layers}
    if heads and max(heads) > MOST_HEADS:
        yield Refusal(
            "heads",
            f"{max(heads)} heads on one rank are too many, at most {MOST_HEADS}",
            max(heads),
            MOST_HEADS,
            "--tensor-parallel",
        )
    shapes = sorted({_shape(layer) for layer in layers})
    if len(shapes) > 1:
        listed = "; ".join(", ".join(f"{name} {value:.4g}" for name, value in shape) for shape in shapes)
        yield Refusal("layers", f"one plan serves all layers, but they differ: {listed}", [dict(s) for s in shapes])


def _shape(layer: LayerSpec) -> tuple[tuple[str, float], ...]:
    assert layer.mla is not None
    return (
        ("heads", layer.num_heads),
        ("kv_lora_rank", layer.mla.kv_lora_rank),
        ("nope", layer.mla.qk_nope_head_dim),
        ("rope", layer.mla.qk_rope_head_dim),
        ("v", layer.v_head_dim),
        ("scale", layer.scale),
    )


def _fp8_refusals() -> Iterator[Refusal]:
    older = requirement_refusal(READS_FP8)
    if older is not None and older.value is not None:  # one that is not installed is the spec's to name
        yield Refusal(
            RefusalCode.KV_DTYPE,
            f"flashinfer-python {older.value} reads no fp8 cache",
            str(DType.FLOAT8_E4M3),
            [str(DType.BFLOAT16), str(DType.FLOAT16)],
            older.option,
        )
