"""Reasons why a backend cannot serve a problem. Match on their codes, never on their text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, fields
from enum import StrEnum

from attnplug.declare.errors import PluginError
from attnplug.declare.settings import Render


class RefusalCode(StrEnum):
    """Codes used by core. A plugin's check may use its own codes."""

    ROLE = "role"
    KIND = "kind"
    FEATURE = "feature"
    DEVICE = "device"
    SM = "sm"
    ARCHITECTURE = "architecture"
    DTYPE = "dtype"
    KV_DTYPE = "kv_dtype"
    INDEX_DTYPE = "index_dtype"
    PAGE_SIZE = "page_size"
    LAYOUT = "layout"
    LENGTHS = "lengths"
    HEADS = "heads"
    HEAD_DIM = "head_dim"
    MLA_DIMS = "mla_dims"
    LAYERS = "layers"
    SPECULATION = "speculation"
    CUDA_GRAPH = "cuda_graph"
    INVARIANCE = "invariance"
    TENSOR_PARALLEL = "tensor_parallel"
    REQUIREMENT = "requirement"
    IMPORT = "import"
    FACTORY = "factory"
    CHECK_FAILED = "check_failed"
    MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class Refusal:
    """One reason why a backend cannot serve a problem.

    ``Refusal("page_size", "page size 24 is not supported", value=24, allowed=[32, 64], setting="page_size")``

    ``value`` and ``allowed`` are plain data (strings, numbers, lists of them), written as JSON. ``setting`` is the key
    to change: a ``Setting``, or ``NAME.KEY`` for an option of backend ``NAME``. ``advice`` is a command that helps.
    """

    code: str
    message: str
    value: object = None
    allowed: object = None
    setting: str | None = None
    advice: str | None = None

    def __post_init__(self) -> None:
        for name in ("code", "message", "setting", "advice"):
            text = getattr(self, name)
            if not isinstance(text, str) and not (name in ("setting", "advice") and text is None):
                raise PluginError(f"a Refusal's {name} must be a string, not {text!r}")

    def as_json(self) -> Mapping[str, object]:
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}

    def format(self, render: Render) -> str:
        """Return the message and the remedy, with the setting as ``render`` spells it."""
        shown = None if self.setting is None else render(self.setting)
        remedies = [text for text in (shown and f"change {shown}", self.advice) if text]
        return f"{self.message} ({' or '.join(remedies)})" if remedies else self.message

    def __str__(self) -> str:
        return self.format(str)


def _plain(value: object) -> object:
    """Convert any value of a plugin's check to JSON data."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Set):
        return sorted((_plain(item) for item in value), key=str)
    return str(value)
