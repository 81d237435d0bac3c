"""What the plugin says of its backend. TokenSpeed's library is imported only once a Blackwell GPU is asked about."""

from __future__ import annotations

from collections.abc import Iterator

from attnplug import CONTRACT_VERSION, BackendSpec, DType, Problem, Refusal, Role, hookimpl
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

    try:
        load_library()
    except Exception as error:
        # That it is not installed is said where its distribution is looked for.
        if not (isinstance(error, ModuleNotFoundError) and error.name == "tokenspeed_mla"):
            text = f"{type(error).__name__}: {error}"
            yield Refusal("import", f"tokenspeed_mla cannot be imported: {text}", text, option="pip install " + LIBRARY)
    yield from flashinfer_refusals()  # the fallback's
