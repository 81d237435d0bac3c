"""MLA in vLLM: the backend, implementation, metadata builder and prefill classes.

vLLM absorbs, chunks and merges MLA itself. It calls ``forward_mqa`` with absorbed queries to decode (``mla_decode``).
Prefill runs on vLLM's own backend, or on an attnplug backend that is named for it (``mla_prefill``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from attnplug import LayerSpec, Refusal, Role
from attnplug.host import Selection
from attnplug_vllm.geometry import with_exact_lengths
from attnplug_vllm.host import Feature, refused_mla_prefill, unsupported_features
from attnplug_vllm.kv_formats import cache_format
from attnplug_vllm.kv_group import GroupAttention, mla_pools
from attnplug_vllm.mha import BlockSizes, cudagraph_support
from attnplug_vllm.mla_decode import DecodeGroup, DecodeStep
from attnplug_vllm.mla_prefill import RaggedPrefill
from attnplug_vllm.selection import choose, log_group, raise_if_refused
from attnplug_vllm.settings import SECTION
from attnplug_vllm.specs import context_ranks, layer_ids, mla_layer, model_of


# vLLM is not installed where types are checked
class AttnplugMLABackend(BlockSizes, MLACommonBackend):  # type: ignore[misc]
    """Backend class that vLLM queries for its properties. The constructor of the first layer selects a backend or
    refuses with every reason, before weights are loaded."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AttnplugMLAImpl]:
        return AttnplugCPUMLAImpl if current_platform.is_cpu() else AttnplugMLAImpl

    @staticmethod
    def get_builder_cls() -> type[AttnplugMLABuilder]:
        return AttnplugMLABuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return True  # a layer's constructor refuses others with a reason

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Return the layouts without gaps between a layer's rows, which every backend reads.

        vLLM calls it from 0.29 on; up to 0.28 there are no other layouts.
        """
        import vllm.v1.kv_cache_interface as caches  # 0.26 has no KVCacheLayout

        layouts = caches.KVCacheLayout
        return layouts.LBNHC, layouts.LBHNC, layouts.LHBNC

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True  # a layer's constructor refuses backends that do not claim it

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False


class AttnplugMLAImpl(MLACommonImpl[MLACommonMetadata]):  # type: ignore[misc]
    """Attention layer. The metadata builder of its KV group builds a backend from ``spec`` and ``selection``."""

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,  # vLLM's releases add new ones
    ) -> None:
        config = get_current_vllm_config()
        fp8_on_cpu = current_platform.is_cpu() and kv_cache_dtype in ("fp8", "fp8_e4m3")
        requested = {
            "ALiBi slopes": alibi_slopes is not None,
            "a sliding window over latent rows": sliding_window is not None,
            "a soft cap of latent attention's logits": bool(logits_soft_cap),
            "an indexer in a model without index_topk": mla_args.get("indexer") is not None,
            Feature.MLA_FP8_ON_CPU: fp8_on_cpu,
        }
        raise_if_refused([*unsupported_features(requested), *_refused_prefill(config)])
        self.spec = mla_layer(
            0,
            heads=num_heads * context_ranks(config),  # decode attends with the heads of all ranks of the group
            scale=scale,
            kv_lora_rank=mla_args["kv_lora_rank"],
            nope=mla_args["qk_nope_head_dim"],
            rope=mla_args["qk_rope_head_dim"],
            v_head_dim=mla_args["v_head_dim"],
        )
        self.selection = choose_for_layer(config, self.spec, kv_cache_dtype)
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        self.supports_quant_query_input = False  # queries keep the model's dtype for every cache dtype

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return Role.PREFILL not in self.selection.choices and bool(super().fused_output_quant_supported(quant_key))

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with absorbed queries: latent part ``[rows, heads, latent]`` and rotary part ``[rows, heads, rope]``,
        or both in one. vLLM has already written the new rows to the cache."""
        step = attn_metadata.decode
        assert isinstance(step, DecodeStep)
        latent, rope = q if isinstance(q, tuple) else (q, None)
        lse = None
        if self.need_to_return_lse_for_decode:
            lse = torch.empty(latent.shape[:2], dtype=torch.float32, device=latent.device)
        out = step.attend(latent, rope, layer.layer_name, lse)
        if lse is not None:  # a rank may have no rows of a request
            lse.masked_fill_((step.seq_lens == 0).unsqueeze(-1), float("-inf"))
        return out, lse


