"""What the plugin says of its backend. Kernel libraries are imported when it is built, and not before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attnplug import (
    AttentionKind,
    BackendSpec,
    CacheLayout,
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
    Setting,
    hookimpl,
)
from attnplug.kernels import requirement_refusal
from attnplug_flashattention.options import FlashAttentionOptions, KernelName

FA4 = "flash-attn-4>=4.0.0b36"
FA2 = "flash-attn>=2.8,<3"
TORCH = "torch>=2.11"
WIDEST_HEAD = 256
HEAD_STEP = 16
KERNEL = "flashattention.kernel"
LIBRARIES = {
    "fa4": (FA4, "flash_attn.cute"),
    "fa2": (FA2, "flash_attn.flash_attn_interface"),
    "torch": (TORCH, "torch"),
}
"""What each kernel is installed with, and the module that holds it."""


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="flashattention",
            summary="MHA and GQA by FlashAttention (flash-attn-4, or torch's own kernel); MLA prefill as MHA",
            contract="0.9",
            factory="attnplug_flashattention.backend:FlashAttentionBackend",
            uses=("flash-attn-4", "flash-attn"),
            options=FlashAttentionOptions,
            check=refusals,
            preference=60,  # below those made for MLA
            capabilities=Capabilities(
                kinds=frozenset({AttentionKind.MHA, AttentionKind.MLA}),
                devices=frozenset({"cuda"}),
                min_sm=80,
                dtypes=frozenset({DType.BFLOAT16, DType.FLOAT16}),
                kv_matches_dtype=True,
                roles=frozenset({Role.PREFILL, Role.DECODE, Role.DRAFT}),
                features=frozenset({Feature.SLIDING_WINDOW, Feature.LOGIT_CAP, Feature.SINKS}),
                max_speculative_tokens=64,
                cuda_graph=GraphLevel.UNIFORM,
                extras=frozenset({"lse", "out", "sinks"}),
                mla_extend=frozenset({ExtendPath.ONE_SHOT, ExtendPath.CHUNKED}),
                layouts=frozenset(CacheLayout),
                trees=True,
            ),
        )
    ]


def refusals(problem: Problem, role: Role | None, options: FlashAttentionOptions) -> Iterator[Refusal]:
    """What the capabilities cannot say: widths of heads, MLA's roles, and what the library can."""
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
        yield Refusal(RefusalCode.CUDA_GRAPH, message, problem.cuda_graph.name, allowed, Setting.CUDA_GRAPH)
    if problem.device == "cuda":
        if options.kernel in ("auto", "fa4"):
            yield from _split_refusals(problem, layers)
        graphs = problem.captured([role]) if not prefills_mla else GraphLevel.NEVER
        if options.kernel == "auto":
            yield from _auto_refusals(problem.sm, layers, graphs)
        else:
            yield from _kernel_refusals(options.kernel, problem.sm, layers, graphs)


def _layer_refusals(layer: LayerSpec, role: Role | None) -> Iterator[Refusal]:
    setting = None if role is None else role.setting
    if layer.mla is not None:
        if role is not Role.PREFILL:
            yield Refusal(
                "mla_role",
                f"MLA is served in the role prefill only, not in {role}: there is no kernel over latent rows; let "
                "it prefill, and another backend decode",
                str(role),
                [str(Role.PREFILL)],
                setting,
            )
        for feature in sorted(layer.features & {Feature.SLIDING_WINDOW, Feature.SINKS}):
            message = f"MLA with the feature {feature} is not supported: a chunk of a prefix has no place for it"
            yield Refusal(RefusalCode.FEATURE, message, str(feature), [str(Feature.LOGIT_CAP)], setting)
    dims = layer.head_dim, layer.v_head_dim
    if not all(0 < width <= WIDEST_HEAD and width % HEAD_STEP == 0 for width in dims) or dims[0] < dims[1]:
        yield Refusal(
            RefusalCode.HEAD_DIM,
            f"head dims (qk, v) {dims} are not supported, only multiples of {HEAD_STEP} up to {WIDEST_HEAD}, values "
            "not wider than keys",
            list(dims),
            f"multiples of {HEAD_STEP} up to {WIDEST_HEAD}",
            setting,
        )


def _split_refusals(problem: Problem, layers: tuple[LayerSpec, ...]) -> Iterator[Refusal]:
    """FlashAttention 4 reads a page of a whole key tile as smaller ones, which takes evenly spaced tokens.

    Those of head_major are not, and neither are vLLM's, which are strided.
    """
    tiles = {tile for layer in layers if layer.mla is None for tile in key_tiles(layer)}
    if problem.layout in (None, CacheLayout.TOKEN_MAJOR) or problem.page_size not in tiles:
        return
    if (problem.sm is None or fa4_problem(problem.sm, layers) is None) and _lacking(*LIBRARIES["fa4"]) is None:
        message = (
            f"flash-attn-4 reads pages of {problem.page_size} tokens in parts, for which their tokens must be evenly "
            f"spaced: those of the layout {problem.layout} are not"
        )
        yield Refusal(
            RefusalCode.LAYOUT, message, str(problem.layout), [str(CacheLayout.TOKEN_MAJOR)], Setting.PAGE_SIZE
        )


