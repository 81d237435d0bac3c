"""What the plugin says of its backend. FlashInfer is imported when the backend is built, and not before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

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
    hookimpl,
    module_refusal,
    requirement_refusal,
)
from attnplug_flashinfer_mla.options import FlashInferMLAOptions, KernelName

DTYPES = frozenset({DType.BFLOAT16, DType.FLOAT16})
LIBRARY = "flashinfer-python>=0.6.12,<0.8"
READS_FP8 = "flashinfer-python>=0.6.14,<0.8"
"""Versions whose paged calls take the scales of an fp8 cache."""
PLANS_CUTLASS = "flashinfer-python>=0.7.0.dev0,<0.8"
"""Versions that plan the CUTLASS kernel. Before, each of its calls copied a whole layer's cache."""
KERNEL = "flashinfer_mla.kernel"
KERNEL_SMS = {"fa3": (90, 90), "cutlass": (100, 110)}
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
    layouts=frozenset({CacheLayout.TOKEN_MAJOR, CacheLayout.HEAD_MAJOR}),
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


def refusals(problem: Problem, role: Role | None, options: FlashInferMLAOptions) -> Iterator[Refusal]:
    """What the capabilities cannot say: types that must agree, heads a rank has, what this FlashInfer lacks, and what
    the kernel that was asked for does not take."""
    yield from _type_refusals(problem)
    if problem.model is not None and role is not None:
        yield from layer_refusals(problem)
    if (missing := module_refusal("flashinfer", LIBRARY)) is not None:
        yield missing
    if problem.kv_dtype is DType.FLOAT8_E4M3 and (older := _older(READS_FP8)) is not None:
        message = f"flashinfer-python {older.value} reads no fp8 cache"
        allowed = [str(DType.BFLOAT16), str(DType.FLOAT16)]
        value = str(problem.kv_dtype)
        yield Refusal(RefusalCode.KV_DTYPE, message, value, allowed, Setting.KV_DTYPE, older.advice)
    yield from kernel_refusals(problem, options)
    if options.kernel == "cutlass" and (older := _older(PLANS_CUTLASS)) is not None:
        message = f"flashinfer-python {older.value} does not plan kernel=cutlass"
        yield Refusal("kernel", message, options.kernel, None, KERNEL, older.advice)


def _type_refusals(problem: Problem) -> Iterator[Refusal]:
    """The cache has the queries' type; or it is fp8, where queries are bfloat16 and the device is SM 90."""
    dtype, kv_dtype = problem.dtype, problem.kv_dtype
    on_sm_90 = problem.sm in (None, 90)
    allowed = [str(dtype)] if dtype in DTYPES else []
    if kv_dtype is DType.FLOAT8_E4M3:
        if dtype not in (None, DType.BFLOAT16):
            message = f"an fp8 cache is read with bfloat16 queries only, not with {dtype}"
            yield Refusal(RefusalCode.DTYPE, message, str(dtype), [str(DType.BFLOAT16)], Setting.DTYPE)
        if not on_sm_90:
            message = f"an fp8 cache is read on SM 90 only, this is SM {problem.sm}"
            yield Refusal(RefusalCode.KV_DTYPE, message, str(kv_dtype), allowed, Setting.KV_DTYPE)
    elif {dtype, kv_dtype} == DTYPES:
        if dtype is DType.BFLOAT16 and on_sm_90:
            allowed.append(str(DType.FLOAT8_E4M3))
        message = f"a cache in {kv_dtype} cannot be read with {dtype} queries"
        yield Refusal(RefusalCode.KV_DTYPE, message, str(kv_dtype), allowed, Setting.KV_DTYPE)


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
            Setting.TENSOR_PARALLEL,
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


def kernel_refusals(problem: Problem, options: FlashInferMLAOptions) -> Iterator[Refusal]:
    """What the kernel that was asked for does not take. The backend asks the same when it is built."""
    kernel, sm = options.kernel, problem.sm
    others = [name for name in get_args(KernelName) if name != kernel]
    low, high = KERNEL_SMS.get(kernel, (0, 1000))
    if sm is not None and not low <= sm <= high:
        wanted = f"SM {low}" if low == high else f"SM {low} to {high}"
        yield Refusal("kernel", f"kernel={kernel} needs {wanted}, this is SM {sm}", kernel, others, KERNEL)
    if kernel != "cutlass":
        return
    if problem.cuda_graph > GraphLevel.NEVER:
        level = problem.cuda_graph.name
        message = f"CUDA graphs are asked for at level {level}, and kernel=cutlass decodes outside of them only"
        yield Refusal(RefusalCode.CUDA_GRAPH, message, level, [GraphLevel.NEVER.name], KERNEL)
    if wrong := list(_cutlass_limits(problem)):
        yield Refusal("kernel", f"kernel=cutlass needs {'; '.join(wrong)}", kernel, others, KERNEL)


def _cutlass_limits(problem: Problem) -> Iterator[str]:
    """Its kernel takes these numbers for granted, the scale too, and looks at none of them but the first two."""
    layers = () if problem.model is None else problem.model.full_layers
    for layer in [layer for layer in layers if layer.mla is not None][:1]:  # the others are like it
        assert layer.mla is not None
        heads = layer.num_heads // problem.tensor_parallel
        if heads != MOST_HEADS:
            yield f"heads on a rank {MOST_HEADS}, this is {heads}"
        if layer.mla.row_dim != 576:
            yield f"row width 576, this is {layer.mla.row_dim}"
        if abs(layer.scale - 192**-0.5) > 5e-7:
            yield f"scale {192**-0.5:.6f}, this is {layer.scale:.6f}"
    if problem.page_size is not None and 128 % problem.page_size:
        yield f"a page size that divides 128, this is {problem.page_size}"


def _older(requirement: str) -> Refusal | None:
    """The refusal where FlashInfer is installed in another version; one that is not there is the spec's to name."""
    refusal = requirement_refusal(requirement)
    return None if refusal is None or refusal.value is None else refusal
