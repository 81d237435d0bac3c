"""Sparse MLA in vLLM (DeepSeek-V3.2, GLM-5): the backend, implementation and metadata builder classes.

An indexer selects the cache rows of each token and writes their positions to a buffer that all layers share. Attention
over these rows runs absorbed, for prefill and decode alike. Prefills of at most ``index_topk`` rows select all of them:
vLLM runs those as dense MHA on its own prefill backend. If vLLM's indexer does not support the GPU, the backend selects
the rows (``indexer``), and the buffer holds their slots.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionCGSupport

from attnplug.host import KVPools
from attnplug.sparse import IndexerDims, selected_tensor
from attnplug_vllm.geometry import with_exact_lengths
from attnplug_vllm.host import FP8_DS_MLA, HOST, INDEX_BY_HOST, index_is_ours, refused_sparse, unsupported_features
from attnplug_vllm.mha import cudagraph_support
from attnplug_vllm.mla import AttnplugMLABackend, choose_for_layer, group_of
from attnplug_vllm.mla_decode import DecodeGroup, DecodeStep
from attnplug_vllm.selection import log_group, raise_if_refused
from attnplug_vllm.specs import Machine, context_ranks, layer_ids, mla_layer

if TYPE_CHECKING:  # it imports vLLM's indexer, which most models do not have
    from attnplug_vllm.indexer import AttnplugSparseIndexer

_FP8_DS_MLA_BYTES = 656
"""Bytes of a row in ``fp8_ds_mla``: 512 values in e4m3, 4 float32 scales, 64 rotary values in bfloat16."""


class AttnplugSparseMLABackend(AttnplugMLABackend):
    """Backend class that vLLM queries for its properties."""

    @staticmethod
    def get_impl_cls() -> type[AttnplugSparseMLAImpl]:
        return AttnplugSparseMLAImpl

    @staticmethod
    def get_builder_cls() -> type[AttnplugSparseMLABuilder]:
        return AttnplugSparseMLABuilder

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Shape of a layer's cache, for vLLM up to 0.28."""
        return num_blocks, block_size, _FP8_DS_MLA_BYTES if cache_dtype_str == FP8_DS_MLA else head_size


class SparseMLAStep:
    """Metadata of a step: the fields of vLLM's builder, which vLLM's layer reads, and the decode steps of its parts.

    ``whole`` covers all requests, ``decodes`` the leading ones with few new tokens. Both are the same object if no
    request prefills. vLLM runs either part: all requests, or only ``decodes`` if the others run as dense MHA.
    """

    whole: DecodeStep
    decodes: DecodeStep | None
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    def part(self, rows: int) -> DecodeStep:
        """Return the part of the batch that has ``rows`` new tokens."""
        decodes = self.decodes
        return decodes if decodes is not None and rows == decodes.rows else self.whole


