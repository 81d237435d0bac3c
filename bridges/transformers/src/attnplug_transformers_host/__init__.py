"""What transformers is to attnplug, as data. Imports neither torch nor transformers.

``attnplug explain --host transformers`` reads it, and the bridge itself judges by the same functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attnplug import AttentionKind, DType, Feature, GraphLevel, LayerSpec, Problem, Refusal, RefusalCode, Setting
from attnplug.host import HostSpec

_SPELLINGS = {
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
    """A setting as users of transformers write it."""
    if "." in key:  # an option of a backend
        return f"attnplug_transformers.register(…): option {key}"
    return _SPELLINGS.get(Setting(key)) if key in set(Setting) else None


def fit(problem: Problem) -> Problem:
    """What the bridge asks of a backend. Only softmax layers reach it, and latent ones arrive as MHA: transformers
    expands their keys and values. It captures no graphs, and a draft is checked by an extend like any other."""
    model = problem.model
    if model is not None:
        model = replace(model, layers=tuple(_expanded(layer) for layer in model.full_layers))
    kv_dtype = problem.dtype if problem.kv_dtype is None else problem.kv_dtype
    return replace(
        problem, model=model, kv_dtype=kv_dtype, cuda_graph=GraphLevel.NEVER, wants_graphs=False, speculative_tokens=0
    )


def refuse(problem: Problem) -> list[Refusal]:
    """What the bridge cannot carry of a model."""
    return list(_refusals(problem))


def _refusals(problem: Problem) -> Iterator[Refusal]:
    fp8 = (DType.FLOAT8_E4M3, DType.FP8_DS_MLA)
    if problem.kv_dtype in fp8:
        yield Refusal(
            RefusalCode.KV_DTYPE,
            "transformers gives attention its keys and values in the model's dtype, quantized caches too; an fp8 cache "
            "would never be read",
            str(problem.kv_dtype),
            [str(dtype) for dtype in DType if dtype not in fp8],
            Setting.KV_DTYPE,
        )
    model = problem.model
    if model is None:
        return
    if not model.full_layers:
        message = f"{model.name} has no softmax attention; transformers runs linear attention by itself"
        yield Refusal(RefusalCode.KIND, message, sorted(model.kinds), [AttentionKind.MHA, AttentionKind.MLA])
    sparse = [layer.layer_id for layer in model.full_layers if Feature.SPARSE in layer.features]
    if sparse:
        message = (
            f"layer {sparse[0]} attends to chosen tokens, by a mask; backends derive what a token sees from lengths"
        )
        yield Refusal(RefusalCode.FEATURE, message, str(Feature.SPARSE))


def _expanded(layer: LayerSpec) -> LayerSpec:
    if layer.mla is None:
        return layer
    return replace(layer, kind=AttentionKind.MHA, mla=None, num_kv_heads=layer.num_heads)


HOST = HostSpec(
    title="transformers",
    distributions=("transformers",),
    versions=">=5.17,<5.23",
    render=render,
    fit=fit,
    refuse=refuse,
)
