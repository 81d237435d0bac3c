"""Sparse indexer for vLLM on GPUs without DeepGEMM (SM 80, 89, 120 and others), where vLLM's own does not run.

vLLM lets packages replace its layer ``SparseAttnIndexer`` (``CustomOp.register_oot``). The replacement copies the
layer's inputs to static memory. The attention layer, which has the plan of the step, writes the index keys along with
its latent rows and calls its backend to select rows. The index cache is registered with another metadata builder,
because vLLM's calls DeepGEMM in every decode step.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend

from attnplug import DType, KVFormat, LayerSpec
from attnplug.host import KVPools
from attnplug.sparse import IndexInputs
from attnplug_sparse.pools import INDEX_KEYS, IndexKeyPool
from attnplug_vllm import backends
from attnplug_vllm.host import HOST, index_is_ours
from attnplug_vllm.kv_group import MLA_LAYOUT, mla_pools
from attnplug_vllm.specs import Machine

_LAYER = "SparseAttnIndexer"


def replace_layer() -> None:
    """Register ``AttnplugSparseIndexer`` in place of vLLM's layer, unless another package replaced it."""
    if _LAYER not in op_registry_oot:
        CustomOp.register_oot(AttnplugSparseIndexer, name=_LAYER)


def selects(config: Any) -> bool:
    """Return True if a configuration requests attnplug and vLLM's index does not run here."""
    return backends.requests_attnplug(config, _LAYER) and index_is_ours(Machine.current().sm, HOST.installed())


@dataclass(frozen=True, slots=True, eq=False)
class KeptInputs:
    """Static copy of an indexer's inputs: q ``[tokens, heads, dim]``, k ``[tokens, dim]``, weights ``[tokens, heads]``
    float32. All layers share it, because it is read before the next layer runs."""

    q: Tensor
    k: Tensor
    weights: Tensor


_kept: dict[int, KeptInputs] = {}
"""Static inputs by the address of vLLM's ``topk_indices_buffer``, which all layers of a model share."""


def _memory(buffer: Tensor, heads: int, dim: int, dtype: torch.dtype) -> KeptInputs:
    found = _kept.get(buffer.data_ptr())
    if found is None:
        tokens, device = buffer.shape[0], buffer.device
        found = _kept[buffer.data_ptr()] = KeptInputs(
            torch.zeros(tokens, heads, dim, dtype=dtype, device=device),
            torch.zeros(tokens, dim, dtype=dtype, device=device),
            torch.zeros(tokens, heads, dtype=torch.float32, device=device),
        )
    return found


@torch.library.custom_op("attnplug::keep_index_inputs", mutates_args=("kept_q", "kept_k", "kept_weights"))
def keep_index_inputs(
    q: Tensor, k: Tensor, weights: Tensor, kept_q: Tensor, kept_k: Tensor, kept_weights: Tensor, factor: float
) -> None:
    """Copy an indexer's inputs to static memory; weights are multiplied by ``factor``.

    A custom operator, so that Inductor does not compile the fp8 conversion, which Triton lacks on SM 80.
    """
    rows = q.shape[0]
    kept_q[:rows].copy_(q)
    kept_k[:rows].copy_(k)
    torch.mul(weights, factor, out=kept_weights[:rows])


