"""Sizes of what a runner allocates, and the bytes that pages and states take."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnplug import DType, IndexKeyPool, MLAPool, ModelSpec
from attnplug.host import HotSizes, compressed_page_bytes, torch_dtype


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much the runner makes room for."""

    num_pages: int
    page_size: int
    max_batch: int
    max_step_tokens: int
    context_length: int
    state_slots: int = 0
    """Slots for linear-attention states: one for each running request, and some for snapshots."""
    spare: int = 0
    """Cache rows of a request past its context, for what speculation writes there."""
    nodes: int = 1
    """Rows of a request that are verified at once."""
    hot_buffer: int = 0
    """Rows of a request's hot buffer, where all others are in host memory; 0 where all rows are on the device."""

    @property
    def most_rows(self) -> int:
        """New rows of a step, those of padded requests included."""
        return max(self.max_step_tokens, self.max_batch * self.nodes)

    @property
    def hot_sizes(self) -> HotSizes:
        """What HiSparse makes room for on the device."""
        context = -(-(self.context_length + self.spare) // self.page_size) * self.page_size
        return HotSizes(self.max_batch, self.most_rows, context, self.hot_buffer, self.nodes)


def bytes_per_state(spec: ModelSpec, dtype: torch.dtype) -> int:
    """What one request's linear states take in all layers of a rank's ``spec`` together.

    Recurrent states are float32. What a convolution remembers are activations, in the model's own ``dtype``.
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
    kv_dtype: DType,
    dtype: torch.dtype,
    index_dtype: DType | None = None,
    *,
    drafts: int = 0,
) -> int:
    """What one page takes in all layers of a rank's ``spec`` together. Entries are in the model's own ``dtype``, and
    index keys are unless they have another; ``drafts`` is as in ``CompressedPool``."""
    row = 0
    for layer in spec.full_layers:
        if layer.mla is not None:
            row += MLAPool.row_nbytes(layer.mla, kv_dtype)
        else:
            row += layer.num_kv_heads * (layer.head_dim + layer.v_head_dim) * torch_dtype(kv_dtype).itemsize
    for layer in spec.index_layers:
        if layer.indexer is not None:
            row += IndexKeyPool.key_nbytes(layer.indexer, index_dtype or own_dtype(dtype))
    return page_size * row + compressed_page_bytes(spec.layers, page_size, dtype, drafts)


def own_dtype(dtype: torch.dtype) -> DType:
    return DType(str(dtype).removeprefix("torch."))


def host_bytes_per_page(spec: ModelSpec, page_size: int, kv_dtype: DType) -> int:
    """What one page takes of host memory, where latent rows are there."""
    return page_size * sum(MLAPool.row_nbytes(layer.mla, kv_dtype) for layer in spec.layers if layer.mla)


def hot_bytes_per_page(
    spec: ModelSpec, page_size: int, kv_dtype: DType, dtype: torch.dtype, index_dtype: DType | None
) -> int:
    """What one page takes of the device then: its index keys, and a place for its rows in one layer."""
    rows = host_bytes_per_page(spec, page_size, kv_dtype)
    return bytes_per_page(spec, page_size, kv_dtype, dtype, index_dtype) - rows + rows // len(spec.layers)


def hot_bytes(
    spec: ModelSpec, capacity: Capacity, kv_dtype: DType, dtype: torch.dtype, index_dtype: DType | None
) -> int:
    """What the device then holds in all: hot buffers with their tables, and what it has for every page."""
    row = host_bytes_per_page(spec, 1, kv_dtype) // len(spec.layers)
    pages = capacity.num_pages * hot_bytes_per_page(spec, capacity.page_size, kv_dtype, dtype, index_dtype)
    return capacity.hot_sizes.device_nbytes(len(spec.layers), row) + pages
