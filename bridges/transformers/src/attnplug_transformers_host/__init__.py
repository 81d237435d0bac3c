"""Host description of transformers: supported versions, option names, fixed properties.

``attnplug explain --host transformers`` and the running bridge both use it. Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attnplug import AttentionKind, DType, Feature, GraphLevel, LayerSpec, Problem, Refusal, RefusalCode, Setting
from attnplug.host import HostSpec

_OPTIONS = {
    Setting.ATTENTION_BACKEND: 'attn_implementation="attnplug:…"',
    Setting.PREFILL_ATTENTION_BACKEND: "attnplug_transformers.register(…)",
    Setting.DECODE_ATTENTION_BACKEND: "attnplug_transformers.register(…)",
    Setting.BACKEND_OPTION: "attnplug_transformers.register(…)",
    Setting.DEVICE: "device_map=",
    Setting.DTYPE: "dtype=",
    Setting.PAGE_SIZE: "ContinuousBatchingConfig(page_size=…)",
    Setting.CUDA_GRAPH: "ContinuousBatchingConfig(use_cuda_graph=…)",
}


def render(key: str) -> str | None:
    """transformers' name for a setting; ``None`` if it has none."""
    if "." in key:  # an option of a backend
        return f"attnplug_transformers.register(…): option {key}"
    return _OPTIONS.get(Setting(key)) if key in set(Setting) else None


def fit(problem: Problem) -> Problem:
    """Adapt a problem to transformers.

    Only softmax layers reach the bridge. MLA layers arrive as MHA, because transformers expands their keys and values.
    No CUDA graphs are required: decode steps over static caches are captured if the backend claims them. Drafts are
    verified by ordinary extends.
    """
    model = problem.model
    if model is not None:
        model = replace(model, layers=tuple(_as_mha(layer) for layer in model.full_layers))
    kv_dtype = problem.dtype if problem.kv_dtype is None else problem.kv_dtype
    return replace(
        problem, model=model, kv_dtype=kv_dtype, cuda_graph=GraphLevel.NEVER, wants_graphs=False, speculative_tokens=0
    )


def refuse(problem: Problem) -> list[Refusal]:
    """Refusals that hold for every backend."""
    return list(_refusals(problem))


def _refusals(problem: Problem) -> Iterator[Refusal]:
    readable = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
    if problem.kv_dtype is not None and problem.kv_dtype not in readable:
        yield Refusal(
            RefusalCode.KV_DTYPE,
            "transformers passes keys and values to attention in the model's dtype, even from quantized caches; a "
            "cache in another format would never be read",
            str(problem.kv_dtype),
            [str(dtype) for dtype in readable],
            Setting.KV_DTYPE,
        )
    model = problem.model
    if model is None:
        return
    if not model.full_layers:
        message = f"{model.name} has no softmax attention; transformers runs linear attention itself"
        yield Refusal(RefusalCode.KIND, message, sorted(model.kinds), [AttentionKind.MHA, AttentionKind.MLA])
    sparse = [layer.layer_id for layer in model.full_layers if Feature.SPARSE in layer.features]
    if sparse:
        message = f"layer {sparse[0]} selects tokens by a mask; backends derive the visible tokens from lengths"
        yield Refusal(RefusalCode.FEATURE, message, str(Feature.SPARSE))
    if model.compressed_layers:
        message = "compressed entries (DeepSeek-V4) are not supported; use attn_implementation='eager'"
        yield Refusal(RefusalCode.FEATURE, message, str(Feature.COMPRESSED))


def _as_mha(layer: LayerSpec) -> LayerSpec:
    if layer.mla is None or layer.compressed is not None:  # the latter are refused
        return layer
    return replace(layer, kind=AttentionKind.MHA, mla=None, num_kv_heads=layer.num_heads)


HOST = HostSpec(
    title="transformers",
    distributions=("transformers",),
    versions=">=5.17,<5.24",
    render=render,
    fit=fit,
    refuse=refuse,
)
