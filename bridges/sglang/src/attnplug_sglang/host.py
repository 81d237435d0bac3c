"""Host description of SGLang: option names, supported versions, fixed properties. Imports neither SGLang nor torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from attnplug import CacheLayout, DType, Feature, GraphLevel, LayerSpec, Problem, Refusal, RefusalCode, Setting
from attnplug.host import AttnplugError, HostSpec, split_settings

PREFIX = "attnplug:"
"""Prefix of attnplug's backends in SGLang's options."""
AUTO = "auto"
OPTIONS = "ATTNPLUG_OPTIONS"
"""Environment variable with backend options: ``NAME.KEY=VALUE``, separated by spaces.

SGLang has no free-form option that reaches an attention backend. Its own kernels use environment variables too, and
every process of a server inherits them.
"""
DEFAULT_PAGE_SIZE = 1
"""SGLang's default of ``--page-size``."""
SPARSE_PAGE_SIZE = 64
"""Page size that SGLang sets for sparse models."""
FP8_DS_MLA = "fp8_ds_mla"
"""KV format of sparse models with ``--kv-cache-dtype fp8_e4m3``, unless SGLang would use kernels that read rows without
scales. ``attnplug-sparse`` provides it."""
INDEX_BY_HOST = 0
"""``IndexerDims.shares`` of layers whose rows SGLang's indexer selects: backends have no index of their own."""

_OPTIONS: Mapping[str, str] = {
    Setting.ATTENTION_BACKEND: "--attention-backend",
    Setting.PREFILL_ATTENTION_BACKEND: "--prefill-attention-backend",
    Setting.DECODE_ATTENTION_BACKEND: "--decode-attention-backend",
    Setting.DRAFT_ATTENTION_BACKEND: "--speculative-draft-attention-backend",
    Setting.BACKEND_OPTION: OPTIONS,
    Setting.DEVICE: "--device",
    Setting.DTYPE: "--dtype",
    Setting.KV_DTYPE: "--kv-cache-dtype",
    Setting.PAGE_SIZE: "--page-size",
    Setting.CUDA_GRAPH: "--disable-cuda-graph",
    Setting.SPECULATIVE_TOKENS: "--speculative-num-draft-tokens",
    Setting.SPECULATIVE_TOPK: "--speculative-eagle-topk",
    Setting.SPECULATIVE_ATTENTION_MODE: "--speculative-attention-mode",
    Setting.TENSOR_PARALLEL: "--tp-size",
    Setting.MAX_BATCH: "--max-running-requests",
    Setting.NUM_PAGES: "--max-total-tokens",
    Setting.CONTEXT_LENGTH: "--context-length",
    Setting.CHUNKED_PREFILL_SIZE: "--chunked-prefill-size",
    Setting.BATCH_INVARIANT: "--enable-deterministic-inference",
}


def render(key: str) -> str | None:
    """SGLang's name for a setting; ``None`` if it has none."""
    name, dot, _ = key.partition(".")
    return f"{key} in {OPTIONS}" if dot and name else _OPTIONS.get(key)


def requested_invariance(arguments: Any) -> frozenset[str]:
    """Levels of invariance that SGLang's switch requests. SGLang itself aligns chunks of prompts (E3)."""
    return frozenset({"run", "batch", "graph"} if arguments.enable_deterministic_inference else ())


def given_options(environment: Mapping[str, str] | None = None) -> dict[str, dict[str, str]]:
    """Options by backend. Raises :class:`UsageError` if the variable is malformed."""
    return split_settings((os.environ if environment is None else environment).get(OPTIONS, "").split())