class AttnplugSparseMLAImpl(SparseMLACommonImpl):  # type: ignore[misc] # vLLM is not installed where types are checked
    """Sparse attention layer. ``index`` is the layer's own attnplug indexer, if it has one."""

    supports_dcp: bool = False
    index: AttnplugSparseIndexer | None = None

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
        requested = {
            "ALiBi slopes": alibi_slopes is not None,
            "a sliding window over latent rows": sliding_window is not None,
            "a soft cap of latent attention's logits": bool(logits_soft_cap),
        }
        hisparse = getattr(config.attention_config, "hisparse_config", None)
        raise_if_refused([*unsupported_features(requested), *refused_sparse(context_ranks(config), hisparse)])
        text = config.model_config.hf_text_config
        layer = mla_layer(
            0,
            heads=num_heads,
            scale=scale,
            kv_lora_rank=mla_args["kv_lora_rank"],
            nope=mla_args["qk_nope_head_dim"],
            rope=mla_args["qk_rope_head_dim"],
            v_head_dim=mla_args["v_head_dim"],
        )
        if index_is_ours(Machine.current().sm, HOST.installed()):
            self.index = getattr(mla_args.get("indexer"), "indexer_op", None)  # a layer that shares one has none
        shares = INDEX_BY_HOST if self.index is None else None
        dims = IndexerDims(text.index_n_heads, text.index_head_dim, text.index_topk, shares=shares)
        self.spec = replace(layer, indexer=dims)
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

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: SparseMLAStep,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with absorbed queries ``[rows, heads, latent]`` and ``[rows, heads, rope]``, or both in one, to the
        selected rows. vLLM has already written the new rows to the cache."""
        latent, rope = q if isinstance(q, tuple) else (q, None)
        rows = latent.shape[0]
        step, buffer = attn_metadata.part(rows), self.topk_indices_buffer[:rows]
        if self.index is not None:
            chosen = step.select(self.index.inputs(rows), layer.layer_name)
            step.selected_by = type(chosen)
            buffer.copy_(selected_tensor(chosen))
        return step.attend(latent, rope, layer.layer_name, None, step.selected_by(buffer)), None

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
        """Write latent rows as vLLM does, and index keys if ``index`` is set.

        Index keys are written for all new tokens, also if a prefill runs as dense MHA: later steps select from them.
        """
        rest = {"skip_scale": True} if skip_scale else {}
        super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, **rest)
        if self.index is not None:
            self.index.write(self.spec, slot_mapping)


class AttnplugSparseMLABuilder(SparseMLACommonMetadataBuilder):  # type: ignore[misc]
    """vLLM's metadata builder with attnplug's plans."""

    metadata_cls = SparseMLAStep

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        return cudagraph_support()

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self._arguments = kv_cache_spec, layer_names, vllm_config, device
        super().__init__(*self._arguments)
        self._group = self._new_group()
        log_group(vllm_config, layer_names, self._group.attention.model, self._group.attention.selection)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self._capturing = False

    def _new_group(self) -> DecodeGroup:
        config, names = self._arguments[2], self._arguments[1]
        capture_size = config.compilation_config.max_cudagraph_capture_size or 0
        group = group_of(*self._arguments)
        indexes = {layer_id: layer.impl.index for layer_id, layer in group.layers.items() if layer.impl.index}
        if indexes:
            from attnplug_vllm.indexer import indexed_pools

            def pools(*given: Any) -> KVPools:
                caches = {layer_id: index.k_cache.kv_cache for layer_id, index in indexes.items()}
                return indexed_pools(caches, *given)

            group = replace(group, make_pools=pools)
        return DecodeGroup(group, layer_ids(names), capture_size)

    def _build_req_id_per_token(self, common_attn_metadata: Any) -> None:
        """Build nothing: backends plan by request. This saves a copy to the device."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> SparseMLAStep:
        if len(self._arguments[1]) != len(self._group.specs):  # vLLM appends further draft layers to the list
            self._group = self._new_group()
        step: SparseMLAStep = super().build(common_prefix_len, common_attn_metadata, fast_build)
        step.whole = self._part(common_attn_metadata, common_attn_metadata.num_reqs)
        if self._capturing:
            step.decodes = step.whole
            self._group.capture(step.whole)
            return step
        step.decodes = step.whole
        if step.num_prefills:
            step.decodes = self._part(common_attn_metadata, step.num_decodes) if step.num_decodes else None
        else:
            self._group.replay(step.whole)
        return step

    def _part(self, common: Any, requests: int) -> DecodeStep:
        """Return the decode step of the first ``requests`` requests."""
        starts = common.query_start_loc_cpu[: requests + 1]
        rows = common.num_actual_tokens if requests == common.num_reqs else int(starts[-1])
        longest = 1 if rows == requests else int(starts.diff().max())
        step = DecodeStep(
            common.block_table_tensor[:requests],
            common.seq_lens[:requests],
            self._group,
            rows,
            longest,
            common.max_seq_len,
            common.query_start_loc[: requests + 1],
        )
        lengths = common.seq_lens_cpu_upper_bound
        if lengths is not None and (self._group.needs_lengths or self._group.shared):
            step.host = (starts, lengths[:requests])
        return step

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> SparseMLAStep:
        if self._group.needs_lengths:
            common_attn_metadata = with_exact_lengths(common_attn_metadata)
        step: SparseMLAStep = super().build_for_drafting(common_attn_metadata, draft_index)
        return step

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> SparseMLAStep:
        self._capturing = True
        try:
            return self.build(0, common_attn_metadata)
        finally:
            self._capturing = False
