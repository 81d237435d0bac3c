"""Pools: memory of all layers of one kind. MHA and MLA pools hold rows per token, linear pools a state per request.

``KVPools`` are all caches of one model: pools of its dense and linear layers, and keyed caches of other layer kinds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from attnplug.declare.errors import PoolError
from attnplug.declare.kv_format import PLAIN_FORMATS, KVFormat, as_format
from attnplug.declare.model import AttentionKind, LayerSpec
from attnplug.declare.problem import DType
from attnplug.kv.buffer import PageCopy, PagedBuffer, join_rows, torch_dtype
from attnplug.kv.layout import PageLayout
from attnplug.kv.row_pool import PagedPool, RowFormat, RowPool, distinct_layers, held_for


def _fitting(dtype: KVFormat | str, layer: LayerSpec) -> KVFormat:
    format = as_format(dtype)
    if (misfit := format.misfit(layer)) is not None:
        raise PoolError(f"rows of layer {layer.layer_id} cannot be kept in {format.name}: {misfit}; use another format")
    return format


class MHAPool(PagedPool):
    """Keys and values of all MHA layers among ``layers``, this rank's layers. Other kinds of layers are ignored.

    Each layer has a K cache ``[pages, page_size, kv_heads, head_dim]`` and a V cache ``[pages, page_size, kv_heads,
    v_head_dim]``; in a format whose rows have several parts, bytes ``[pages, page_size, kv_heads, row_nbytes]``. The
    pool allocates their memory, zeroed, or uses the host's (``over``). Own memory keeps the ``parts`` of rows apart, so
    that kernels load aligned vectors. ``dtype`` is a format, or the name of one that core declares. ``scales`` are key
    and value scales by layer id, 1.0 by default, for formats with a layer scale.
    """

    kind = "MHA"
    contents = ("keys", "values")

    @classmethod
    def serves(cls, layer: LayerSpec) -> bool:
        return layer.kind is AttentionKind.MHA

    @classmethod
    def formats(cls, layer: LayerSpec, dtype: KVFormat | str, *scales: float) -> tuple[RowFormat, ...]:
        rows = zip((layer.head_dim, layer.v_head_dim), scales, strict=True)
        format, heads = _fitting(dtype, layer), layer.num_kv_heads
        return tuple(RowFormat.of(format, width, scale=scale, heads=heads, separate=True) for width, scale in rows)

    def _hold(self, layers: Mapping[int, tuple[PagedBuffer, ...]], dtype: KVFormat | str) -> None:
        super()._hold(layers, dtype)
        self._joined = {layer_id: join_rows(*rows) for layer_id, rows in layers.items()}
        self._kernels: dict[int, Any] = {}
        for layer_id, (keys, values) in layers.items():
            pair = getattr(keys.kernel, "pair", None)
            self._kernels[layer_id] = None if pair is None or values.kernel is None else pair(values.kernel)

    def keys(self, layer_id: int) -> Tensor:
        """K cache ``[pages, page_size, kv_heads, head_dim]`` as stored: not a copy, with the layout's strides."""
        return held_for(self._layers, layer_id, "MHA")[0].pages

    def values(self, layer_id: int) -> Tensor:
        """V cache ``[pages, page_size, kv_heads, v_head_dim]`` as stored: not a copy."""
        return held_for(self._layers, layer_id, "MHA")[1].pages

    def parts(self, layer_id: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return views ``[pages, page_size, kv_heads, …]`` of the parts of a layer's keys, and of its values."""
        keys, values = held_for(self._layers, layer_id, "MHA")
        return tuple(part.pages for part in keys.parts), tuple(part.pages for part in values.parts)

    def layout(self, layer_id: int) -> tuple[PageLayout, PageLayout]:
        """Layouts of a layer's keys and values."""
        keys, values = held_for(self._layers, layer_id, "MHA")
        return keys.layout, values.layout

    def scales(self, layer_id: int) -> tuple[float, float]:
        """Factors of stored keys and values; 1.0 unless the format has a layer scale."""
        keys, values = held_for(self._layers, layer_id, "MHA")
        return keys.scale, values.scale

    def write(self, layer_id: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store ``k`` ``[tokens, kv_heads, head_dim]`` and ``v`` ``[tokens, kv_heads, v_head_dim]``.

        ``slots`` ``[tokens]`` int64 are flat: ``page * page_size + offset``, or -1 for padding, which is not written.
        Does not synchronise with the device.
        """
        key_buffer, value_buffer = held_for(self._layers, layer_id, "MHA")
        key_buffer.check_rows(slots, k, "keys")
        value_buffer.check_rows(slots, v, "values")
        padded = key_buffer.check_targets(slots)  # values have as many pages
        kernel = self._kernels[layer_id]
        if kernel is not None:
            kernel.write(slots, k, v)
            return
        key_buffer.write(slots, k, padded=padded)
        value_buffer.write(slots, v, padded=padded)

    def read_keys(self, layer_id: int, slots: Tensor) -> Tensor:
        """Return keys ``[*slots.shape, kv_heads, head_dim]`` in the stored dtype, or as decoded."""
        return held_for(self._layers, layer_id, "MHA")[0].read(slots)

    def read_values(self, layer_id: int, slots: Tensor) -> Tensor:
        """Return values ``[*slots.shape, kv_heads, v_head_dim]`` in the stored dtype, or as decoded."""
        return held_for(self._layers, layer_id, "MHA")[1].read(slots)

    def read(self, layer_id: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values as ``read_keys`` and ``read_values`` do, both at once if they are adjacent."""
        joined = self._joined.get(layer_id)
        if joined is None:
            return self.read_keys(layer_id, slots), self.read_values(layer_id, slots)
        keys, values = joined.read(slots).tensor_split(2, -1)
        return keys, values


class MLAPool(RowPool):
    """Latent rows of all MLA layers among ``layers``: per layer ``[pages, page_size, 1, row_dim]``.

    A row is ``[kv_lora_rank | qk_rope_head_dim]``. In a format whose rows have several parts the memory is bytes,
    ``[pages, page_size, 1, row_nbytes]``. Every rank holds all of it. ``dtype`` and ``scales`` are as in ``MHAPool``.
    """

    kind = "MLA"
    contents = ("latent rows",)

    @classmethod
    def serves(cls, layer: LayerSpec) -> bool:
        return layer.mla is not None

    @classmethod
    def formats(cls, layer: LayerSpec, dtype: KVFormat | str, *scales: float) -> tuple[RowFormat, ...]:
        dims, (scale,) = layer.mla, scales
        assert dims is not None
        return (RowFormat.of(_fitting(dtype, layer), dims.row_dim, rope=dims.qk_rope_head_dim, scale=scale),)

    def by_slot(self, layer_id: int) -> Tensor | None:
        """A layer's memory by slot, ``[slots, row_dim]``, for callers that store new rows themselves.

        Rows are contiguous. ``None`` if a row cannot be stored as it is: if the format has a codec, or if slots are not
        evenly spaced.
        """
        pages, layout = self.rows(layer_id), self.layout(layer_id)
        if self.dtype not in PLAIN_FORMATS or not layout.tokens_evenly_spaced or pages.stride(3) != 1:
            return None
        return pages.view(-1, layout.dim)

    def layout(self, layer_id: int) -> PageLayout:
        return self._of(layer_id).layout

    def scale(self, layer_id: int) -> float:
        """Factor of stored rows; 1.0 unless the format has a layer scale."""
        return self._of(layer_id).scale


class LinearStatePool:
    """States of all linear layers among ``layers``, one slot per request. The host allocates slots.

    Each layer has a recurrent state ``[slots, heads, key_dim, value_dim]`` float32 and a convolution state
    ``[slots, conv_channels, conv_width]`` in ``dtype``.
    """

    def __init__(
        self, layers: Sequence[LayerSpec], *, num_slots: int, dtype: DType, device: torch.device | str
    ) -> None:
        if dtype not in PLAIN_FORMATS:
            raise PoolError(f"a convolution state cannot be kept in {dtype}; give the model's own type")
        if num_slots < 1:
            raise PoolError(f"a pool of {num_slots} slots cannot hold anything; give 1 or more")
        own = distinct_layers([layer for layer in layers if layer.linear is not None], "linear")
        self.dtype = dtype
        self.num_slots = num_slots
        self._recurrent: dict[int, Tensor | None] = {}
        self._conv: dict[int, Tensor | None] = {}
        for layer_id, layer in own.items():
            dims = layer.linear
            assert dims is not None
            shape = (num_slots, dims.heads, dims.key_dim, dims.value_dim)
            self._recurrent[layer_id] = torch.zeros(shape, dtype=torch.float32, device=device) if dims.heads else None
            conv, stored = (num_slots, dims.conv_channels, dims.conv_width), torch_dtype(dtype)
            self._conv[layer_id] = torch.zeros(conv, dtype=stored, device=device) if dims.conv_width else None
        self._states = [s for s in (*self._recurrent.values(), *self._conv.values()) if s is not None]

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return tuple(self._recurrent)

    @property
    def nbytes(self) -> int:
        return sum(state.numel() * state.element_size() for state in self._states)

    def recurrent(self, layer_id: int) -> Tensor | None:
        """Recurrent state ``[slots, heads, key_dim, value_dim]`` float32; ``None`` if the layer has no heads."""
        return held_for(self._recurrent, layer_id, "linear")

    def conv(self, layer_id: int) -> Tensor | None:
        """Convolution state ``[slots, conv_channels, conv_width]``; ``None`` if the layer has no convolution."""
        return held_for(self._conv, layer_id, "linear")

    def zero(self, slot: int) -> None:
        """Set the state of ``slot`` to zero in every layer."""
        self._check_inside(slot)
        for state in self._states:
            state[slot].zero_()

    def copy(self, source: int, target: int) -> None:
        """Copy the state of ``source`` to ``target`` in every layer."""
        self._check_inside(source, target)
        for state in self._states:
            state[target].copy_(state[source])

    def _check_inside(self, *slots: int) -> None:
        for slot in slots:
            if not 0 <= slot < self.num_slots:
                raise PoolError(f"slot {slot} is not in this pool, which holds 0 to {self.num_slots - 1}")


class KeyedCache(Protocol):
    """A cache addressed by the pages and slots of the requests' page table. It is copied and moved along with them.

    A cache with less than one row per token (e.g. one for every fourth token) moves what belongs to the given slots.
    """

    @property
    def num_pages(self) -> int: ...

    @property
    def page_size(self) -> int:
        """Tokens per page of the page table."""

    @property
    def nbytes(self) -> int: ...

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages in every layer, as if one after another."""

    def move_rows(self, sources: Tensor, targets: Tensor) -> None:
        """Copy rows in every layer; see ``KVPools.move_rows``."""


C = TypeVar("C", bound=KeyedCache)
C_co = TypeVar("C_co", bound=KeyedCache, covariant=True)


@dataclass(frozen=True, slots=True)
class CacheKey(Generic[C_co]):
    """Typed key of a cache in ``KVPools``: ``pools.cache(CacheKey("mean keys", MeanKeys))`` returns a ``MeanKeys``.

    ``name`` is a plural noun for messages. ``hook`` is the optional hook that layers with this cache require, if any.
    """

    name: str
    kind: type[C_co]
    hook: str | None = None


@dataclass(frozen=True, slots=True)
class KVPools:
    """Caches of one model: the pools that its layers need, and other ``caches`` by key."""

    mha: MHAPool | None = None
    mla: MLAPool | None = None
    linear: LinearStatePool | None = None
    caches: Mapping[CacheKey[KeyedCache], KeyedCache] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, cache in self.caches.items():
            if not isinstance(cache, key.kind):
                raise PoolError(f"cache {key.name!r} is a {type(cache).__name__}; its key says {key.kind.__name__}")

    def cache(self, key: CacheKey[C]) -> C:
        """Return the cache with this key. Raises PoolError if there is none."""
        held = self.caches.get(key)
        if not isinstance(held, key.kind):
            names = ", ".join(sorted(repr(other.name) for other in self.caches)) or "none"
            wanted = f"cache {key.name!r} of class {key.kind.__name__}"
            raise PoolError(f"the pools hold no {wanted}; caches held: {names}; build the pools with it")
        return held

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self._paged()) + (0 if self.linear is None else self.linear.nbytes)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages in every layer that has pages; linear states are copied by ``LinearStatePool.copy``."""
        for cache in self._paged():
            cache.copy_pages(copies)

    def move_rows(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the row at slot ``sources[i]`` to slot ``targets[i]``, in every layer that has rows per token.

        Both are ``[n]`` integers on the pools' device. All rows are read before any is written, so a slot may be
        source and target. A target of -1 skips its row, whatever its source is; other targets are distinct. This does
        not synchronise with the device and can be captured. Slots outside the pool raise PoolError on a CPU. On a GPU
        they fail later, like any index out of bounds.
        """
        for cache in self._paged():
            cache.move_rows(sources, targets)

    def _paged(self) -> Iterator[KeyedCache]:
        yield from (pool for pool in (self.mha, self.mla) if pool is not None)
        yield from self.caches.values()
