"""A CPU that looks like a Blackwell GPU to whoever builds a backend on it. Nothing can run there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnplug_flashinfer_mla import kernels as flashinfer

PROCESSORS = 148


class Event:
    def record(self) -> None: ...

    def query(self) -> bool:
        return True


def pretend(monkeypatch: pytest.MonkeyPatch, sm: int = 100) -> list[Tensor]:
    """Let a backend and its fallback be built; returns what FlashInfer's wrappers are given as workspace."""
    given: list[Tensor] = []

    def wrapper(workspace: Tensor, *args: Any, **named: Any) -> object:
        given.append(workspace)
        return object()

    library = flashinfer.Library("test", wrapper, wrapper, None, True, True)
    monkeypatch.setattr(flashinfer, "load_library", lambda: library)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: divmod(sm, 10))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=PROCESSORS)
    )
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return given
