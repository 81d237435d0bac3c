"""The engine: models, scheduling and tensor parallelism that run attention backends for real."""

from attnplug_engine.engine import Completion, Engine, EngineOptions, Statistics
from attnplug_engine.request import FinishReason, Request, SamplingParams
from attnplug_engine.runner import Capacity, ModelRunner

__all__ = [
    "Capacity",
    "Completion",
    "Engine",
    "EngineOptions",
    "FinishReason",
    "ModelRunner",
    "Request",
    "SamplingParams",
    "Statistics",
]
