"""What the plugin says of its backend. FlashInfer is imported only once a Blackwell GPU is asked about."""

from __future__ import annotations

from collections.abc import Iterator

from attnplug import CONTRACT_VERSION, BackendSpec, Problem, Refusal, Role, hookimpl, import_library
from attnplug_trtllm_mla import blackwell
from attnplug_trtllm_mla.options import TRTLLMMLAOptions


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="trtllm_mla",
            summary="MLA by TRT-LLM's generation kernels through FlashInfer: decode, verify, prefill as MHA; the rest "
            "by flashinfer_mla",
            contract=CONTRACT_VERSION,
            factory="attnplug_trtllm_mla.build:trtllm_mla",
            requires=(blackwell.LIBRARY,),
            options=TRTLLMMLAOptions,
            check=refusals,
            preference=90,  # below flashinfer_mla: it was never run on a GPU
            capabilities=blackwell.capabilities(),
        )
    ]


def refusals(problem: Problem, role: Role | None) -> Iterator[Refusal]:
    yield from blackwell.refusals(problem, role, flashinfer_refusals)


def flashinfer_refusals() -> Iterator[Refusal]:
    """Of a FlashInfer that cannot be imported, or lacks the functions."""
    from attnplug_trtllm_mla.kernels import load_library  # imports torch: seconds

    if isinstance(found := import_library(load_library, "flashinfer", blackwell.LIBRARY), Refusal):
        yield found
