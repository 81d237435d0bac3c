"""MHA and GQA in vLLM: the backend, implementation and metadata builder classes.

Refusals are raised by a layer's constructor, before weights are loaded: it knows everything, and vLLM shows its message
to the user unchanged.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from attnplug import GraphLevel, LayerSpec, Refusal, RefusalCode
from attnplug_vllm.context_parallel import CapturedShardedStep, Shard, ShardedMHAStep
from attnplug_vllm.geometry import GeometryBuilder, with_exact_lengths
from attnplug_vllm.host import BLOCK_STEP, refused_sharding, unsupported_feature, unsupported_features
from attnplug_vllm.kv_formats import cache_format, plugin_formats, row_elements, wrong_page_size
from attnplug_vllm.kv_group import GroupAttention, mha_pools
from attnplug_vllm.mha_step import CapturedMHAStep, EagerMHAStep, LayerCall, capture_key
from attnplug_vllm.planner import GroupPlanner
from attnplug_vllm.selection import (
    choose,
    graph_level,
    log_group,
    page_sizes,
    raise_if_refused,
    remembered,
    serving_specs,
)
from attnplug_vllm.specs import (
    context_ranks,
    has_exact_lengths,
    layer_ids,
    limits_of,
    mha_layer,
    model_of,
    verify_tokens,
)

_LEVELS = {
    GraphLevel.NEVER: AttentionCGSupport.NEVER,
    GraphLevel.DECODE: AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
    GraphLevel.UNIFORM: AttentionCGSupport.UNIFORM_BATCH,
    GraphLevel.ALWAYS: AttentionCGSupport.UNIFORM_BATCH,  # mixed batches run in vLLM's piecewise graphs
}


def kernel_block_sizes() -> list[int | MultipleOf]:
    """Block sizes that every backend selected for the engine supports."""
    kernel = page_sizes().kernel
    return [MultipleOf(max(size, BLOCK_STEP)) for size in sorted(kernel)] if kernel else [MultipleOf(BLOCK_STEP)]


def cudagraph_support() -> AttentionCGSupport:
    """CUDA-graph support of the weakest selection for the engine."""
    return _LEVELS[min((graph_level(selection) for selection in remembered()), default=GraphLevel.NEVER)]


class BlockSizes:
    """Block sizes of a backend class: those of the backends selected for the engine."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[int | MultipleOf]:
        return kernel_block_sizes()

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Return 64 if supported, so that kernels look up one page for many rows."""
        preferred = max(default_block_size, 64)
        if cls.supports_block_size(preferred):  # type: ignore[attr-defined] # of vLLM's base class
            return preferred
        size: int = super().get_preferred_block_size(default_block_size)  # type: ignore[misc]
        return size


# vLLM is not installed where types are checked
class AttnplugBackend(BlockSizes, AttentionBackend):  # type: ignore[misc]
    """Backend class that vLLM queries for its properties."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = []  # any; a layer's constructor refuses others with a reason
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AttnplugImpl]:
        return AttnplugImpl

    @staticmethod
    def get_builder_cls() -> type[AttnplugBuilder]:
        return AttnplugBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Shape of a layer's cache, for vLLM up to 0.28. Keys and values share a row."""
        return num_blocks, num_kv_heads, block_size, row_elements(cache_dtype_str, head_size)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Set the bytes of a row in a plugin's format, for vLLM from 0.29 on."""
        name = spec.kv_quant_mode.name.lower()
        if spec.state_content_bytes is not None or name not in plugin_formats():
            return spec
        return replace(spec, state_content_bytes=row_elements(name, spec.head_size, spec.head_size_v))

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Memory order of a cache's dimensions by ``VLLM_KV_CACHE_LAYOUT``, for vLLM up to 0.28."""
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        by_heads = get_kv_cache_layout() == "HND"
        if include_num_layers_dimension:
            return (1, 2, 0, 3, 4) if by_heads else (1, 0, 3, 2, 4)
        return (0, 1, 2, 3) if by_heads else (0, 2, 1, 3)

    @classmethod
    def validate_configuration(cls, **selector: Any) -> list[str]:
        """Reasons that a layer's constructor cannot know. Any keyword is accepted: vLLM's releases add new ones."""
        requested = {
            "MLA layers in a model that is not MLA": selector.get("use_mla", False),
            "sparse attention": selector.get("use_sparse", False),
            "scales per head in an fp8 cache": selector.get("use_per_head_quant_scales", False),
            "adaptive verification": selector.get("use_adaptive_verification", False),
        }
        return [refusal.message for refusal in unsupported_features(requested)]

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True  # a layer's constructor refuses backends that do not claim it

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False


