"""Conversion of vLLM's configuration and layers to attnplug's specs, problem, limits and context.

Everything describes one rank: vLLM's layers have the heads of one rank. A model here has the layers of one KV group.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnplug import AttentionKind, LayerSpec, ModelSpec, Problem, Refusal, UsageError
from attnplug.host import HostContext, KVPools, Limits, MLADims, Parallel, WorkspaceOwner
from attnplug_vllm.host import HOST, Feature, refused_sharding, requested_invariance, unsupported_features
from attnplug_vllm.kv_formats import attnplug_dtype, cache_format

# Layers


def mha_layer(
    layer_id: int,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    sinks: bool = False,
) -> LayerSpec:
    """Spec of an MHA or GQA layer. vLLM's windows include the query's own key, as attnplug's do; a cap of 0 is none."""
    return LayerSpec(
        layer_id,
        AttentionKind.MHA,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim if v_head_dim is None else v_head_dim,
        scale=float(scale),
        sliding_window=window,
        logit_cap=float(cap) if cap else None,
        sinks=sinks,
    )


def mla_layer(
    layer_id: int, *, heads: int, scale: float, kv_lora_rank: int, nope: int, rope: int, v_head_dim: int
) -> LayerSpec:
    """Spec of an MLA layer. Every rank has whole latent rows."""
    return LayerSpec(
        layer_id,
        AttentionKind.MLA,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=nope + rope,
        v_head_dim=v_head_dim,
        scale=float(scale),
        mla=MLADims(kv_lora_rank, nope, rope),
    )


def layer_ids(names: Sequence[str]) -> dict[str, int]:
    """Layer ids by name: the number in the name, or the position if those numbers are not distinct."""
    numbers = [re.search(r"\.(\d+)\.", f"{name}.") for name in names]
    ids = [int(number.group(1)) for number in numbers if number is not None]
    if len(set(ids)) < len(names):
        ids = list(range(len(names)))
    return dict(zip(names, ids, strict=True))


def model_of(config: Any, layers: Sequence[LayerSpec]) -> ModelSpec:
    """Model of the given layers: one KV group on one rank."""
    model = config.model_config
    return ModelSpec(
        name=str(model.model),
        model_type=str(getattr(model.hf_text_config, "model_type", "")),
        layers=tuple(sorted(layers, key=lambda layer: layer.layer_id)),
        context_length=model.max_model_len,
        ranks=config.parallel_config.tensor_parallel_size,
    )


# The problem


@dataclass(frozen=True, slots=True)
class Machine:
    """Device type of vLLM's platform, with the compute capability of a GPU (90 for SM 90)."""

    device: str
    sm: int | None = None

    @classmethod
    def current(cls) -> Machine:
        """Read vLLM's current platform. Raises :class:`UsageError` unless it is CUDA or CPU."""
        from vllm.platforms import current_platform

        if current_platform.is_cuda():
            capability = current_platform.get_device_capability()
            return cls("cuda", None if capability is None else 10 * capability.major + capability.minor)
        if current_platform.is_cpu():
            return cls("cpu")
        raise UsageError(
            f"attnplug's bridge runs on vLLM's CUDA and CPU platforms, and this is {current_platform.device_name}; use "
            "another --attention-backend"
        )


def problem_of(
    config: Any, model: ModelSpec, machine: Machine, kv_cache_dtype: str, dtype: torch.dtype | None = None
) -> Problem:
    """Problem that backends of these layers must solve. ``attnplug explain --host vllm`` uses the same."""
    cache, activations = config.cache_config, config.model_config.dtype if dtype is None else dtype
    problem = Problem(
        model,
        device=machine.device,
        sm=machine.sm,
        dtype=attnplug_dtype(activations),
        kv_dtype=cache_format(kv_cache_dtype, activations).name,
        page_size=cache.block_size if cache.user_specified_block_size else None,
        speculative_tokens=verify_tokens(config),
        invariant=requested_invariance(),
    )
    graphs = machine.device == "cuda" and captures(config)
    return replace(HOST.fit(problem), wants_graphs=graphs, exact_lengths=has_exact_lengths(config))


def has_exact_lengths(config: Any) -> bool:
    """Return True if vLLM knows every request's length on the CPU when it builds metadata.

    It does not if it schedules a step before the accepted tokens of the previous one are known.
    """
    return config.speculative_config is None or not config.scheduler_config.async_scheduling


def captures(config: Any) -> bool:
    """Return True if CUDA graphs that contain attention are enabled."""
    mode = config.compilation_config.cudagraph_mode
    return mode is not None and bool(mode.has_full_cudagraphs())


def verify_tokens(config: Any) -> int:
    """New tokens of a request whose draft is verified: the drafted ones and one more. 0 without speculation."""
    speculation = config.speculative_config
    return (
        0 if speculation is None or not speculation.num_speculative_tokens else 1 + speculation.num_speculative_tokens
    )


def context_ranks(config: Any) -> int:
    """Number of ranks that share the cache rows of a request (``--decode-context-parallel-size``)."""
    return int(config.parallel_config.decode_context_parallel_size)


def unsupported(config: Any) -> list[Refusal]:
    """Refusals of configured features that attnplug's contract lacks, by vLLM's names."""
    parallel, cache = config.parallel_config, config.cache_config
    text = config.model_config.hf_text_config
    requested: dict[str, bool] = {
        Feature.PCP: parallel.prefill_context_parallel_size > 1,
        Feature.DBO: parallel.use_ubatching,
        Feature.NON_CAUSAL: bool(config.attention_config.use_non_causal),
        "bidirectional attention over image tokens (the model's)": bool(config.model_config.is_mm_prefix_lm),
        Feature.FAST_PREFILL: cache.kv_sharing_fast_prefill,
        Feature.COMPUTED_SCALES: bool(getattr(cache, "calculate_kv_scales", False)),
        Feature.CHUNKED_ATTENTION: bool(getattr(text, "attention_chunk_size", None)),
        "reference sliding windows (the model's)": getattr(config.model_config, "rswa_window", None) is not None,
    }
    refusals = unsupported_features(requested)
    if context_ranks(config) > 1 and not config.model_config.use_mla:
        speculates, interleave = config.speculative_config is not None, parallel.cp_kv_cache_interleave_size
        refusals += refused_sharding(speculates=speculates, interleave=interleave)
    return refusals


# Building


def limits_of(config: Any) -> Limits:
    """Limits of the largest step that vLLM runs. With context parallelism, a request is one per rank; see
    ``context_parallel``."""
    scheduler = config.scheduler_config
    return Limits(
        max_requests=scheduler.max_num_seqs * context_ranks(config),
        max_tokens=max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * max(verify_tokens(config), 1)),
        max_context=config.model_config.max_model_len,
    )


def context_of(
    config: Any,
    model: ModelSpec,
    *,
    device: torch.device,
    kv_dtype: str,
    page_size: int,
    pools: KVPools,
    workspace: WorkspaceOwner,
) -> HostContext:
    """Context from which the backends of one KV group are built."""
    parallel = config.parallel_config
    return HostContext(
        model=model,
        device=device,
        dtype=config.model_config.dtype,
        kv_dtype=kv_dtype,
        page_size=page_size,
        limits=limits_of(config),
        pools=pools,
        workspace=workspace,
        parallel=Parallel(parallel.rank % parallel.tensor_parallel_size, parallel.tensor_parallel_size),
    )
