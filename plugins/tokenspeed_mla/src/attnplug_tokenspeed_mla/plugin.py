"""What the plugin says of its backend. TokenSpeed's library is imported only once a Blackwell GPU is asked about."""

from __future__ import annotations

from collections.abc import Iterator

from attnplug import CONTRACT_VERSION, BackendSpec, DType, Problem, Refusal, Role, hookimpl, import_library
from attnplug_trtllm_mla import blackwell
from attnplug_trtllm_mla.plugin import flashinfer_refusals

LIBRARY = "tokenspeed-mla>=2.0,<3"


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="tokenspeed_mla",
            summary="MLA by TokenSpeed's kernels over an fp8 cache: decode, verify, prefill as MHA",
            contract=CONTRACT_VERSION,
            factory="attnplug_tokenspeed_mla.build:tokenspeed_mla",
            requires=(LIBRARY, blackwell.LIBRARY),
            check=refusals,
            preference=80,  # below trtllm_mla, and as little proven
            capabilities=blackwell.capabilities(kv_dtypes=frozenset({DType.FLOAT8_E4M3})),
        )
    ]


def refusals(problem: Problem, role: Role | None) -> Iterator[Refusal]:
    yield from blackwell.refusals(problem, role, _library_refusals)


def _library_refusals() -> Iterator[Refusal]:
    from attnplug_tokenspeed_mla.kernels import load_library

    if isinstance(found := import_library(load_library, "tokenspeed_mla", LIBRARY), Refusal):
        yield found
    yield from flashinfer_refusals()  # the fallback's