class AttnplugImpl(AttentionImpl):  # type: ignore[misc]
    """One attention layer. The metadata builder of its KV group sets ``spec``."""

    spec: LayerSpec | None = None
    supports_dcp: bool = True
    can_return_lse_for_decode: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.kv_sharing_target_layer_name = kv_cache_dtype, kv_sharing_target_layer_name
        self.sliding_window, self.logits_soft_cap = sliding_window, logits_soft_cap
        self.sinks, self._sinks32 = sinks, None if sinks is None else sinks.detach().float().clone()
        config = get_current_vllm_config()
        self._context_ranks = context_ranks(config)
        layer = self.layer(0, head_size)
        raise_if_refused(
            [
                *_layer_refusals(attn_type, alibi_slopes, others),
                *wrong_page_size(kv_cache_dtype, layer),
                *(refused_sharding([layer]) if self._context_ranks > 1 else ()),
            ]
        )
        self.selection = choose(config, model_of(config, [layer]), kv_cache_dtype)

    def layer(self, layer_id: int, v_head_dim: int) -> LayerSpec:
        """Spec of this layer. With context parallelism, a rank attends with the heads of all ranks of its group."""
        return mha_layer(
            layer_id,
            heads=self.num_heads * self._context_ranks,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            v_head_dim=v_head_dim,
            scale=self.scale,
            window=self.sliding_window,
            cap=self.logits_soft_cap,
            sinks=self.sinks is not None,
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        if self.sinks is not None and self._sinks32 is not None:
            self._sinks32.copy_(self.sinks.detach())  # in place: captured graphs hold the address

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: EagerMHAStep | CapturedMHAStep | ShardedMHAStep | CapturedShardedStep | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:  # memory profiling, before caches exist
            return output.fill_(0)
        spec, save = self.spec, self.kv_sharing_target_layer_name is None
        assert spec is not None, "vLLM makes a metadata builder for every layer that it runs"
        attn_metadata.attend(LayerCall(spec, query, key, value, output, save, self._sinks32))
        return output


def _layer_refusals(attn_type: str, alibi_slopes: object, others: dict[str, Any]) -> list[Refusal]:
    """Refusals of layer features that the contract lacks."""
    features = []
    if attn_type != AttentionType.DECODER:
        features.append(
            f"attention type {getattr(attn_type, 'value', attn_type)} (only causal decoder attention is supported)"
        )
    if alibi_slopes is not None:
        features.append("ALiBi slopes (the model's)")
    features += [f"{name}={value} (the model's)" for name, value in others.items() if value not in (None, False, -1)]
    return [unsupported_feature(feature) for feature in features]


class AttnplugBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Builds the steps of one KV group."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        group, self._layer_count = _group(kv_cache_spec, layer_names, vllm_config, device), len(layer_names)
        log_group(vllm_config, layer_names, group.model, group.selection)
        limits, backends = limits_of(vllm_config), serving_specs(group.selection)
        needs_lengths = any(backend.capabilities.needs_cpu_seq_lens for backend in backends)
        self._geometries = GeometryBuilder(
            kv_cache_spec.block_size,
            -(-limits.max_context // kv_cache_spec.block_size),
            verify_tokens(vllm_config),
            exact=needs_lengths and has_exact_lengths(vllm_config),
            by_batch=any(len(group.selection.serving(role)) > 1 for role in group.selection.choices),
        )
        self._threshold = 0
        if len(backends) > 1:  # one may prefill, another decode: each gets its part of a mixed batch
            self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
            self._threshold = self.reorder_batch_threshold or 0
        capture_size = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        self._max_captured = limits.max_requests, max(capture_size, limits.max_requests)
        self._planner = GroupPlanner(group, *self._max_captured)
        self._shard = None
        if (ranks := context_ranks(vllm_config)) > 1:
            from vllm.distributed.parallel_state import get_dcp_group

            self._shard = Shard(ranks, get_dcp_group().rank_in_group, get_dcp_group)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        return cudagraph_support()

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> EagerMHAStep | ShardedMHAStep:
        """Make the metadata of a step. A common prefix (cascade attention) is attended to like other rows: every
        request's block table contains it."""
        metadata = common_attn_metadata
        if metadata.causal is not True:
            raise_if_refused([unsupported_feature("non-causal attention")])
        planner, shard = self._current_planner(), self._shard
        seq_lens = metadata.seq_lens if shard is None else metadata.dcp_local_seq_lens
        planner.replay(capture_key(metadata), seq_lens, metadata.block_table_tensor, metadata.slot_mapping)
        if shard is not None:
            return ShardedMHAStep(planner, self._geometries, metadata, shard)
        return EagerMHAStep(planner, self._geometries, metadata, self._threshold)

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> EagerMHAStep | ShardedMHAStep:
        if self._geometries.exact:
            common_attn_metadata = with_exact_lengths(common_attn_metadata)
        return self.build(0, common_attn_metadata, fast_build=True)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> CapturedMHAStep | CapturedShardedStep:
        metadata, planner, shard = common_attn_metadata, self._current_planner(), self._shard
        if shard is not None:
            metadata = metadata.replace(seq_lens=metadata.dcp_local_seq_lens)
        geometry = self._geometries.captured(metadata)
        planned = planner.capture(capture_key(metadata), geometry)
        if shard is None:
            return CapturedMHAStep(planned)
        assert geometry.slots is not None
        return CapturedShardedStep(planner, planned, geometry.seq_lens, geometry.slots, shard)

    def _current_planner(self) -> GroupPlanner:
        if len(self.layer_names) != self._layer_count:  # vLLM appends further draft layers to the list that it gave
            group = _group(self.kv_cache_spec, self.layer_names, self.vllm_config, self.device)
            self._planner, self._layer_count = GroupPlanner(group, *self._max_captured), len(self.layer_names)
        return self._planner


def _group(kv_cache_spec: Any, names: list[str], config: Any, device: torch.device) -> GroupAttention:
    """Attention of the layers that share a block table. Sets ``spec`` of each layer's implementation.

    A draft's layer is in two groups, that of all layers and that of the draft. It has the same id in both.
    """
    every = config.compilation_config.static_forward_context
    ids = layer_ids([name for name, layer in every.items() if hasattr(layer, "impl")])
    targets = {name: every[name].impl.kv_sharing_target_layer_name or name for name in names}
    own = list(dict.fromkeys(targets.values()))
    specs = {name: every[name].impl.layer(ids[name], every[name].head_size_v) for name in own}
    for name, target in targets.items():
        spec = every[name].impl.layer(ids[target], every[name].head_size_v)
        if spec != specs[target]:
            text = f"{name} shares the cache of {target}, but differs from it: use another --attention-backend"
            raise_if_refused([Refusal(RefusalCode.LAYERS, text, name)])
        every[name].impl.spec = spec
    dtypes = {every[name].kv_cache_dtype for name in own}
    if len(dtypes) > 1:
        types = ", ".join(sorted(dtypes))
        text = f"the layers of one KV group have caches in {types}: change --kv-cache-dtype-skip-layers"
        raise_if_refused([Refusal(RefusalCode.KV_DTYPE, text, sorted(dtypes))])
    (kv_cache_dtype,) = dtypes
    model = model_of(config, list(specs.values()))
    return GroupAttention(
        config,
        device,
        model,
        {ids[name]: every[name] for name in own},
        choose(config, model, kv_cache_dtype),
        cache_format(kv_cache_dtype, config.model_config.dtype),
        kv_cache_spec.block_size,
        mha_pools,
        lambda layer: (layer._k_scale_float, layer._v_scale_float),
    )
