"""SGLang's words for ours: names, option names, versions, and what it fixes or lacks. Imports neither it nor torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from attnplug import CacheLayout, Feature, GraphLevel, Problem, Refusal, RefusalCode, Setting
from attnplug.host import HostSpec, split_settings

PREFIX = "attnplug:"
"""What the names of our backends start with in SGLang's options."""
AUTO = "auto"
OPTIONS = "ATTNPLUG_OPTIONS"
"""The environment variable with options of backends: ``NAME.KEY=VALUE``, several separated by spaces.

SGLang has no free-form option that reaches an attention backend. Its own kernels are set by environment variables too,
and every process of a server inherits them.
"""
DEFAULT_PAGE_SIZE = 1
"""SGLang's own, where ``--page-size`` is left out."""

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
    Setting.SPECULATIVE_ATTENTION_MODE: "--speculative-attention-mode",
    Setting.TENSOR_PARALLEL: "--tp-size",
    Setting.MAX_BATCH: "--max-running-requests",
    Setting.NUM_PAGES: "--max-total-tokens",
    Setting.CONTEXT_LENGTH: "--context-length",
    Setting.CHUNKED_PREFILL_SIZE: "--chunked-prefill-size",
}


def render(key: str) -> str | None:
    """A setting as SGLang's users write it; ``None`` if they cannot set it."""
    name, dot, _ = key.partition(".")
    return f"{key} in {OPTIONS}" if dot and name else _OPTIONS.get(key)


def given_options(environment: Mapping[str, str] | None = None) -> dict[str, dict[str, str]]:
    """Options by backend. Raises UsageError if the variable cannot be read."""
    return split_settings((os.environ if environment is None else environment).get(OPTIONS, "").split())


def fit(problem: Problem) -> Problem:
    """The problem as SGLang poses it.

    Its caches lie token by token, and it captures decode, and the verification of drafts. Lengths on the CPU are upper
    bounds while it speculates. Linear layers, and drafts, are served by SGLang's own backends.
    """
    speculates, model = problem.speculative_tokens > 0, problem.model
    level = GraphLevel.NEVER
    if problem.device == "cuda":
        level = GraphLevel.UNIFORM if speculates else GraphLevel.DECODE
    if model is not None and model.full_layers and model.linear_layers:
        model = replace(model, layers=model.full_layers)
    return replace(
        problem,
        model=model,
        page_size=DEFAULT_PAGE_SIZE if problem.page_size is None else problem.page_size,
        layout=CacheLayout.TOKEN_MAJOR,
        exact_lengths=problem.exact_lengths and not speculates,
        cuda_graph=max(level, problem.cuda_graph),
        wants_graphs=problem.device == "cuda",
        drafts_by_host=True,
    )


def refuse(problem: Problem) -> Sequence[Refusal]:
    """What SGLang, or this bridge, cannot carry of a model."""
    model = problem.model
    if model is not None and model.is_sparse:
        message = "sparse attention runs on SGLang's own backends only: its indexer asks them for what they planned"
        return (Refusal(RefusalCode.FEATURE, message, str(Feature.SPARSE)),)
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


HOST = HostSpec(
    title="SGLang", distributions=("sglang",), versions=">=0.5.14,<0.5.24", render=render, fit=fit, refuse=refuse
)


def refuse_version(name: str) -> None:
    """Raise a ValueError for ``name`` if SGLang's version is outside the range."""
    found = HOST.installed()
    refusal = None if found is None else HOST.version_refusal(found)
    if refusal is not None:
        raise ValueError(f"{name}: {refusal.told(render)}")
