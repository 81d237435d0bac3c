"""Backend spec of ``cutedsl_mla``. Importing this module does not import FlashInfer."""

from __future__ import annotations

from attnplug import BackendSpec, ExtendPath, Role, hookimpl
from attnplug_trtllm_mla import blackwell


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="cutedsl_mla",
            summary="MLA by FlashInfer's CuTe DSL kernel: decode and verify, with another backend for prefill",
            contract="1.0",
            factory="attnplug_cutedsl_mla.factory:cutedsl_mla",
            requires=(blackwell.FLASHINFER, "nvidia-cutlass-dsl>=4.6.2"),
            check=blackwell.refusals,
            preference=70,  # below trtllm_mla; never run on a GPU either
            capabilities=blackwell.capabilities(
                roles=frozenset({Role.DECODE, Role.DRAFT}), mla_extend=frozenset({ExtendPath.ABSORBED})
            ),
        )
    ]
