"""Models: their architectures, and how one is loaded."""

from __future__ import annotations

from attnplug_engine.models.architectures import (
    ARCHITECTURES,
    Architecture,
    LoadedModel,
    UnknownArchitecture,
    build_model,
    load_model,
)
from attnplug_engine.models.decoder import Attention, Decoder

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "Attention",
    "Decoder",
    "LoadedModel",
    "UnknownArchitecture",
    "build_model",
    "load_model",
]