def kernel_unfit(kernel: KernelName, sm: int | None, layers: Iterable[LayerSpec]) -> Refusal | None:
    """Why a kernel that was asked for is not for this GPU or these layers; ``None`` if it is."""
    layers = tuple(layers)
    if kernel == "fa4" and sm is not None and (unfit := fa4_problem(sm, layers)) is not None:
        return Refusal("kernel", f"kernel=fa4 {unfit}", kernel, ["auto", "fa2", "torch"], KERNEL)
    capped = [layer.layer_id for layer in layers if layer.logit_cap is not None]
    if kernel == "torch" and capped:
        message = f"layer {capped[0]} caps its logits, which torch's kernel cannot"
        return Refusal(RefusalCode.FEATURE, message, str(Feature.LOGIT_CAP), _UNCAPPED, KERNEL)
    return None


def _kernel_refusals(
    kernel: KernelName, sm: int | None, layers: tuple[LayerSpec, ...], graphs: GraphLevel
) -> Iterator[Refusal]:
    """What speaks against the kernel that was asked for."""
    if (unfit := kernel_unfit(kernel, sm, layers)) is not None:
        yield unfit
    if (lacking := _lacking(*LIBRARIES[kernel])) is not None:
        why, advice = lacking
        yield Refusal(RefusalCode.REQUIREMENT, f"kernel={kernel} is asked for, and {why}", kernel, None, KERNEL, advice)
    if kernel != "fa4" and graphs > GraphLevel.NEVER:
        message = f"CUDA graphs need flash-attn-4, and kernel={kernel} is asked for"
        yield Refusal(RefusalCode.CUDA_GRAPH, message, graphs.name, [GraphLevel.NEVER.name], KERNEL)


def _auto_refusals(sm: int | None, layers: tuple[LayerSpec, ...], graphs: GraphLevel) -> Iterator[Refusal]:
    """What torch's kernel, the one that is always there, cannot do; and why flash-attn-4 is not there to do it."""
    capped = any(layer.logit_cap is not None for layer in layers)
    if not capped and not graphs:
        return
    unfit = None if sm is None else fa4_problem(sm, layers)
    if unfit is not None:
        why, advice = f"flash-attn-4 {unfit}", None
    elif (lacking := _lacking(*LIBRARIES["fa4"])) is not None:
        why, advice = lacking
    else:
        return
    if capped and (lacking := _lacking(*LIBRARIES["fa2"])) is not None:
        message = f"a cap on logits needs flash-attn-4 or flash-attn 2: {why}, and {lacking[0]}"
        yield Refusal(RefusalCode.FEATURE, message, str(Feature.LOGIT_CAP), _UNCAPPED, advice=advice or lacking[1])
    if graphs:
        message = f"CUDA graphs need flash-attn-4, and {why}"
        allowed = [GraphLevel.NEVER.name]
        yield Refusal(RefusalCode.CUDA_GRAPH, message, graphs.name, allowed, Setting.CUDA_GRAPH, advice)


_UNCAPPED = [str(Feature.SLIDING_WINDOW), str(Feature.SINKS)]


def _lacking(requirement: str, module: str) -> tuple[str, str | None] | None:
    """What is wrong with an installation of a library, and what to do; ``None`` if nothing is."""
    if (refusal := requirement_refusal(requirement, module)) is None:
        return None
    if refusal.code == RefusalCode.IMPORT:
        return refusal.message, refusal.advice
    state = "is not installed" if refusal.value is None else f"is {refusal.value}, not {refusal.allowed}"
    return f"{requirement.partition('>')[0]} {state}", refusal.advice


def fa4_problem(sm: int, layers: Iterable[LayerSpec]) -> str | None:
    """Why FlashAttention 4 is not for this GPU or these layers; ``None`` if it is."""
    if not 90 <= sm < 110:
        return f"needs SM 90 to 103, this is SM {sm}"
    for layer in layers:
        dims = layer.head_dim, layer.v_head_dim
        if sm >= 100 and max(dims) > 128 and dims not in ((192, 128), (256, 256)):
            return f"takes head dims up to 128, (192, 128) or (256, 256) on SM {sm}, layer {layer.layer_id} has {dims}"
    return None


def key_tiles(layer: LayerSpec) -> frozenset[int]:
    """Keys that FlashAttention 4 may load at a time for a layer, on SM 90 and SM 100 (``_tile_size_fwd_sm90``)."""
    if layer.head_dim <= 64:
        own = {128}
    elif layer.head_dim <= 96:
        own = {128, 144}
    elif layer.head_dim <= 128:
        own = {128}
    elif layer.head_dim <= 192:
        own = {96, 112, 128}
    else:
        own = {64, 80} if layer.sliding_window is not None else {80}
    return frozenset(own | {128})
