"""Attention of one KV group over vLLM's own cache tensors: built when they exist, and again when they have moved."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnplug import DType, ForwardingBackend, LayerSpec, MHAPool, MLAPool, ModelSpec
from attnplug.host import AttnplugError, KVPools, ModelAttention, Selection, WorkspaceOwner, build_selection
from attnplug_vllm.choice import Refused
from attnplug_vllm.host import render
from attnplug_vllm.specs import context_of

logger = logging.getLogger(f"vllm.{__name__}")

MHA_LAYOUT = "pages heads tokens (kv dim)"
MLA_LAYOUT = "pages tokens dim"

MakePools = Callable[[Sequence[LayerSpec], Mapping[int, Tensor], int, DType, Mapping[int, Any]], KVPools]
"""Pools over caches by layer id: layers, caches, page size, what the caches hold, fp8 scales by layer id."""


def mha_pools(
    layers: Sequence[LayerSpec],
    caches: Mapping[int, Tensor],
    page_size: int,
    dtype: DType,
    scales: Mapping[int, tuple[float, float]],
) -> KVPools:
    """Over tensors ``[blocks, heads, tokens, 2 * dim]``, whatever their strides."""
    fp8 = scales if dtype is DType.FLOAT8_E4M3 else None
    return KVPools(mha=MHAPool.over(layers, caches, MHA_LAYOUT, page_size=page_size, dtype=dtype, scales=fp8))


def mla_pools(
    layers: Sequence[LayerSpec],
    caches: Mapping[int, Tensor],
    page_size: int,
    dtype: DType,
    scales: Mapping[int, float],
) -> KVPools:
    """Over tensors ``[blocks, tokens, latent + rope]``."""
    fp8 = scales if dtype is DType.FLOAT8_E4M3 else None
    return KVPools(mla=MLAPool.over(layers, caches, MLA_LAYOUT, page_size=page_size, dtype=dtype, scales=fp8))


_kept: list[Tensor] = []


def _allocate(nbytes: int, device: torch.device, zeroed: bool) -> Tensor:
    """Scratch that lives as long as the process: graphs may hold its address, also after it was replaced by more."""
    buffer = (torch.zeros if zeroed else torch.empty)(nbytes, dtype=torch.uint8, device=device)
    _kept.append(buffer)
    return buffer


workspace = WorkspaceOwner(_allocate)
"""One for all KV groups of this process: their layers run one after the other, on one stream."""


@dataclass(slots=True, eq=False)
class GroupAttention:
    """The attention of a KV group. ``layers`` are vLLM's own, by our layer id; each has its cache in ``kv_cache``.

    vLLM makes metadata builders before caches, and may bind other caches later. So this is built by :meth:`ready`, at
    the first step, and again if the address of a cache is another one.
    """

    config: Any
    device: torch.device
    model: ModelSpec
    layers: Mapping[int, Any]
    selection: Selection
    kv_dtype: DType
    page_size: int
    make_pools: MakePools
    scales: Callable[[Any], Any]
    """The fp8 scales of a layer of vLLM's, as its pool takes them."""
    _first: Any = None
    _address: int = 0
    _attention: ModelAttention | None = None

    def __post_init__(self) -> None:
        self._first = next(iter(self.layers.values()))

    def ready(self) -> ModelAttention:
        """The attention over the caches that are bound now."""
        if self._attention is None or self._first.kv_cache.data_ptr() != self._address:
            self._attention = self._build()
        return self._attention

    def _build(self) -> ModelAttention:
        caches = {layer_id: layer.kv_cache for layer_id, layer in self.layers.items()}
        scales = {layer_id: self.scales(layer) for layer_id, layer in self.layers.items()}
        try:
            pools = self.make_pools(self.model.layers, caches, self.page_size, self.kv_dtype, scales)
            context = context_of(
                self.config,
                self.model,
                device=self.device,
                kv_dtype=self.kv_dtype,
                page_size=self.page_size,
                pools=pools,
                workspace=workspace,
            )
            backend = build_selection(self.selection, context)
            attention = ModelAttention(backend, pools)
        except AttnplugError as error:
            raise Refused(error.told(render)) from error
        if isinstance(backend, ForwardingBackend):
            for name, why in backend.left_out.items():
                logger.info("attnplug: without %s: %s", name, why)
        self._address = self._first.kv_cache.data_ptr()
        return attention
