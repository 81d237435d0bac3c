"""A CPU that looks like a Blackwell GPU to whoever builds a backend on it, with references for FlashInfer's kernels."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from attnplug import MLAShape
from attnplug_flashinfer_mla import backend as flashinfer
from attnplug_testing.flashinfer_mla_reference import ReferenceKernels

PROCESSORS = 148


def pretend(monkeypatch: pytest.MonkeyPatch, sm: int = 100, processors: int = PROCESSORS) -> list[Tensor]:
    """Let a backend and its fallback be built by the plugin's own code; returns the fallback's workspaces."""
    given: list[Tensor] = []

    def kernels(shape: MLAShape, workspace: Tensor, kernel: str) -> ReferenceKernels:
        given.append(workspace)
        return ReferenceKernels(shape)

    properties = SimpleNamespace(multi_processor_count=processors)
    monkeypatch.setattr(flashinfer, "FlashInferMLAKernels", kernels)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: divmod(sm, 10))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return given
