"""The engine: models, scheduling and tensor parallelism that run attention backends for real.

Its names are imported when they are first used: what reads a command line starts without torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnplug_engine.completion import Completion, Statistics, Usage
    from attnplug_engine.embedding import Embedder, Embedding, EmbedOptions
    from attnplug_engine.engine import Engine
    from attnplug_engine.execution.runner import ModelRunner
    from attnplug_engine.memory.capacity import Capacity
    from attnplug_engine.models.architectures import load_model
    from attnplug_engine.options import EngineOptions
    from attnplug_engine.request import FinishReason, LikelyToken, Request, SamplingParams, TokenLogprobs, Update
    from attnplug_engine.text.chat import Chat
    from attnplug_engine.text.transcript import Transcript

if hasattr(os, "uname") and os.uname().machine in ("aarch64", "arm64"):
    # torch allocates by mimalloc there, which gives freed memory back to the system after 10 ms. A product of a prefill
    # takes longer, so the next result's memory came from the system anew, page by page: a tenth of a prefill. In
    # milliseconds; it is read when torch loads.
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "1000")

_MODULE_OF = {
    "Capacity": "memory.capacity",
    "Chat": "text.chat",
    "Completion": "completion",
    "EmbedOptions": "embedding",
    "Embedder": "embedding",
    "Embedding": "embedding",
    "Engine": "engine",
    "EngineOptions": "options",
    "FinishReason": "request",
    "LikelyToken": "request",
    "ModelRunner": "execution.runner",
    "Request": "request",
    "SamplingParams": "request",
    "Statistics": "completion",
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
