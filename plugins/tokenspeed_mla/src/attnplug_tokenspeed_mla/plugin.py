"""Backend spec of ``tokenspeed_mla``. Importing this module does not import TokenSpeed's library."""

from __future__ import annotations

from attnplug import BackendSpec, DType, hookimpl
from attnplug_trtllm_mla import blackwell

LIBRARY = "tokenspeed-mla>=2.0,<3"


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="tokenspeed_mla",
            summary="MLA by TokenSpeed's kernels over an fp8 cache: decode, verify, prefill as MHA",
            contract="1.0",
            factory="attnplug_tokenspeed_mla.factory:tokenspeed_mla",
            requires=((LIBRARY, "tokenspeed_mla"), blackwell.FLASHINFER),
            check=blackwell.refusals,
            kernel_builds="attnplug_trtllm_mla.jit_modules:fallback_builds",
            preference=80,  # below trtllm_mla; never run on a GPU either
            capabilities=blackwell.capabilities(kv_dtypes=frozenset({DType.FLOAT8_E4M3})),
        )
    ]