def fit(problem: Problem) -> Problem:
    """Adapt a problem to SGLang.

    Its caches are token-major, and it captures decode and the verification of drafts. With speculation, lengths on the
    CPU are upper bounds, unless everything runs there. Linear layers and drafts run on SGLang's own backends. Its
    indexer selects the rows of sparse layers. One graph serves all lengths of a batch size.
    """
    speculates, model, page_size = problem.speculative_tokens > 0, problem.model, problem.page_size
    level = GraphLevel.NEVER
    if problem.device == "cuda":
        level = GraphLevel.UNIFORM if speculates else GraphLevel.DECODE
    if model is not None and model.full_layers and model.linear_layers:
        model = replace(model, layers=model.full_layers)
    if model is not None and model.is_sparse:
        model, page_size = replace(model, layers=tuple(map(_selected_by_host, model.layers))), SPARSE_PAGE_SIZE
    return replace(
        problem,
        model=model,
        page_size=DEFAULT_PAGE_SIZE if page_size is None else page_size,
        layout=CacheLayout.TOKEN_MAJOR,
        exact_lengths=problem.exact_lengths and (not speculates or problem.device == "cpu"),
        cuda_graph=max(level, problem.cuda_graph),
        wants_graphs=problem.device == "cuda",
        graphs_by_length=False,
        drafts_by_host=True,
    )


def _selected_by_host(layer: LayerSpec) -> LayerSpec:
    indexer = layer.indexer
    return layer if indexer is None else replace(layer, indexer=replace(indexer, shares=INDEX_BY_HOST))


def refuse(problem: Problem) -> Sequence[Refusal]:
    """Refusals that hold for every backend."""
    model = problem.model
    sparse = model is not None and model.is_sparse
    if sparse and problem.device not in (None, "cuda"):
        message = f"SGLang's indexer, which selects the rows of sparse attention, does not run on {problem.device}"
        return (Refusal(RefusalCode.FEATURE, message, str(Feature.SPARSE), "cuda", Setting.DEVICE),)
    if trees := refuse_sparse_trees(problem):
        return (trees,)
    if model is not None and model.compressed_layers:
        message = "compressed entries (DeepSeek-V4) are not supported; use one of SGLang's own backends"
        return (Refusal(RefusalCode.FEATURE, message, str(Feature.COMPRESSED)),)
    formats = [*map(str, DType), *[FP8_DS_MLA] * sparse]
    if problem.kv_dtype is not None and problem.kv_dtype not in formats:
        message = f"SGLang allocates no pages in the KV format {problem.kv_dtype}"
        return (Refusal(RefusalCode.KV_DTYPE, message, problem.kv_dtype, formats, Setting.KV_DTYPE),)
    if model is None or model.full_layers:
        return ()
    kinds = ", ".join(sorted(model.kinds))
    return (
        Refusal(
            RefusalCode.KIND,
            f"every attention layer is linear ({kinds}), and SGLang runs those by its own backends",
            value=kinds,
        ),
    )


def refuse_sparse_trees(problem: Problem) -> Refusal | None:
    """Refusal of draft trees for sparse models."""
    topk = problem.speculative_topk
    if topk == 1 or problem.model is None or not problem.model.is_sparse:
        return None
    message = f"drafts with {topk} branches are trees; SGLang's indexer scores the rows of chains only"
    return Refusal(RefusalCode.SPECULATION, message, topk, 1, Setting.SPECULATIVE_TOPK)


HOST = HostSpec(
    title="SGLang",
    distributions=("sglang",),
    versions=">=0.5.14,<0.5.24",
    render=render,
    fit=fit,
    refuse=refuse,
    per_batch=lambda problem: True,
)


class Refused(ValueError):
    """A backend that cannot serve, with every reason in SGLang's option names.

    ``refusals`` are the bridge's own reasons; ``error`` is attnplug's error, if one is the cause.
    """

    def __init__(self, message: str, refusals: Sequence[Refusal] = (), error: AttnplugError | None = None) -> None:
        super().__init__(message)
        self.refusals, self.error = tuple(refusals), error


def check_version(name: str) -> None:
    """Raise :class:`Refused` for ``name`` if SGLang's version is not supported."""
    found = HOST.installed()
    refusal = None if found is None else HOST.version_refusal(found)
    if refusal is not None:
        raise Refused(f"{name}: {refusal.format(render)}", [refusal])
