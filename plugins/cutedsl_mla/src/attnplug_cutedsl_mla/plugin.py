"""What the plugin says of its backend. FlashInfer is imported when the backend is built, and not before."""

from __future__ import annotations

from attnplug import BackendSpec, ExtendPath, Role, hookimpl
from attnplug_trtllm_mla import blackwell


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="cutedsl_mla",
            summary="MLA by FlashInfer's CuTe DSL kernel: decode and verify, with another backend for prefill",
            contract="0.9",
            factory="attnplug_cutedsl_mla.factory:cutedsl_mla",
            requires=(blackwell.FLASHINFER, "nvidia-cutlass-dsl>=4.6.2"),
            check=blackwell.refusals,
            preference=70,  # below trtllm_mla, and as little proven
            capabilities=blackwell.capabilities(
                roles=frozenset({Role.DECODE, Role.DRAFT}), mla_extend=frozenset({ExtendPath.ABSORBED})
            ),
        )
    ]
