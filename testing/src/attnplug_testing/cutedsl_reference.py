"""cutedsl_mla on FlashInfer's functions in plain torch, which are trtllm_mla's."""

from __future__ import annotations

from attnplug import BackendContext
from attnplug_cutedsl_mla.build import cutedsl_mla
from attnplug_cutedsl_mla.plugin import attnplug_backends
from attnplug_testing.batches import declaring
from attnplug_testing.blackwell_checks import Build, skip_unless_served
from attnplug_testing.trtllm_reference import ReferenceFlashInfer, on_blackwell
from attnplug_trtllm_mla.backend import TRTLLMMLABackend


def reference_cutedsl(context: BackendContext, flashinfer: ReferenceFlashInfer | None = None) -> TRTLLMMLABackend:
    """cutedsl_mla by its own factory, all of it but the library."""
    return on_blackwell(cutedsl_mla, (flashinfer or ReferenceFlashInfer()).library, context)


def build_on(device: str) -> Build:
    skip_unless_served(attnplug_backends()[0], device)
    return reference_cutedsl if device == "cpu" else lambda context: cutedsl_mla(declaring(context, "cutedsl_mla"))
