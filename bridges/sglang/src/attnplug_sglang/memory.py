"""SGLang's pools as ours, without a copy, and its tables of slots as page tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnplug import BackendError, DType, LayerSpec, MHAPool, MLAPool
from attnplug.host import KVPools, UsageError

Translate = Callable[[Tensor], Tensor]
"""Slots of SGLang's own numbering → slots of a pool."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose caches share one numbering of slots."""

    layers: tuple[LayerSpec, ...]
    translate: Translate | None = None


def kv_groups(pool: Any, layers: Sequence[LayerSpec]) -> tuple[KVGroup, ...]:
    """One group; or two, if SGLang keeps layers with a window in a smaller pool of their own (``SWAKVPool``)."""
    mapping = getattr(pool, "layers_mapping", None)
    if mapping is None:
        return (KVGroup(tuple(layers)),)
    whole = tuple(layer for layer in layers if not mapping[layer.layer_id][1])
    windowed = tuple(layer for layer in layers if mapping[layer.layer_id][1])
    for layer in windowed:
        if layer.sliding_window is None:
            raise BackendError(
                f"layer {layer.layer_id} has no window, but SGLang keeps only a window of its rows; choose a backend "
                "of SGLang's, or give --disable-hybrid-swa-memory"
            )
    groups = KVGroup(whole), KVGroup(windowed, pool.translate_loc_from_full_to_swa)
    return tuple(group for group in groups if group.layers)


def pools_over(pool: Any, group: KVGroup, page_size: int, scales: Mapping[int, tuple[float, float]]) -> KVPools:
    """Our pools over the memory of some layers. ``scales`` are those of fp8 keys and values, by layer."""
    dtype = kv_dtype(pool.dtype)
    if group.layers[0].mla is not None:
        rows = {layer.layer_id: _pages(pool.get_key_buffer(layer.layer_id), page_size) for layer in group.layers}
        return KVPools(mla=MLAPool.over(group.layers, rows, "slots heads dim", page_size=page_size, dtype=dtype))
    pairs = {
        layer.layer_id: (
            _pages(pool.get_key_buffer(layer.layer_id), page_size),
            _pages(pool.get_value_buffer(layer.layer_id), page_size),
        )
        for layer in group.layers
    }
    own = {layer.layer_id: scales[layer.layer_id] for layer in group.layers if layer.layer_id in scales}
    layout = "slots heads dim"
    return KVPools(mha=MHAPool.over(group.layers, pairs, layout, page_size=page_size, dtype=dtype, scales=own))


def kv_dtype(dtype: torch.dtype) -> DType:
    try:
        return DType.parse(str(dtype), "kv_dtype")
    except UsageError as error:
        raise BackendError(f"the KV cache: {error.message}", settings=error.settings) from None


def _pages(buffer: Tensor, page_size: int) -> Tensor:
    """The whole pages of a buffer. Page 0 is among them: SGLang never gives it to a request, and pads with it."""
    return buffer[: buffer.shape[0] // page_size * page_size]


class PageTable:
    """SGLang's slots of each request, ``req_to_token`` ``[rows, positions]``, seen as pages.

    A page's slots follow each other, so its first one tells the page. Everything runs on the device and waits for
    nothing.
    """

    def __init__(self, req_to_token: Tensor, page_size: int, translate: Translate | None = None) -> None:
        self._first = req_to_token[:, ::page_size]
        self.page_size, self._translate = page_size, translate
        self.width = self._first.shape[1]
        """Pages of the longest request that the table holds."""

    @property
    def device(self) -> torch.device:
        return self._first.device

    @property
    def translated(self) -> bool:
        """Whether the pool numbers its slots in its own way."""
        return self._translate is not None

    def pages_for(self, tokens: int) -> int:
        return min(-(-tokens // self.page_size), self.width)

    def gather(self, requests: Tensor, tokens: int) -> Tensor:
        """``[requests, pages]`` int32 for requests of up to ``tokens`` rows."""
        slots = self._first_slots(requests, tokens)
        return (slots if self.page_size == 1 else slots // self.page_size).to(torch.int32)

    def fill(self, out: Tensor, requests: Tensor, tokens: int) -> None:
        """The same into the first columns of ``out`` ``[requests, width]``, whose address graphs hold."""
        slots = self._first_slots(requests, tokens)
        torch.floor_divide(slots, self.page_size, out=out[:, : slots.shape[1]])

    def _first_slots(self, requests: Tensor, tokens: int) -> Tensor:
        slots = self._first[:, : self.pages_for(tokens)].index_select(0, requests)
        if self._translate is None:
            return slots
        return self._translate(slots).clamp_(min=0)  # rows that left the window have no slot, and are not read

    def slots(self, out_cache_loc: Tensor) -> Tensor:
        """Where new rows go, int64. Padding goes to slot 0, which no request has."""
        slots = out_cache_loc if self._translate is None else self._translate(out_cache_loc)
        return slots.to(torch.int64)
