"""A CPU that poses as a Blackwell GPU while backends are built, with reference kernels for FlashInfer's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from attnplug import MLAShape
from attnplug_flashinfer_mla import backend as flashinfer
from attnplug_testing.references.flashinfer_mla import ReferenceKernels

PROCESSORS = 148


def pretend(monkeypatch: pytest.MonkeyPatch, sm: int = 100, processors: int = PROCESSORS) -> list[Tensor]:
    """Patch torch and FlashInfer so that the plugin's own code builds backends; returns the fallback's workspaces."""
    given: list[Tensor] = []

    def kernels(shape: MLAShape, workspace: Tensor, kernel: str) -> ReferenceKernels:
        given.append(workspace)
        return ReferenceKernels(shape)

    properties = SimpleNamespace(multi_processor_count=processors)
    monkeypatch.setattr(flashinfer, "FlashInferMLAKernels", kernels)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: divmod(sm, 10))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return given
