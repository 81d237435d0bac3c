"""Backend spec of ``flashattention``. Importing this module imports no kernel library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

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
MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 16
KERNEL = "flashattention.kernel"
LIBRARIES = {
    "fa4": (FA4, "flash_attn.cute"),
    "fa2": (FA2, "flash_attn.flash_attn_interface"),
    "torch": (TORCH, "torch"),
}
"""Requirement and module of each kernel."""


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="flashattention",
            summary="MHA and GQA by FlashAttention (flash-attn-4, or torch's own kernel); MLA prefill as MHA",
            contract="1.0",
            factory="attnplug_flashattention.backend:FlashAttentionBackend",
            uses=("flash-attn-4", "flash-attn"),
            options=FlashAttentionOptions,
            check=refusals,
            preference=60,  # below the MLA backends
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


@hookimpl
def attnplug_rankings() -> list[Path]:
    return [Path(__file__).parent / "tables"]


def refusals(problem: Problem, role: Role | None, options: FlashAttentionOptions) -> Iterator[Refusal]:
    """Yield refusals that capabilities cannot express: head dims, roles of MLA, limits of the kernel library."""
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
        message = "CUDA graphs of MLA are requested at level UNIFORM, but this backend's verify cannot be captured"
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
                f"MLA is supported in the role prefill only, not in {role}: there is no kernel over latent rows; use "
                "this backend for prefill and another one for decode",
                str(role),
                [str(Role.PREFILL)],
                setting,
            )
        for feature in sorted(layer.features & {Feature.SLIDING_WINDOW, Feature.SINKS}):
            message = f"MLA with the feature {feature} is not supported: prefix chunks cannot apply it"
            yield Refusal(RefusalCode.FEATURE, message, str(feature), [str(Feature.LOGIT_CAP)], setting)
    dims = layer.head_dim, layer.v_head_dim
    if not all(0 < width <= MAX_HEAD_DIM and width % HEAD_DIM_MULTIPLE == 0 for width in dims) or dims[0] < dims[1]:
        yield Refusal(
            RefusalCode.HEAD_DIM,
            f"head dims (qk, v) {dims} are not supported, only multiples of {HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM}, "
            "with v not wider than qk",
            list(dims),
            f"multiples of {HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM}",
            setting,
        )


def _split_refusals(problem: Problem, layers: tuple[LayerSpec, ...]) -> Iterator[Refusal]:
    """Yield a refusal of pages that flash-attn-4 must read as smaller ones, but whose tokens are not evenly spaced.

    It reads a page of a whole key tile as several smaller pages. That requires the layout token_major; head_major and
    strided (vLLM's) do not have evenly spaced tokens.
    """
    tiles = {tile for layer in layers if layer.mla is None for tile in key_tiles(layer)}
    if problem.layout in (None, CacheLayout.TOKEN_MAJOR) or problem.page_size not in tiles:
        return
    if (problem.sm is None or fa4_problem(problem.sm, layers) is None) and _installation_problem(
        *LIBRARIES["fa4"]
    ) is None:
        message = (
            f"flash-attn-4 splits pages of {problem.page_size} tokens into smaller ones, which requires evenly spaced "
            f"tokens; the layout {problem.layout} does not have them"
        )
        yield Refusal(
            RefusalCode.LAYOUT, message, str(problem.layout), [str(CacheLayout.TOKEN_MAJOR)], Setting.PAGE_SIZE
        )


def kernel_refusal(kernel: KernelName, sm: int | None, layers: Iterable[LayerSpec]) -> Refusal | None:
    """Return the refusal of a requested kernel for this GPU and these layers; ``None`` if it is supported."""
    layers = tuple(layers)
    if kernel == "fa4" and sm is not None and (unfit := fa4_problem(sm, layers)) is not None:
        return Refusal("kernel", f"kernel=fa4 {unfit}", kernel, ["auto", "fa2", "torch"], KERNEL)
    capped = [layer.layer_id for layer in layers if layer.logit_cap is not None]
    if kernel == "torch" and capped:
        message = f"layer {capped[0]} caps its logits, which torch's kernel does not support"
        return Refusal(RefusalCode.FEATURE, message, str(Feature.LOGIT_CAP), _FEATURES_OF_TORCH, KERNEL)
    return None


def _kernel_refusals(
    kernel: KernelName, sm: int | None, layers: tuple[LayerSpec, ...], graphs: GraphLevel
) -> Iterator[Refusal]:
    """Yield refusals of the requested kernel: GPU, layers, library, CUDA graphs."""
    if (unfit := kernel_refusal(kernel, sm, layers)) is not None:
        yield unfit
    if (lacking := _installation_problem(*LIBRARIES[kernel])) is not None:
        why, advice = lacking
        yield Refusal(RefusalCode.REQUIREMENT, f"kernel={kernel} is requested, but {why}", kernel, None, KERNEL, advice)
    if kernel != "fa4" and graphs > GraphLevel.NEVER:
        message = f"CUDA graphs require flash-attn-4, but kernel={kernel} is requested"
        yield Refusal(RefusalCode.CUDA_GRAPH, message, graphs.name, [GraphLevel.NEVER.name], KERNEL)


def _auto_refusals(sm: int | None, layers: tuple[LayerSpec, ...], graphs: GraphLevel) -> Iterator[Refusal]:
    """Yield refusals of features that torch's kernel lacks, with the reason why flash-attn-4 is unavailable."""
    capped = any(layer.logit_cap is not None for layer in layers)
    if not capped and not graphs:
        return
    unfit = None if sm is None else fa4_problem(sm, layers)
    if unfit is not None:
        why, advice = f"flash-attn-4 {unfit}", None
    elif (lacking := _installation_problem(*LIBRARIES["fa4"])) is not None:
        why, advice = lacking
    else:
        return
    if capped and (lacking := _installation_problem(*LIBRARIES["fa2"])) is not None:
        message = f"a logit cap requires flash-attn-4 or flash-attn 2: {why}, and {lacking[0]}"
        yield Refusal(
            RefusalCode.FEATURE, message, str(Feature.LOGIT_CAP), _FEATURES_OF_TORCH, advice=advice or lacking[1]
        )
    if graphs:
        message = f"CUDA graphs require flash-attn-4, but {why}"
        allowed = [GraphLevel.NEVER.name]
        yield Refusal(RefusalCode.CUDA_GRAPH, message, graphs.name, allowed, Setting.CUDA_GRAPH, advice)


_FEATURES_OF_TORCH = [str(Feature.SLIDING_WINDOW), str(Feature.SINKS)]


def _installation_problem(requirement: str, module: str) -> tuple[str, str | None] | None:
    """Return the problem with a library's installation and the advice; ``None`` if it meets the requirement."""
    if (refusal := requirement_refusal(requirement, module)) is None:
        return None
    if refusal.code == RefusalCode.IMPORT:
        return refusal.message, refusal.advice
    state = "is not installed" if refusal.value is None else f"is {refusal.value}, not {refusal.allowed}"
    return f"{requirement.partition('>')[0]} {state}", refusal.advice


def fa4_problem(sm: int, layers: Iterable[LayerSpec]) -> str | None:
    """Return why flash-attn-4 does not support this GPU or these layers; ``None`` if it does."""
    if not 90 <= sm < 110:
        return f"requires SM 90–103; this GPU is SM {sm}"
    for layer in layers:
        dims = layer.head_dim, layer.v_head_dim
        if sm >= 100 and max(dims) > 128 and dims not in ((192, 128), (256, 256)):
            return (
                f"supports head dims up to 128, (192, 128) or (256, 256) on SM {sm}; layer {layer.layer_id} has {dims}"
            )
    return None


def key_tiles(layer: LayerSpec) -> frozenset[int]:
    """Return the key tile sizes that flash-attn-4 may use for a layer on SM 90 and SM 100 (``_tile_size_fwd_sm90``)."""
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
