"""Backend specs of ``flashmla`` and ``flashmla_sparse``. Importing this module does not import FlashMLA."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from attnplug import (
    AttentionKind,
    BackendSpec,
    Capabilities,
    DType,
    Feature,
    GraphLevel,
    LayerSpec,
    PageSizes,
    Problem,
    Refusal,
    RefusalCode,
    Role,
    Setting,
    hookimpl,
)
from attnplug.kernels import requirement_refusal
from attnplug_flashmla.options import SparseOptions
from attnplug_sparse.plugin import FP8_DS_MLA
from attnplug_sparse.refusals import index_refusals

LIBRARY = "sgl-flash-mla>=1.0,<2"
DEEP_GEMM = "sgl-deep-gemm>=0.2.5"
PAGE = 64
"""Page size of the kernels, in tokens."""


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="flashmla",
            summary="MLA decode and verify by FlashMLA on Hopper GPUs; another backend prefills",
            contract="1.0",
            factory="attnplug_flashmla.factory:FlashMLABackend",
            requires=((LIBRARY, "flash_mla"),),
            preference=90,  # FlashInfer takes a third of the host time and can prefill too
            capabilities=Capabilities(
                kinds=frozenset({AttentionKind.MLA}),
                devices=frozenset({"cuda"}),
                min_sm=90,
                max_sm=90,
                dtypes=frozenset({DType.BFLOAT16, DType.FLOAT16}),
                kv_matches_dtype=True,
                roles=frozenset({Role.DECODE}),
                page_sizes=PageSizes.of(PAGE),
                mla_dims=frozenset({(512, 64)}),
                max_heads=128,  # tested up to this number
                layers_alike=True,
                max_speculative_tokens=8,
                cuda_graph=GraphLevel.UNIFORM,
                needs_cpu_seq_lens=False,
                extras=frozenset({"lse", "out", "q_rope"}),
                mla_extend=frozenset(),
            ),
        ),
        BackendSpec(
            name="flashmla_sparse",
            summary="Sparse MLA by FlashMLA on Hopper GPUs, over bfloat16 rows or rows of 656 bytes (fp8_ds_mla)",
            contract="1.0",
            factory="attnplug_flashmla.factory:SparseFlashMLABackend",
            requires=((LIBRARY, "flash_mla"),),
            preference=90,
            options=SparseOptions,
            check=_check_sparse,
            capabilities=Capabilities(
                kinds=frozenset({AttentionKind.MLA}),
                devices=frozenset({"cuda"}),
                min_sm=90,
                max_sm=90,
                dtypes=frozenset({DType.BFLOAT16}),
                kv_dtypes=frozenset({DType.BFLOAT16, FP8_DS_MLA.name}),
                index_dtypes=frozenset({DType.BFLOAT16, DType.FLOAT8_E4M3}),
                coordinators=frozenset({"hisparse"}),
                roles=frozenset({Role.PREFILL, Role.DECODE, Role.DRAFT}),
                page_sizes=PageSizes.of(PAGE),
                mla_dims=frozenset({(512, 64)}),
                features=frozenset({Feature.SPARSE}),
                max_heads=128,
                max_speculative_tokens=64,
                cuda_graph=GraphLevel.UNIFORM,
                needs_cpu_seq_lens=False,
                extras=frozenset({"lse", "out", "q_rope", "selected"}),
            ),
        ),
    ]


@hookimpl
def attnplug_rankings() -> list[Path]:
    return [Path(__file__).parent / "tables"]


def _check_sparse(problem: Problem, role: Role | None, options: SparseOptions) -> Iterator[Refusal]:
    """Yield refusals that capabilities cannot express: dense layers, the index, and limits of DeepGEMM."""
    layers = [] if problem.model is None else problem.model.full_layers
    dense = [layer.layer_id for layer in layers if layer.indexer is None]
    if dense and role is not Role.LINEAR:
        yield Refusal(
            RefusalCode.FEATURE,
            f"requires an index in every layer, but {len(dense)} of {len(layers)} layers have no index",
            dense,
            setting=None if role is None else role.setting,
        )
    yield from index_refusals(problem, role)
    if options.index_kernel == "deep_gemm":
        yield from _deep_gemm_refusals(problem)


def _deep_gemm_refusals(problem: Problem) -> Iterator[Refusal]:
    if (lacking := requirement_refusal(DEEP_GEMM, "deep_gemm")) is not None:
        yield lacking
    setting = "flashmla_sparse.index_kernel"
    if problem.dtype is not None and problem.index_dtype != DType.FLOAT8_E4M3:
        kind = problem.index_dtype or problem.dtype
        message = f"DeepGEMM requires index keys in {DType.FLOAT8_E4M3}, not {kind}"
        yield Refusal(RefusalCode.INDEX_DTYPE, message, str(kind), [DType.FLOAT8_E4M3.value], Setting.INDEX_DTYPE)
    if problem.page_size not in (None, PAGE):
        message = f"DeepGEMM requires pages of {PAGE} tokens, not {problem.page_size}"
        yield Refusal(RefusalCode.PAGE_SIZE, message, problem.page_size, [PAGE], Setting.PAGE_SIZE)
    shapes = {(dims.heads, dims.head_dim) for layer in _index_layers(problem) if (dims := layer.indexer) is not None}
    for heads, width in sorted(shapes):
        if heads not in (32, 64) or width not in (32, 64, 128):
            message = f"DeepGEMM supports 32 or 64 index heads of 32, 64 or 128, not {heads} of {width}"
            yield Refusal(RefusalCode.HEADS, message, [heads, width], [32, 64], setting)


def _index_layers(problem: Problem) -> tuple[LayerSpec, ...]:
    return () if problem.model is None else problem.model.index_layers
