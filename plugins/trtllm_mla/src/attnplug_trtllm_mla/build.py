"""Construction of the backend on a GPU. Workspace is requested here, before kernels and fallback are built (A2)."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnplug import SCRATCH, BackendContext, BackendError, MLAShape, Workspace, WorkspaceKind
from attnplug_flashinfer_mla import plugin as flashinfer_mla
from attnplug_flashinfer_mla.backend import FlashInferMLABackend
from attnplug_flashinfer_mla.options import FlashInferMLAOptions
from attnplug_trtllm_mla.backend import LaneKernels, TRTLLMMLABackend
from attnplug_trtllm_mla.blackwell import SMS
from attnplug_trtllm_mla.kernels import TRTLLMDecode, TRTLLMRagged, check_scratch, counter_bytes, load_library
from attnplug_trtllm_mla.memory import CUTE_DSL_SCRATCH, SEMAPHORES
from attnplug_trtllm_mla.options import TRTLLMMLAOptions


def trtllm_mla(context: BackendContext) -> TRTLLMMLABackend:
    """Build the backend; the spec's factory."""
    options = context.options_of(TRTLLMMLAOptions)
    processors, library, shape = blackwell_multiprocessors(context), load_library(), MLAShape.of(context)
    # Before the fallback is built: it requests the same memory, and would keep a smaller buffer.
    scratch = request_per_lane(context, SCRATCH, options.workspace_mib << 20)
    counters = request_per_lane(context, SEMAPHORES, counter_bytes(shape, processors))
    decode = [TRTLLMDecode(library, shape, *memory, processors) for memory in zip(scratch, counters, strict=True)]
    check_scratch(context.name, options.workspace_mib, decode[0], context.limits.max_tokens)
    lanes = [LaneKernels(each, TRTLLMRagged(library, shape, each.scratch)) for each in decode]
    return TRTLLMMLABackend(context, lanes, fallback(context, options.workspace_mib))


def fallback(context: BackendContext, workspace_mib: int) -> FlashInferMLABackend:
    """Build ``flashinfer_mla`` for the same layers, with its own spec's capabilities, on the same scratch memory."""
    own = replace(
        context,
        name=f"{context.name}/flashinfer_mla",
        options=FlashInferMLAOptions(workspace_mib),
        declared=flashinfer_mla.CAPABILITIES,
    )
    return FlashInferMLABackend(own)


def cute_dsl_scratch(context: BackendContext, shape: MLAShape) -> list[Workspace]:
    """Request scratch for any call of a CuTe DSL decode kernel: 64 rows of partial results per multiprocessor."""
    return request_per_lane(
        context, CUTE_DSL_SCRATCH, blackwell_multiprocessors(context) * 64 * (shape.dims.kv_lora_rank + 1) * 4
    )


def request_per_lane(context: BackendContext, kind: WorkspaceKind, nbytes: int) -> list[Workspace]:
    """Request ``nbytes`` for each lane. Lanes run concurrently and share no memory."""
    request = context.workspace.request
    return [request(context.name, context.device, kind, nbytes, lane=lane) for lane in range(context.limits.lanes)]


def blackwell_multiprocessors(context: BackendContext) -> int:
    """Return the GPU's number of multiprocessors. Raises ``BackendError`` if the kernels do not support the GPU."""
    major, minor = torch.cuda.get_device_capability(context.device)
    if 10 * major + minor not in SMS:
        listed = " or ".join(map(str, SMS))
        raise BackendError(
            f"backend {context.name} requires SM {listed}; this GPU is SM {10 * major + minor}; choose another with "
            "`attention_backend`",
            settings=["attention_backend"],
        )
    processors: int = torch.cuda.get_device_properties(context.device).multi_processor_count
    return processors
