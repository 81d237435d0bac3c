"""What the plugin says of its backend. Kernel libraries are imported when it is built, and not before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
    module_refusal,
    requirement_refusal,
)
from attnplug_flashattention.options import FlashAttentionOptions

DTYPES = frozenset({DType.BFLOAT16, DType.FLOAT16})
FA4 = "flash-attn-4>=4.0.0b36"
FA2 = "flash-attn>=2.8,<3"
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
                extras=frozenset({"lse", "out", "sinks"}),
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
    unfit = None if problem.sm is None else fa4_problem(problem.sm, layers)
    if unfit is not None:
        why, option = f"flash-attn-4 {unfit}", None
    elif (lacking := _lacking(FA4, "flash_attn.cute")) is not None:
        why, option = lacking
    else:
        return
    if capped and (lacking := _lacking(FA2, "flash_attn.flash_attn_interface")) is not None:
        message = f"a cap on logits needs flash-attn-4 or flash-attn 2: {why}, and {lacking[0]}"
        allowed = [str(Feature.SLIDING_WINDOW), str(Feature.SINKS)]
        yield Refusal(RefusalCode.FEATURE, message, str(Feature.LOGIT_CAP), allowed, option or lacking[1])
    if graphs:
        message = f"CUDA graphs need flash-attn-4, and {why}"
        allowed = [GraphLevel.NEVER.name]
        yield Refusal(RefusalCode.CUDA_GRAPH, message, problem.cuda_graph.name, allowed, option or "--cuda-graph")


def _lacking(requirement: str, module: str) -> tuple[str, str | None] | None:
    """What is wrong with an installation of a library, and what to do; ``None`` if nothing is."""
    if (refusal := requirement_refusal(requirement)) is not None:
        state = "is not installed" if refusal.value is None else f"is {refusal.value}, not {refusal.allowed}"
        return f"{requirement.partition('>')[0]} {state}", refusal.option
    if (refusal := module_refusal(module, requirement)) is not None:
        return refusal.message, refusal.option
    return None


def fa4_problem(sm: int, layers: Iterable[LayerSpec]) -> str | None:
    """Why FlashAttention 4 is not for this GPU or these layers; ``None`` if it is."""
    if not 90 <= sm < 110:
        return f"needs SM 90 to 103, this is SM {sm}"
    for layer in layers:
        dims = layer.head_dim, layer.v_head_dim
        if sm >= 100 and max(dims) > 128 and dims not in ((192, 128), (256, 256)):
            return f"takes head dims up to 128, (192, 128) or (256, 256) on SM {sm}, layer {layer.layer_id} has {dims}"
    return None
