"""Inference engine for attnplug backends: models, continuous batching, CUDA graphs, speculation, tensor parallelism.

Names are imported on first use, so that commands parse their arguments without importing torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnplug_engine.completion import Completion, Usage
    from attnplug_engine.engine import Embedder, Engine
    from attnplug_engine.execution.runner import ModelRunner
    from attnplug_engine.memory.capacity import Capacity
    from attnplug_engine.models.architectures import load_model
    from attnplug_engine.options import EmbedOptions, EngineOptions
    from attnplug_engine.request import FinishReason, LikelyToken, Request, SamplingParams, TokenLogprobs, Update
    from attnplug_engine.serving.embedding import Embedding
    from attnplug_engine.serving.statistics import Statistics
    from attnplug_engine.text.chat import Chat
    from attnplug_engine.text.transcript import Transcript

if hasattr(os, "uname") and os.uname().machine in ("aarch64", "arm64"):
    # torch uses mimalloc on Arm, which returns freed memory to the system after 10 ms. A matrix product of a prefill
    # takes longer, so memory of the next result was mapped page by page again: a tenth of a prefill's time. The value
    # is in milliseconds and is read when torch is imported.
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "1000")

_MODULE_OF = {
    "Capacity": "memory.capacity",
    "Chat": "text.chat",
    "Completion": "completion",
    "EmbedOptions": "options",
    "Embedder": "engine",
    "Embedding": "serving.embedding",
    "Engine": "engine",
    "EngineOptions": "options",
    "FinishReason": "request",
    "LikelyToken": "request",
    "ModelRunner": "execution.runner",
    "Request": "request",
    "SamplingParams": "request",
    "Statistics": "serving.statistics",
    "TokenLogprobs": "request",
    "Transcript": "text.transcript",
    "Update": "request",
    "Usage": "completion",
    "load_model": "models.architectures",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'attnplug_engine' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"attnplug_engine.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})


__all__ = [
    "Capacity",
    "Chat",
    "Completion",
    "EmbedOptions",
    "Embedder",
    "Embedding",
    "Engine",
    "EngineOptions",
    "FinishReason",
    "LikelyToken",
    "ModelRunner",
    "Request",
    "SamplingParams",
    "Statistics",
    "TokenLogprobs",
    "Transcript",
    "Update",
    "Usage",
    "load_model",
]
