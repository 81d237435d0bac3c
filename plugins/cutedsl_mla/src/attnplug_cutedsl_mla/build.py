"""Construction of the backend on a GPU."""

from __future__ import annotations

from attnplug import BackendContext, MLAShape
from attnplug_cutedsl_mla.kernels import CuteDSLDecode
from attnplug_trtllm_mla.backend import LaneKernels, TRTLLMMLABackend
from attnplug_trtllm_mla.build import cute_dsl_scratch
from attnplug_trtllm_mla.kernels import load_library


def cutedsl_mla(context: BackendContext) -> TRTLLMMLABackend:
    """Build the backend; the spec's factory. Compiles the decode kernels, which have no disk cache (E1)."""
    shape, library = MLAShape.of(context), load_library()
    lanes = [LaneKernels(CuteDSLDecode(library, shape, each)) for each in cute_dsl_scratch(context, shape)]
    backend = TRTLLMMLABackend(context, lanes)
    backend.warm_up()
    return backend
