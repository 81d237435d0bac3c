"""What the plugin says of its backend. FlashInfer is imported only once a Blackwell GPU is asked about."""

from __future__ import annotations

from collections.abc import Iterator

from attnplug import CONTRACT_VERSION, BackendSpec, ExtendPath, Problem, Refusal, Role, hookimpl
from attnplug_trtllm_mla import blackwell
from attnplug_trtllm_mla.plugin import flashinfer_refusals


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="cutedsl_mla",
            summary="MLA by FlashInfer's CuTe DSL kernel: decode and verify, with another backend for prefill",
            contract=CONTRACT_VERSION,
            factory="attnplug_cutedsl_mla.build:cutedsl_mla",
            requires=(blackwell.LIBRARY, "nvidia-cutlass-dsl>=4.6.2"),
            check=refusals,
            preference=70,  # below trtllm_mla, and as little proven
            capabilities=blackwell.capabilities(
                roles=frozenset({Role.DECODE, Role.DRAFT}), mla_extend=frozenset({ExtendPath.ABSORBED})
            ),
        )
    ]


def refusals(problem: Problem, role: Role | None) -> Iterator[Refusal]:
    yield from blackwell.refusals(problem, role, flashinfer_refusals)
