"""The backend on a GPU: memory is asked for in one place, then kernels and fallback are made on it (A2)."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnplug import SCRATCH, BackendContext, BackendError, MLAShape, Workspace, WorkspaceKind
from attnplug_flashinfer_mla import plugin as flashinfer_mla
from attnplug_flashinfer_mla.backend import FlashInferMLABackend
from attnplug_flashinfer_mla.options import FlashInferMLAOptions
from attnplug_trtllm_mla.backend import Kernels, TRTLLMMLABackend
from attnplug_trtllm_mla.blackwell import SMS
from attnplug_trtllm_mla.kernels import TRTLLMDecode, TRTLLMRagged, check_scratch, counter_bytes, load_library
from attnplug_trtllm_mla.memory import CUTE_DSL_SCRATCH, SEMAPHORES
from attnplug_trtllm_mla.options import TRTLLMMLAOptions


def trtllm_mla(context: BackendContext) -> TRTLLMMLABackend:
    """The factory of the spec."""
    options = context.options_of(TRTLLMMLAOptions)
    processors, library, shape = blackwell_processors(context), load_library(), MLAShape.of(context)
    # Before the fallback is built: it asks for as much, and would hold on to a smaller buffer.
    scratch = in_every_lane(context, SCRATCH, options.workspace_mib << 20)
    counters = in_every_lane(context, SEMAPHORES, counter_bytes(shape, processors))
    decode = [TRTLLMDecode(library, shape, *memory, processors) for memory in zip(scratch, counters, strict=True)]
    check_scratch(context.name, options.workspace_mib, decode[0], context.limits.max_tokens)
    lanes = [Kernels(each, TRTLLMRagged(library, shape, each.scratch)) for each in decode]
    return TRTLLMMLABackend(context, lanes, fallback(context, options.workspace_mib))


def fallback(context: BackendContext, workspace_mib: int) -> FlashInferMLABackend:
    """FlashInfer's backend for the same layers, on the same scratch memory. It declares what its own spec does."""
    own = replace(
        context,
        name=f"{context.name}/flashinfer_mla",
        options=FlashInferMLAOptions(workspace_mib),
        declared=flashinfer_mla.CAPABILITIES,
    )
    return FlashInferMLABackend(own)


def cute_dsl_scratch(context: BackendContext, shape: MLAShape) -> list[Workspace]:
    """What any call of a CuTe DSL decode kernel takes: 64 rows of partial results per multiprocessor."""
    return in_every_lane(
        context, CUTE_DSL_SCRATCH, blackwell_processors(context) * 64 * (shape.dims.kv_lora_rank + 1) * 4
    )


def in_every_lane(context: BackendContext, kind: WorkspaceKind, nbytes: int) -> list[Workspace]:
    """Separate memory for each lane, because lanes run at the same time."""
    request = context.workspace.request
    return [request(context.name, context.device, kind, nbytes, lane=lane) for lane in range(context.limits.lanes)]


def blackwell_processors(context: BackendContext) -> int:
    """How many multiprocessors the GPU has; an error if it is not one that the kernels exist for."""
    major, minor = torch.cuda.get_device_capability(context.device)
    if 10 * major + minor not in SMS:
        listed = " or ".join(map(str, SMS))
        raise BackendError(
            f"backend {context.name} needs SM {listed}, this is SM {10 * major + minor}; choose another with "
            "`attention_backend`",
            settings=["attention_backend"],
        )
    processors: int = torch.cuda.get_device_properties(context.device).multi_processor_count
    return processors
