"""The pools: memory for every layer of one kind. MHA and MLA hold rows per token, linear a state per request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug.declare.errors import PoolError
from attnplug.declare.model import AttentionKind, LayerSpec
from attnplug.declare.problem import DType
from attnplug.kv.allocator import OutOfPages, PageAllocator, PageCopy
from attnplug.kv.buffer import PagedBuffer, copy_pages, torch_dtype
from attnplug.kv.layers import check_scales, check_size, distinct_layers, heads_per_rank, held_for
from attnplug.kv.layout import LayoutName, PageLayout


class MHAPool:
    """Keys and values of all MHA layers among ``layers``; the others are left to other pools.

    Per layer a K cache ``[pages, page_size, kv_heads, head_dim]`` and a V cache ``[pages, page_size,
    kv_heads, v_head_dim]``, where ``kv_heads`` is this rank's part under ``tensor_parallel``, at least 1.
    ``scales`` gives a layer's fp8 key and value scale; 1.0 where absent.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        *,
        num_pages: int,
        page_size: int,
        dtype: DType,
        device: torch.device | str,
        layout: LayoutName = "token_major",
        scales: Mapping[int, tuple[float, float]] | None = None,
        tensor_parallel: int = 1,
    ) -> None:
        check_size(num_pages, page_size)
        own = distinct_layers([layer for layer in layers if layer.kind is AttentionKind.MHA], "MHA")
        scales = scales or {}
        check_scales(scales, own)
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self._keys: dict[int, PagedBuffer] = {}
        self._values: dict[int, PagedBuffer] = {}
        for layer_id, layer in own.items():
            heads = heads_per_rank(layer, tensor_parallel)
            key_scale, value_scale = scales.get(layer_id, (1.0, 1.0))
            key_layout = PageLayout.named(layout, num_pages, page_size, heads, layer.head_dim)
            value_layout = PageLayout.named(layout, num_pages, page_size, heads, layer.v_head_dim)
            self._keys[layer_id] = PagedBuffer(key_layout, dtype=dtype, device=device, scale=key_scale)
            self._values[layer_id] = PagedBuffer(value_layout, dtype=dtype, device=device, scale=value_scale)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return tuple(self._keys)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in (*self._keys.values(), *self._values.values()))

    def keys(self, layer_id: int) -> Tensor:
        """``[pages, page_size, kv_heads, head_dim]`` as stored: the cache itself, with the layout's strides."""
        return held_for(self._keys, layer_id, "MHA").pages

    def values(self, layer_id: int) -> Tensor:
        """``[pages, page_size, kv_heads, v_head_dim]`` as stored: the cache itself."""
        return held_for(self._values, layer_id, "MHA").pages

    def layout(self, layer_id: int) -> tuple[PageLayout, PageLayout]:
        """The layouts of the layer's keys and values."""
        return held_for(self._keys, layer_id, "MHA").layout, self._values[layer_id].layout

    def scales(self, layer_id: int) -> tuple[float, float]:
        """What a stored key and value must be multiplied with; 1.0 unless the cache is fp8."""
        return held_for(self._keys, layer_id, "MHA").scale, self._values[layer_id].scale

    def write(self, layer_id: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store ``k`` ``[tokens, kv_heads, head_dim]`` and ``v`` ``[tokens, kv_heads, v_head_dim]``.

        ``slots`` ``[tokens]`` int64 are flat: ``page * page_size + offset``, or -1 for padding, of which nothing is
        written. Waits for no device.
        """
        key_buffer = held_for(self._keys, layer_id, "MHA")
        value_buffer = self._values[layer_id]
        padded = key_buffer.check_rows(slots, k, "keys")
        value_buffer.check_rows(slots, v, "values")
        key_buffer.write(slots, k, padded=padded)
        value_buffer.write(slots, v, padded=padded)

    def read_keys(self, layer_id: int, slots: Tensor) -> Tensor:
        """``[*slots.shape, kv_heads, head_dim]``: in the stored type, or float32 from fp8."""
        return held_for(self._keys, layer_id, "MHA").read(slots)

    def read_values(self, layer_id: int, slots: Tensor) -> Tensor:
        """``[*slots.shape, kv_heads, v_head_dim]``: in the stored type, or float32 from fp8."""
        return held_for(self._values, layer_id, "MHA").read(slots)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages in every layer, as if one after another."""
        copy_pages((*self._keys.values(), *self._values.values()), copies)


class MLAPool:
    """Latent rows of all MLA layers among ``layers``: per layer ``[pages, page_size, 1, row_dim]``.

    A row is ``[kv_lora_rank | qk_rope_head_dim]``. Every rank holds all of it. ``scales`` gives a layer's fp8
    scale; 1.0 where absent.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        *,
        num_pages: int,
        page_size: int,
        dtype: DType,
        device: torch.device | str,
        scales: Mapping[int, float] | None = None,
    ) -> None:
        check_size(num_pages, page_size)
        own = distinct_layers([layer for layer in layers if layer.mla is not None], "MLA")
        scales = scales or {}
        check_scales(scales, own)
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self._rows: dict[int, PagedBuffer] = {}
        for layer_id, layer in own.items():
            assert layer.mla is not None
            row_layout = PageLayout.token_major(num_pages, page_size, 1, layer.mla.row_dim)
            scale = scales.get(layer_id, 1.0)
            self._rows[layer_id] = PagedBuffer(row_layout, dtype=dtype, device=device, scale=scale)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return tuple(self._rows)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._rows.values())

    def rows(self, layer_id: int) -> Tensor:
        """``[pages, page_size, 1, row_dim]`` as stored: the cache itself."""
        return held_for(self._rows, layer_id, "MLA").pages

    def layout(self, layer_id: int) -> PageLayout:
        return held_for(self._rows, layer_id, "MLA").layout

    def scale(self, layer_id: int) -> float:
        """What a stored row must be multiplied with; 1.0 unless the cache is fp8."""
        return held_for(self._rows, layer_id, "MLA").scale

    def write(self, layer_id: int, slots: Tensor, rows: Tensor) -> None:
        """Store ``rows`` ``[tokens, row_dim]`` or ``[tokens, 1, row_dim]`` at flat ``slots`` ``[tokens]`` int64.

        A row whose slot is -1 is padding, and nothing is written of it. Waits for no device.
        """
        buffer = held_for(self._rows, layer_id, "MLA")
        if rows.dim() == 2:
            rows = rows.unsqueeze(1)
        padded = buffer.check_rows(slots, rows, "latent rows")
        buffer.write(slots, rows, padded=padded)

    def read_rows(self, layer_id: int, slots: Tensor) -> Tensor:
        """``[*slots.shape, row_dim]``: in the stored type, or float32 from fp8."""
        return held_for(self._rows, layer_id, "MLA").read(slots).squeeze(-2)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages in every layer, as if one after another."""
        copy_pages(self._rows.values(), copies)


class LinearStatePool:
    """States of all linear layers among ``layers``, one slot per request, with reference counts.

    Per layer a recurrent state ``[slots, heads, key_dim, value_dim]`` float32 and a convolution state
    ``[slots, conv_channels, conv_width]`` in ``dtype``. A shared slot is a snapshot: nobody may write to it.
    """

    def __init__(
        self, layers: Sequence[LayerSpec], *, num_slots: int, dtype: DType, device: torch.device | str
    ) -> None:
        if dtype is DType.FLOAT8_E4M3:
            raise PoolError("a convolution state cannot be kept in float8_e4m3fn; give the model's own type")
        own = distinct_layers([layer for layer in layers if layer.linear is not None], "linear")
        self.dtype = dtype
        self._recurrent: dict[int, Tensor | None] = {}
        self._conv: dict[int, Tensor | None] = {}
        for layer_id, layer in own.items():
            dims = layer.linear
            assert dims is not None
            state_shape = (num_slots, dims.heads, dims.key_dim, dims.value_dim)
            conv_shape = (num_slots, dims.conv_channels, dims.conv_width)
            self._recurrent[layer_id] = (
                torch.zeros(state_shape, dtype=torch.float32, device=device) if dims.heads else None
            )
            conv = torch.zeros(conv_shape, dtype=torch_dtype(dtype), device=device) if dims.conv_width else None
            self._conv[layer_id] = conv
        self._states = [s for s in (*self._recurrent.values(), *self._conv.values()) if s is not None]
        self._slots = PageAllocator(num_slots, unit="slot")  # last: of slots that are too many the memory tells at once

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return tuple(self._recurrent)

    @property
    def nbytes(self) -> int:
        return sum(state.numel() * state.element_size() for state in self._states)

    @property
    def num_slots(self) -> int:
        return self._slots.num_pages

    @property
    def free_slots(self) -> int:
        return self._slots.free_pages

    def recurrent(self, layer_id: int) -> Tensor | None:
        """``[slots, heads, key_dim, value_dim]`` float32, or None when the layer has no heads."""
        return held_for(self._recurrent, layer_id, "linear")

    def conv(self, layer_id: int) -> Tensor | None:
        """``[slots, conv_channels, conv_width]``, or None when the layer has no convolution."""
        return held_for(self._conv, layer_id, "linear")

    def allocate(self) -> int:
        """A slot with one reference and a zero state in every layer."""
        try:
            (slot,) = self._slots.allocate(1)
        except OutOfPages as error:
            raise PoolError(
                f"all {error.total} linear-state slots are in use; wait for a request to finish, raise `state_slots`, "
                "or lower `max_batch`",
                settings=["state_slots", "max_batch"],
            ) from error
        for state in self._states:
            state[slot].zero_()
        return slot

    def references(self, slot: int) -> int:
        return self._slots.references(slot)

    def share(self, slot: int) -> None:
        """Add a reference: the slot is a snapshot from here on, until only one holder is left."""
        self._slots.share((slot,))

    def release(self, slot: int) -> None:
        """Drop a reference; the last one frees the slot."""
        self._slots.release((slot,))

    def copy(self, source: int, target: int) -> None:
        """Copy the state of ``source`` to ``target``, which must have exactly one reference."""
        source_held, target_held = self._slots.references(source), self._slots.references(target)
        if source_held < 1 or target_held != 1:
            raise PoolError(
                f"slot {source} ({source_held} references) cannot be copied to slot {target} ({target_held}): "
                "the source must be in use and the target held once; allocate a slot to copy to"
            )
        for state in self._states:
            state[target].copy_(state[source])


@dataclass(frozen=True, slots=True)
class KVPools:
    """The pools of one model: those that its layers need."""

    mha: MHAPool | None = None
    mla: MLAPool | None = None
    linear: LinearStatePool | None = None

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in (self.mha, self.mla, self.linear) if pool is not None)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages in every layer that has pages; linear states are copied by ``LinearStatePool.copy``."""
        for pool in (self.mha, self.mla):
            if pool is not None:
                pool.copy_pages(copies)