class AttnplugSparseIndexer(SparseAttnIndexer):  # type: ignore[misc] # vLLM is not installed where types are checked
    """vLLM's indexer layer; the replacement if attnplug is requested and vLLM's own does not run here.

    vLLM passes queries in e4m3; their scales and the scale of logits are factors of the weights.
    """

    kept: KeptInputs | None = None

    def __init__(self, k_cache: Any, *given: Any, **named: Any) -> None:
        config = get_current_vllm_config()
        if not selects(config):
            super().__init__(k_cache, *given, **named)
            return
        CustomOp.__init__(self)  # vLLM's constructor requires DeepGEMM
        bound = inspect.signature(SparseAttnIndexer.__init__).bind(self, k_cache, *given, **named)
        bound.apply_defaults()
        for name, value in list(bound.arguments.items())[1:]:
            setattr(self, name, value)
        heads = config.model_config.hf_text_config.index_n_heads
        self.kept = _memory(self.topk_indices_buffer, heads, self.head_dim, config.model_config.dtype)
        config.compilation_config.static_forward_context[k_cache.prefix] = IndexCache(k_cache)
        self._pool: IndexKeyPool | None = None
        self._address = 0

    def forward_cuda(self, hidden_states: Tensor, q_quant: Any, k: Tensor, weights: Tensor) -> Tensor:
        if (kept := self.kept) is None:
            selected: Tensor = super().forward_cuda(hidden_states, q_quant, k, weights)
            return selected
        # attnplug's scores include the scale of logits, and vLLM's weights do too.
        keep_index_inputs(q_quant, k, weights, kept.q, kept.k, kept.weights, self.head_dim**0.5)
        buffer: Tensor = self.topk_indices_buffer
        return buffer

    def write(self, layer: LayerSpec, slots: Tensor) -> None:
        """Write the kept index keys to vLLM's cache, at ``slots`` ``[tokens]``."""
        cache: Tensor = self.k_cache.kv_cache
        if self.kept is None or not cache.numel():  # vLLM's memory profiling runs without caches
            return
        if self._pool is None or cache.data_ptr() != self._address:
            self._pool, self._address = index_pool([layer], {layer.layer_id: cache}, cache.shape[1]), cache.data_ptr()
        flat = slots.flatten().long()
        self._pool.write(layer.layer_id, flat, self.kept.k[: flat.numel()])

    def inputs(self, rows: int) -> IndexInputs:
        """Return the static inputs of the first ``rows`` tokens. Their keys are already in the cache."""
        assert self.kept is not None
        return IndexInputs(self.kept.q[:rows], None, self.kept.weights[:rows])


class IndexCache(AttentionLayerBase):  # type: ignore[misc]
    """Index key cache in vLLM's ``static_forward_context``: vLLM's memory with ``IndexMetadataBuilder``."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    @property
    def kv_cache(self) -> Tensor:
        kv_cache: Tensor = self.cache.kv_cache
        return kv_cache

    @kv_cache.setter
    def kv_cache(self, kv_cache: Tensor) -> None:
        self.cache.kv_cache = kv_cache

    def get_attn_backend(self) -> type[IndexBackend]:
        return IndexBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return self.cache.get_kv_cache_spec(vllm_config)


class IndexBackend(DeepseekV32IndexerBackend):  # type: ignore[misc]
    """vLLM backend class of the index key cache."""

    @staticmethod
    def get_builder_cls() -> type[IndexMetadataBuilder]:
        return IndexMetadataBuilder


class IndexMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Builds nothing: the plan of the attention layers covers the index."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # abstract in vLLM

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        return AttentionCGSupport.ALWAYS

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> None:
        return None


def index_pool(layers: Sequence[LayerSpec], caches: Mapping[int, Tensor], page_size: int) -> IndexKeyPool:
    """Return a pool over vLLM's index key caches, ``[blocks, block_size, dim + 4]`` uint8 by layer id."""
    return IndexKeyPool.over(layers, caches, MLA_LAYOUT, page_size=page_size, dtype=DType.FLOAT8_E4M3)


def indexed_pools(
    index_caches: Mapping[int, Tensor],
    layers: Sequence[LayerSpec],
    caches: Mapping[int, Tensor],
    page_size: int,
    format: KVFormat,
    scales: Mapping[int, float],
) -> KVPools:
    """Return KV pools over the latent rows and index keys of one KV group."""
    latent = mla_pools(layers, caches, page_size, format, scales)
    return KVPools(mla=latent.mla, caches={INDEX_KEYS: index_pool(layers, index_caches, page_size)})
