"""The backend on a GPU."""

from __future__ import annotations

from attnplug import BackendContext
from attnplug_cutedsl_mla.kernels import CuteDSLDecode
from attnplug_flashinfer_mla.kernels import Shape
from attnplug_trtllm_mla.backend import Parts, TRTLLMMLABackend
from attnplug_trtllm_mla.build import cute_dsl_scratch
from attnplug_trtllm_mla.kernels import load_library


def cutedsl_mla(context: BackendContext) -> TRTLLMMLABackend:
    """The factory of the spec."""
    shape = Shape.of(context)
    scratch = cute_dsl_scratch(context, shape)
    return TRTLLMMLABackend(context, Parts(CuteDSLDecode(load_library(), shape, scratch)))
