"""Attention of one KV group over vLLM's own cache tensors. Built when they exist and rebuilt when they move."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnplug import AttentionBackend, KVFormat, LayerSpec, MHAPool, MLAPool, ModelSpec
from attnplug.host import (
    AttnplugError,
    BuildError,
    ForwardingBackend,
    HostContext,
    KVPools,
    ModelAttention,
    Selection,
    WorkspaceOwner,
    build_selection,
    compile_progress,
)
from attnplug_vllm.host import render
from attnplug_vllm.kv_formats import registry
from attnplug_vllm.selection import Refused, log_groups
from attnplug_vllm.specs import context_of

logger = logging.getLogger(f"vllm.{__name__}")

MHA_LAYOUT = "pages heads tokens (kv dim)"
MLA_LAYOUT = "pages tokens dim"

MakePools = Callable[[Sequence[LayerSpec], Mapping[int, Tensor], int, KVFormat, Mapping[int, Any]], KVPools]
"""Makes pools from layers, caches by layer id, page size, format of the caches and scales by layer id."""


def mha_pools(
    layers: Sequence[LayerSpec],
    caches: Mapping[int, Tensor],
    page_size: int,
    format: KVFormat,
    scales: Mapping[int, tuple[float, float]],
) -> KVPools:
    """KV pools over tensors ``[blocks, heads, tokens, 2 * dim]`` of any strides."""
    used = scales if format.layer_scale else None
    return KVPools(mha=MHAPool.over(layers, caches, MHA_LAYOUT, page_size=page_size, dtype=format, scales=used))


def mla_pools(
    layers: Sequence[LayerSpec],
    caches: Mapping[int, Tensor],
    page_size: int,
    format: KVFormat,
    scales: Mapping[int, float],
) -> KVPools:
    """KV pools over tensors ``[blocks, tokens, latent + rope]``."""
    used = scales if format.layer_scale else None
    return KVPools(mla=MLAPool.over(layers, caches, MLA_LAYOUT, page_size=page_size, dtype=format, scales=used))


_buffers: list[Tensor] = []


def _allocate(nbytes: int, device: torch.device, zeroed: bool) -> Tensor:
    """Allocate scratch memory that is never freed: graphs may hold its address after a larger buffer replaced it."""
    buffer = (torch.zeros if zeroed else torch.empty)(nbytes, dtype=torch.uint8, device=device)
    _buffers.append(buffer)
    return buffer


workspace = WorkspaceOwner(_allocate)
"""Shared by all KV groups of the process, because their layers run one after another on one stream."""


@dataclass(slots=True, eq=False)
class GroupAttention:
    """Attention of a KV group. ``layers`` are vLLM's layers by attnplug layer id, each with its cache in ``kv_cache``.

    vLLM makes metadata builders before caches and may bind other caches later. :meth:`ready` therefore builds the
    attention at the first step, and again if the first cache has another address.
    """

    config: Any
    device: torch.device
    model: ModelSpec
    layers: Mapping[int, Any]
    selection: Selection
    format: KVFormat
    page_size: int
    make_pools: MakePools
    scales: Callable[[Any], Any]
    """Reads the scales of a vLLM layer in the form that its pool takes."""
    _first_layer: Any = None
    _address: int = 0
    _attention: ModelAttention | None = None
    _pools: KVPools | None = None

    def __post_init__(self) -> None:
        self._first_layer = next(iter(self.layers.values()))

    def ready(self) -> ModelAttention:
        """Return the attention over the caches that are bound now. Raises :class:`Refused` if it cannot be built."""
        if self._attention is None or self._first_layer.kv_cache.data_ptr() != self._address:
            self._attention = self._build()
        return self._attention

    def pools(self) -> KVPools:
        """Return the pools over the caches that are bound now."""
        self.ready()
        assert self._pools is not None
        return self._pools

    def _build(self) -> ModelAttention:
        caches = {layer_id: layer.kv_cache for layer_id, layer in self.layers.items()}
        scales = {layer_id: self.scales(layer) for layer_id, layer in self.layers.items()}
        try:
            pools = self.make_pools(self.model.layers, caches, self.page_size, self.format, scales)
            context = context_of(
                self.config,
                self.model,
                device=self.device,
                kv_dtype=self.format.name,
                page_size=self.page_size,
                pools=pools,
                workspace=workspace,
            )
            with compile_progress(partial(logger.info, "attnplug has compiled %d of %d kernels")):
                backend = self._backend(context)
            attention = ModelAttention(backend, pools)
        except AttnplugError as error:
            raise Refused(error.format(render), error=error) from error
        if isinstance(backend, ForwardingBackend):
            for name, reason in backend.left_out.items():
                logger.info("attnplug: without %s: %s", name, reason)
        log_groups()
        self._address, self._pools = self._first_layer.kv_cache.data_ptr(), pools
        return attention

    def _backend(self, context: HostContext) -> AttentionBackend:
        """Build the selected backends. One that only shares a role by batch and cannot be built is left out (D2).

        One that was chosen for a role is not replaced: vLLM already relies on what it supports.
        """
        while True:
            try:
                return build_selection(self.selection, context)
            except BuildError as error:
                failed, choices = error.backend, self.selection.choices
                sharing = any(failed in choice.serving for choice in choices.values())
                if registry().strict or not sharing or any(choice.chosen is failed for choice in choices.values()):
                    raise
                left = {}
                for role, choice in choices.items():
                    others = [backend.spec.name for backend in choice.serving if backend is not failed]
                    left[role] = replace(choice, schedule=choice.schedule and choice.schedule.only(others))
                self.selection = replace(self.selection, choices=left)
                logger.warning("attnplug: %s; auto continues without it", error)
