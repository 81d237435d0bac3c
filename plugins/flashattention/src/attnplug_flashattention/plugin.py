"""What the plugin says of its backend. A kernel library is imported only where an answer about CUDA depends on it."""

from __future__ import annotations

from collections.abc import Iterator

from attnplug import (
    CONTRACT_VERSION,
    AttentionKind,
    BackendSpec,
    Capabilities,
    DType,
    ExtendPath,
    Feature,
    GraphLevel,
    LayerSpec,
    Problem,
    Refusal,
    RefusalCode,
    Role,
    hookimpl,
)
from attnplug_flashattention.options import FlashAttentionOptions

DTYPES = frozenset({DType.BFLOAT16, DType.FLOAT16})
WIDEST_HEAD = 256
HEAD_STEP = 16


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="flashattention",
            summary="MHA and GQA by FlashAttention (flash-attn-4, or torch's own kernel); MLA prefill as MHA",
            contract=CONTRACT_VERSION,
            factory="attnplug_flashattention.backend:FlashAttentionBackend",
            options=FlashAttentionOptions,
            check=refusals,
            preference=60,  # below those made for MLA
            capabilities=Capabilities(
                kinds=frozenset({AttentionKind.MHA, AttentionKind.MLA}),
                devices=frozenset({"cuda"}),
                min_sm=80,
                dtypes=DTYPES,
                roles=frozenset({Role.PREFILL, Role.DECODE, Role.DRAFT}),
                features=frozenset({Feature.SLIDING_WINDOW, Feature.LOGIT_CAP, Feature.SINKS}),
                max_speculative_tokens=64,
                cuda_graph=GraphLevel.UNIFORM,
                extras=frozenset({"lse", "sinks"}),
                mla_extend=frozenset({ExtendPath.ONE_SHOT, ExtendPath.CHUNKED}),
            ),
        )
    ]


def refusals(problem: Problem, role: Role | None) -> Iterator[Refusal]:
    """What the capabilities cannot say: types that must agree, widths of heads, MLA's roles, what the library can."""
    dtype, kv_dtype = problem.dtype, problem.kv_dtype
    if {dtype, kv_dtype} == DTYPES:
        message = f"a cache in {kv_dtype} cannot be read with {dtype} queries"
        yield Refusal(RefusalCode.KV_DTYPE, message, str(kv_dtype), [str(dtype)], "--kv-dtype")
    if role is Role.LINEAR:
        return
    layers = () if problem.model is None or role is None else problem.model.full_layers
    given: list[Refusal] = []
    for layer in layers:
        for refusal in _layer_refusals(layer, role):
            if refusal not in given:
                given.append(refusal)
    yield from given
    prefills_mla = role is Role.PREFILL and any(layer.mla is not None for layer in layers)
    if prefills_mla and problem.cuda_graph is GraphLevel.UNIFORM:
        message = "CUDA graphs of MLA are asked for at level UNIFORM, but a verify by this backend cannot be captured"
        allowed = [GraphLevel.NEVER.name, GraphLevel.DECODE.name]
        yield Refusal(RefusalCode.CUDA_GRAPH, message, problem.cuda_graph.name, allowed, "--cuda-graph")
    if problem.device == "cuda":
        yield from _library_refusals(problem, layers, captures=not prefills_mla)


def _layer_refusals(layer: LayerSpec, role: Role | None) -> Iterator[Refusal]:
    option = None if role is None else role.option
    if layer.mla is not None:
        if role is not Role.PREFILL:
            yield Refusal(
                "mla_role",
                f"MLA is served in the role prefill only, not in {role}: there is no kernel over latent rows; use "
                f"{Role.PREFILL.option} flashattention, and another backend to decode",
                str(role),
                [str(Role.PREFILL)],
                option,
            )
        for feature in sorted(layer.features & {Feature.SLIDING_WINDOW, Feature.SINKS}):
            message = f"MLA with the feature {feature} is not supported: a chunk of a prefix has no place for it"
            yield Refusal(RefusalCode.FEATURE, message, str(feature), [str(Feature.LOGIT_CAP)], option)
    dims = layer.head_dim, layer.v_head_dim
    if not all(0 < width <= WIDEST_HEAD and width % HEAD_STEP == 0 for width in dims) or dims[0] < dims[1]:
        yield Refusal(
            RefusalCode.HEAD_DIM,
            f"head dims (qk, v) {dims} are not supported, only multiples of {HEAD_STEP} up to {WIDEST_HEAD}, values "
            "not wider than keys",
            list(dims),
            f"multiples of {HEAD_STEP} up to {WIDEST_HEAD}",
            option,
        )


def _library_refusals(problem: Problem, layers: tuple[LayerSpec, ...], *, captures: bool) -> Iterator[Refusal]:
    """What torch's kernel, the one that is always there, cannot do; and why flash-attn-4 is not there to do it."""
    capped = any(layer.logit_cap is not None for layer in layers)
    graphs = captures and problem.cuda_graph > GraphLevel.NEVER
    if not capped and not graphs:
        return
    from attnplug_flashattention import kernels  # imports torch: seconds

    why = None if problem.sm is None else kernels.fa4_problem(problem.sm, layers)
    option = None
    if why is not None:
        why = f"flash-attn-4 {why}"
    elif (error := kernels.import_error(kernels.load_fa4)) is not None:
        why, option = f"flash-attn-4 {_cannot(error)}", kernels.INSTALL["fa4"]
    else:
        return
    if capped and (error := kernels.import_error(kernels.load_fa2)) is not None:
        message = f"a cap on logits needs flash-attn-4 or flash-attn 2: {why}, and flash-attn 2 {_cannot(error)}"
        allowed = [str(Feature.SLIDING_WINDOW), str(Feature.SINKS)]
        install = option or kernels.INSTALL["fa2"]
        yield Refusal(RefusalCode.FEATURE, message, str(Feature.LOGIT_CAP), allowed, install)
    if graphs:
        message = f"CUDA graphs need flash-attn-4, and {why}"
        allowed = [GraphLevel.NEVER.name]
        yield Refusal(RefusalCode.CUDA_GRAPH, message, problem.cuda_graph.name, allowed, option or "--cuda-graph")


def _cannot(error: BaseException) -> str:
    return f"cannot be imported ({type(error).__name__}: {error})"
