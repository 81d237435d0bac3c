"""Capacity of a runner, and the bytes that pages and states take."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnplug import DType, ModelSpec
from attnplug.host import installed_format
from attnplug_sparse.hisparse import HotLayers, HotSizes, rows_and_entries
from attnplug_sparse.pools import IndexKeyPool, compressed_page_bytes


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sizes for which a runner allocates memory."""

    num_pages: int
    page_size: int
    max_batch: int
    max_step_tokens: int
    context_length: int
    state_slots: int = 0
    """Slots for linear-attention states: one per running request, and some for snapshots."""
    lookahead: int = 0
    """Cache rows of a request beyond its context, which speculation writes."""
    nodes: int = 1
    """Rows of a request that are verified together."""
    hot_buffer: int = 0
    """Rows of a request's hot buffer if its other rows are in host memory (HiSparse); 0 if all rows are on the
    device."""

    @property
    def max_rows(self) -> int:
        """Most new rows of a step, padded requests included."""
        return max(self.max_step_tokens, self.max_batch * self.nodes)

    @property
    def hot_sizes(self) -> HotSizes:
        """Device sizes of HiSparse."""
        context = -(-(self.context_length + self.lookahead) // self.page_size) * self.page_size
        return HotSizes(self.max_batch, self.max_rows, context, self.hot_buffer, self.nodes)


def bytes_per_state(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the bytes of one request's linear states in all layers of a rank's ``spec``.

    Recurrent states are float32. A convolution state holds activations, in the model's ``dtype``.
    """
    total = 0
    for layer in spec.linear_layers:
        dims = layer.linear
        assert dims is not None
        total += dims.heads * dims.key_dim * dims.value_dim * torch.float32.itemsize
        total += dims.conv_channels * dims.conv_width * dtype.itemsize
    return total


def bytes_per_page(
    spec: ModelSpec,
    page_size: int,
    kv_dtype: str,
    dtype: torch.dtype,
    index_dtype: str | None = None,
    *,
    drafts: int = 0,
) -> int:
    """Return the bytes of one page in all layers of a rank's ``spec``. Compressed entries have the model's ``dtype``;
    so have index keys, unless ``index_dtype`` is given. ``drafts`` is that of ``CompressedPool``."""
    row, index = 0, installed_format(index_dtype or own_dtype(dtype))
    for layer in spec.full_layers:
        row += installed_format(kv_dtype).token_nbytes(layer)
    for layer in spec.index_layers:
        if layer.indexer is not None:
            row += IndexKeyPool.key_nbytes(layer.indexer, index)
    return page_size * row + compressed_page_bytes(spec.layers, page_size, dtype, drafts)


@dataclass(frozen=True, slots=True)
class HotBytes:
    """Bytes if latent rows, and the entries that indexes select, are in host memory (HiSparse)."""

    host_page: int
    """Host memory per page."""
    device_page: int
    """Device memory per page: index keys and other entries, and room for the page's rows in one layer."""
    fixed: int
    """Device memory for hot buffers, new rows and tables."""

    @classmethod
    def of(
        cls, spec: ModelSpec, capacity: Capacity, kv_dtype: str, dtype: torch.dtype, index_dtype: str | None
    ) -> HotBytes:
        size, drafts = capacity.page_size, capacity.nodes - 1
        host = staged = fixed = 0
        for group, stored in hot_layers(spec, capacity, kv_dtype, own_dtype(dtype)):
            row = installed_format(stored).token_nbytes(group.layers[0])
            staged += row * group.rows_per_page(size)
            host += row * group.rows_per_page(size) * len(group.layers)
            fixed += group.sizes.device_nbytes(len(group.layers), row)
        page = bytes_per_page(spec, size, kv_dtype, dtype, index_dtype, drafts=drafts)
        return cls(host, page - host + staged, fixed)


def hot_layers(spec: ModelSpec, capacity: Capacity, kv_dtype: str, dtype: DType) -> list[tuple[HotLayers, str]]:
    """Return the layers with latent rows in host memory, then those with entries there, and the formats of both."""
    rows, entries = rows_and_entries(spec.layers, capacity.hot_sizes)
    return [(rows, kv_dtype)] if entries is None else [(rows, kv_dtype), (entries, dtype)]


def own_dtype(dtype: torch.dtype) -> DType:
    return DType(str(dtype).removeprefix("torch."))
