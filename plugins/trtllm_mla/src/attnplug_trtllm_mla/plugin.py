"""Backend spec of ``trtllm_mla``. Importing this module does not import FlashInfer."""

from __future__ import annotations

from attnplug import BackendSpec, WorkspaceKind, hookimpl
from attnplug_trtllm_mla import blackwell
from attnplug_trtllm_mla.memory import CUTE_DSL_SCRATCH, SEMAPHORES
from attnplug_trtllm_mla.options import TRTLLMMLAOptions


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="trtllm_mla",
            summary="MLA by TRT-LLM's generation kernels through FlashInfer: decode, verify, prefill as MHA; the rest "
            "by flashinfer_mla",
            contract="1.0",
            factory="attnplug_trtllm_mla.factory:trtllm_mla",
            requires=(blackwell.FLASHINFER,),
            options=TRTLLMMLAOptions,
            check=blackwell.refusals,
            kernel_builds="attnplug_trtllm_mla.jit_modules:kernel_builds",
            preference=90,  # below flashinfer_mla: never run on a GPU
            capabilities=blackwell.capabilities(),
        )
    ]


@hookimpl
def attnplug_workspace_kinds() -> list[WorkspaceKind]:
    return [SEMAPHORES, CUTE_DSL_SCRATCH]