class AttnplugCPUMLAImpl(AttnplugMLAImpl):
    """Implementation for the CPU, where vLLM has no kernel that writes latent rows."""

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        skip_scale: bool = False,  # from vLLM 0.33 on; for quantized caches
    ) -> None:
        if not kv_cache.numel():
            return
        slots = slot_mapping.flatten().long()
        live = (slots >= 0).nonzero().squeeze(1)
        slots, size = slots[live], kv_cache.shape[1]
        rows = torch.cat([kv_c_normed[live], k_pe.squeeze(1)[live]], -1)
        kv_cache[slots // size, slots % size] = rows.to(kv_cache.dtype)


class AttnplugMLABuilder(MLACommonMetadataBuilder[MLACommonMetadata]):  # type: ignore[misc]
    """vLLM's metadata builder with attnplug's decode metadata and, if requested, an attnplug prefill backend."""

    query_len_support: QueryLenSupport = QueryLenSupport.SINGLE_ONLY
    _attnplug_prefill: AttnplugMLAPrefill | None = None
    _lengths: Tensor | None = None
    """CPU lengths of the step that is being built."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        return cudagraph_support()

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self._arguments = kv_cache_spec, layer_names, vllm_config, device
        group = group_of(*self._arguments)
        log_group(vllm_config, layer_names, group.model, group.selection)
        self._decode, selection = _decode(group, layer_names), group.selection
        if self._decode.extends:  # set on the object, because one class serves every backend
            self.query_len_support = QueryLenSupport.VARLEN
        elif self._decode.max_verified:
            self.query_len_support = QueryLenSupport.UNIFORM
        self._capturing = False
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if Role.PREFILL in selection.choices:
            chosen = replace(selection, choices={Role.PREFILL: selection.choices[Role.PREFILL]})
            self._attnplug_prefill = self._prefill_backend = AttnplugMLAPrefill.of(replace(group, selection=chosen))

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> MLACommonMetadata:
        names = self._arguments[1]
        if len(names) != len(self._decode.specs):  # vLLM appends further draft layers to the list that it gave
            self._decode = _decode(group_of(*self._arguments), names)
        self._lengths = self._local_lengths(common_attn_metadata.seq_lens_cpu_upper_bound)
        if self._attnplug_prefill is not None:
            self._attnplug_prefill.common = common_attn_metadata
        return super().build(common_prefix_len, common_attn_metadata, fast_build)

    def _local_lengths(self, seq_lens: Tensor | None) -> Tensor | None:
        """Return KV lengths on this rank, with decode context parallelism."""
        parallel = self._arguments[2].parallel_config
        if seq_lens is None or (ranks := parallel.decode_context_parallel_size) == 1:
            return seq_lens
        from vllm.distributed.parallel_state import get_dcp_group
        from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

        rank, interleave = get_dcp_group().rank_in_group, parallel.cp_kv_cache_interleave_size
        local: Tensor = get_dcp_local_seq_lens(seq_lens, ranks, rank, interleave)
        return local

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> MLACommonMetadata:
        if self._decode.needs_lengths:
            common_attn_metadata = with_exact_lengths(common_attn_metadata)
        return super().build_for_drafting(common_attn_metadata, draft_index)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> MLACommonMetadata:
        self._capturing = True
        try:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self._capturing = False

    def _build_decode(
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        max_seq_len: int,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: Tensor | None,
        max_query_len: int | None = None,
    ) -> DecodeStep:
        requests = block_table_tensor.shape[0]
        longest = 1 if num_decode_tokens == requests else int(query_start_loc_cpu.diff().max())
        step = DecodeStep(
            block_table_tensor,
            seq_lens_device,
            self._decode,
            num_decode_tokens,
            longest,
            max_seq_len,
            query_start_loc_device,
        )
        if self._capturing:
            self._decode.capture(step)
            return step
        needed = self._decode.needs_lengths
        assert self._lengths is not None or not needed
        if self._lengths is not None and (needed or self._decode.shared):
            step.host = (query_start_loc_cpu, self._lengths[:requests])
        self._decode.replay(step)
        return step


class AttnplugMLAPrefill(MLAPrefillBackend):  # type: ignore[misc]
    """Prefill backend of a KV group, used in place of the one that vLLM selected."""

    ragged: RaggedPrefill
    common: Any = None
    """``CommonAttentionMetadata`` of the step that is being built."""

    @classmethod
    def of(cls, group: GroupAttention) -> AttnplugMLAPrefill:
        """Make the prefill backend of a KV group."""
        layer = group.model.layers[0]
        assert layer.mla is not None
        made = cls(
            num_heads=layer.num_heads,
            scale=layer.scale,
            kv_lora_rank=layer.mla.kv_lora_rank,
            qk_nope_head_dim=layer.mla.qk_nope_head_dim,
            qk_rope_head_dim=layer.mla.qk_rope_head_dim,
            v_head_dim=layer.v_head_dim,
            vllm_config=group.config,
        )
        made.ragged = RaggedPrefill(group)
        return made

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        self.ragged.prepare(prefill_metadata, self.common)

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        assert out is None and output_scale is None, "vLLM passes these only to backends that declare them"
        result, lse = self.ragged.new_tokens(q, k, v, return_softmax_lse)
        return result if lse is None else (result, lse)

    def run_prefill_context_chunk(
        self, *, q: Tensor, k: Tensor, v: Tensor, chunk_idx: int = 0, chunk: Any = None, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend to one chunk. vLLM 0.26 passes its index and all queries, 0.32 the chunk and its own queries."""
        assert out is None, "vLLM passes it only to backends that declare it"
        return self.ragged.context_chunk(chunk_idx if chunk is None else chunk.index, q, k, v)


def group_of(kv_cache_spec: Any, names: Sequence[str], config: Any, device: torch.device) -> GroupAttention:
    """Return the attention of the layers that share a block table."""
    modules = config.compilation_config.static_forward_context
    layers = {layer_id: modules[name] for name, layer_id in layer_ids(names).items()}
    first = modules[names[0]].impl
    specs = [replace(layer.impl.spec, layer_id=layer_id) for layer_id, layer in layers.items()]
    return GroupAttention(
        config=config,
        device=device,
        model=model_of(config, specs),
        layers=layers,
        selection=first.selection,
        format=cache_format(first.kv_cache_dtype, config.model_config.dtype),
        page_size=kv_cache_spec.block_size,
        make_pools=mla_pools,
        scales=lambda layer: layer._k_scale_float,
    )


def _decode(group: GroupAttention, names: Sequence[str]) -> DecodeGroup:
    """Return the decode backends of a KV group."""
    choices = {Role.DECODE: group.selection.choices[Role.DECODE]}
    decode = replace(group, selection=replace(group.selection, choices=choices))
    return DecodeGroup(decode, layer_ids(names), group.config.compilation_config.max_cudagraph_capture_size or 0)


def choose_for_layer(config: Any, spec: LayerSpec, kv_cache_dtype: str) -> Selection:
    """Return the selection of an equal layer made before, or make one."""
    for layer in reversed(config.compilation_config.static_forward_context.values()):
        other: Any = getattr(layer, "impl", None)
        if getattr(other, "spec", None) == spec and other.kv_cache_dtype == kv_cache_dtype:
            selection: Selection = other.selection
            return selection
    return choose(config, model_of(config, [spec]), kv_cache_dtype)


def _refused_prefill(config: Any) -> list[Refusal]:
    if "prefill" not in (config.additional_config or {}).get(SECTION, {}):
        return []
    host_backend = config.attention_config.mla_prefill_backend
    return list(refused_mla_prefill(None if host_backend is None else host_backend.name, context_ranks(config)))
