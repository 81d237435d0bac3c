"""Keys of the settings that selection depends on. Each host decides how its users spell a key."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class Setting(StrEnum):
    """Keys that core knows. A plugin names an option of its own backend as ``NAME.KEY``."""

    ATTENTION_BACKEND = "attention_backend"
    PREFILL_ATTENTION_BACKEND = "prefill_attention_backend"
    DECODE_ATTENTION_BACKEND = "decode_attention_backend"
    LINEAR_ATTENTION_BACKEND = "linear_attention_backend"
    DRAFT_ATTENTION_BACKEND = "draft_attention_backend"
    BACKEND_OPTION = "backend_option"
    DEVICE = "device"
    SM = "sm"
    DTYPE = "dtype"
    KV_DTYPE = "kv_dtype"
    INDEX_DTYPE = "index_dtype"
    PAGE_SIZE = "page_size"
    LAYOUT = "layout"
    CUDA_GRAPH = "cuda_graph"
    BATCH_INVARIANT = "batch_invariant"
    EXACT_LENGTHS = "exact_lengths"
    SPECULATIVE_TOKENS = "speculative_tokens"
    SPECULATIVE_TOPK = "speculative_topk"
    SPECULATIVE_ATTENTION_MODE = "speculative_attention_mode"
    TENSOR_PARALLEL = "tensor_parallel"
    MAX_BATCH = "max_batch"
    NUM_PAGES = "num_pages"
    STATE_SLOTS = "state_slots"
    CONTEXT_LENGTH = "context_length"
    CHUNKED_PREFILL_SIZE = "chunked_prefill_size"
    ENABLE_HISPARSE = "enable_hisparse"
    MLA_EXTEND = "mla_extend"


Render = Callable[[str], str | None]
"""Returns a host's spelling of a key, such as ``block_size`` for ``page_size``; ``None`` if users cannot set it."""
