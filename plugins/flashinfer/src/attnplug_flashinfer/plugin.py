"""Backend spec of ``flashinfer``. Importing this module does not import FlashInfer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from attnplug import (
    AttentionKind,
    BackendSpec,
    CacheLayout,
    Capabilities,
    DType,
    Feature,
    GraphLevel,
    Problem,
    Refusal,
    Role,
    hookimpl,
)
from attnplug_flashinfer.options import FlashInferOptions

DTYPES = frozenset({DType.BFLOAT16, DType.FLOAT16})
LIBRARY = "flashinfer-python>=0.6.18.post1,<0.8"
KERNEL = "flashinfer.kernel"
FA3_SM = 90


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="flashinfer",
            summary="MHA and GQA by FlashInfer's paged kernels: decode, verify and extend",
            contract="1.0",
            factory="attnplug_flashinfer.factory:FlashInferBackend",
            requires=((LIBRARY, "flashinfer"),),
            options=FlashInferOptions,
            check=refusals,
            kernel_builds="attnplug_flashinfer.jit_modules:kernel_builds",
            preference=40,  # below triton_mha: the first start compiles kernels for a minute
            capabilities=Capabilities(
                kinds=frozenset({AttentionKind.MHA}),
                devices=frozenset({"cuda"}),
                min_sm=80,
                dtypes=DTYPES,
                kv_dtypes=DTYPES | {DType.FLOAT8_E4M3},
                kv_matches_dtype=True,
                roles=frozenset({Role.PREFILL, Role.DECODE, Role.DRAFT}),
                head_dims=frozenset({(64, 64), (128, 128), (256, 256)}),
                features=frozenset({Feature.SLIDING_WINDOW, Feature.LOGIT_CAP}),
                max_speculative_tokens=64,
                cuda_graph=GraphLevel.UNIFORM,
                extras=frozenset({"lse", "out"}),
                layouts=frozenset(CacheLayout),
            ),
        )
    ]


@hookimpl
def attnplug_rankings() -> list[Path]:
    return [Path(__file__).parent / "tables"]


def refusals(problem: Problem, role: Role | None, options: FlashInferOptions) -> Iterator[Refusal]:
    """Yield refusals of kernel=fa3. The backend repeats this check when it is built."""
    if options.kernel != "fa3":
        return
    others = ["auto", "fa2"]
    if problem.sm not in (None, FA3_SM):
        yield Refusal("kernel", f"kernel=fa3 requires SM {FA3_SM}; this GPU is SM {problem.sm}", "fa3", others, KERNEL)
    if problem.kv_dtype == DType.FLOAT8_E4M3:
        message = f"kernel=fa3 requires a 16-bit cache, not {problem.kv_dtype}"
        yield Refusal("kernel", message, "fa3", others, KERNEL)
