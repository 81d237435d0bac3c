"""Construction of the backend on a GPU."""

from __future__ import annotations

from attnplug import BackendContext, MLAShape
from attnplug_flashinfer_mla.options import FlashInferMLAOptions
from attnplug_tokenspeed_mla.kernels import TokenSpeedDecode, TokenSpeedRagged, load_library
from attnplug_trtllm_mla.backend import LaneKernels, TRTLLMMLABackend
from attnplug_trtllm_mla.build import cute_dsl_scratch, fallback


def tokenspeed_mla(context: BackendContext) -> TRTLLMMLABackend:
    """Build the backend; the spec's factory. Compiles the prefill kernels, which takes minutes."""
    shape = MLAShape.of(context)
    scratch, library = cute_dsl_scratch(context, shape), load_library()
    ragged = TokenSpeedRagged(library, shape)
    if not context.serving.skip_prefill and shape.ragged_dims in ragged.dims:
        ragged.warm_up()
    lanes = [LaneKernels(TokenSpeedDecode(library, shape, each), ragged) for each in scratch]
    return TRTLLMMLABackend(context, lanes, fallback(context, FlashInferMLAOptions().workspace_mib))
