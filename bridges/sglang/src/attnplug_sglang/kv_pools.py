"""KV pools over SGLang's memory, without a copy, and page tables from its slot tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnplug import BackendError, DType, LayerSpec, MHAPool, MLAPool, UsageError
from attnplug.host import KVPools, installed_format
from attnplug_sglang.host import FP8_DS_MLA

Translate = Callable[[Tensor], Tensor]
"""Translates SGLang's full slot numbers to those of a pool."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose caches share one slot numbering."""

    layers: tuple[LayerSpec, ...]
    translate: Translate | None = None


def kv_groups(pool: Any, layers: Sequence[LayerSpec]) -> tuple[KVGroup, ...]:
    """KV groups of a pool: one, or two if SGLang keeps sliding-window layers in a smaller pool (``SWAKVPool``)."""
    mapping = getattr(pool, "layers_mapping", None)
    if mapping is None:
        return (KVGroup(tuple(layers)),)
    whole = tuple(layer for layer in layers if not mapping[layer.layer_id][1])
    windowed = tuple(layer for layer in layers if mapping[layer.layer_id][1])
    for layer in windowed:
        if layer.sliding_window is None:
            raise BackendError(
                f"layer {layer.layer_id} has no window, but SGLang keeps only a window of its rows; use one of "
                "SGLang's own backends, or give --disable-hybrid-swa-memory"
            )
    groups = KVGroup(whole), KVGroup(windowed, pool.translate_loc_from_full_to_swa)
    return tuple(group for group in groups if group.layers)


def pools_over(pool: Any, group: KVGroup, page_size: int, scales: Mapping[int, tuple[float, float]]) -> KVPools:
    """KV pools over SGLang's memory of a group's layers. ``scales``: fp8 scales of keys and values by layer id."""
    dtype, layout = kv_format(pool), "slots heads dim"
    if group.layers[0].mla is not None:
        rows = {layer.layer_id: _pages(pool.get_key_buffer(layer.layer_id), page_size) for layer in group.layers}
        if dtype == FP8_DS_MLA:
            rows = {layer: packed.view(torch.uint8) for layer, packed in rows.items()}
        format = installed_format(dtype)
        return KVPools(mla=MLAPool.over(group.layers, rows, layout, page_size=page_size, dtype=format))
    pairs = {
        layer.layer_id: (
            _pages(pool.get_key_buffer(layer.layer_id), page_size),
            _pages(pool.get_value_buffer(layer.layer_id), page_size),
        )
        for layer in group.layers
    }
    own = {layer.layer_id: scales[layer.layer_id] for layer in group.layers if layer.layer_id in scales}
    return KVPools(mha=MHAPool.over(group.layers, pairs, layout, page_size=page_size, dtype=dtype, scales=own))


def kv_format(pool: Any) -> str:
    """Name of the KV format of a pool's rows. Raises :class:`BackendError` for one that attnplug does not know.

    Sparse models have an fp8 cache with scales in each row, or without, for the kernels that SGLang would use.
    """
    if getattr(pool, "dsa_kv_cache_store_fp8", False):
        return FP8_DS_MLA
    try:
        return DType.parse(str(pool.dtype), "kv_dtype")
    except UsageError as error:
        raise BackendError(f"the KV cache: {error.message}", settings=error.settings) from None


def _pages(buffer: Tensor, page_size: int) -> Tensor:
    """Whole pages of a buffer, including page 0, which SGLang uses for padding and never gives to a request."""
    return buffer[: buffer.shape[0] // page_size * page_size]


class PageTable:
    """Page view of SGLang's slot table ``req_to_token`` ``[rows, positions]``.

    The slots of a page are contiguous, so its first slot identifies the page. Everything runs on the device without
    synchronization.
    """

    def __init__(self, req_to_token: Tensor, page_size: int, translate: Translate | None = None) -> None:
        self._first = req_to_token[:, ::page_size]
        self.page_size, self._translate = page_size, translate
        self.width = self._first.shape[1]
        """Pages of the longest possible request."""

    @property
    def device(self) -> torch.device:
        return self._first.device

    @property
    def translated(self) -> bool:
        """Return True if the pool has its own slot numbering."""
        return self._translate is not None

    def pages_for(self, tokens: int) -> int:
        """Number of pages for ``tokens`` rows, at most ``width``."""
        return min(-(-tokens // self.page_size), self.width)

    def gather(self, requests: Tensor, tokens: int) -> Tensor:
        """Page table ``[requests, pages]`` int32 for requests of up to ``tokens`` rows."""
        slots = self._first_slots(requests, tokens)
        return (slots if self.page_size == 1 else slots // self.page_size).to(torch.int32)

    def fill(self, out: Tensor, requests: Tensor, tokens: int) -> None:
        """Write the page table to the first columns of ``out`` ``[requests, width]``, whose address graphs hold."""
        slots = self._first_slots(requests, tokens)
        torch.floor_divide(slots, self.page_size, out=out[:, : slots.shape[1]])

    def _first_slots(self, requests: Tensor, tokens: int) -> Tensor:
        slots = self._first[:, : self.pages_for(tokens)].index_select(0, requests)
        if self._translate is None:
            return slots
        return self._translate(slots).clamp_(min=0)  # rows outside the window have no slot and are not read

    def slots(self, out_cache_loc: Tensor) -> Tensor:
        """Slot mapping of new rows, int64. Padding goes to slot 0, which no request uses."""
        slots = out_cache_loc if self._translate is None else self._translate(out_cache_loc)
        return slots.to(torch.int64)
