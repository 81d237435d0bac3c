"""Capacity of a runner, and the bytes that pages and states take."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnplug import DType, ModelSpec
from attnplug.kernels import torch_dtype
from attnplug_sparse.hisparse import HotSizes
from attnplug_sparse.pools import IndexKeyPool, compressed_page_bytes, latent_row_nbytes


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
    kv_dtype: DType,
    dtype: torch.dtype,
    index_dtype: DType | None = None,
    *,
    drafts: int = 0,
) -> int:
    """Return the bytes of one page in all layers of a rank's ``spec``. Compressed entries have the model's ``dtype``;
    so have index keys, unless ``index_dtype`` is given. ``drafts`` is that of ``CompressedPool``."""
    row = 0
    for layer in spec.full_layers:
        if layer.mla is not None:
            row += latent_row_nbytes(layer, kv_dtype)
        else:
            row += layer.num_kv_heads * (layer.head_dim + layer.v_head_dim) * torch_dtype(kv_dtype).itemsize
    for layer in spec.index_layers:
        if layer.indexer is not None:
            row += IndexKeyPool.key_nbytes(layer.indexer, index_dtype or own_dtype(dtype))
    return page_size * row + compressed_page_bytes(spec.layers, page_size, dtype, drafts)


def own_dtype(dtype: torch.dtype) -> DType:
    return DType(str(dtype).removeprefix("torch."))


def host_bytes_per_page(spec: ModelSpec, page_size: int, kv_dtype: DType) -> int:
    """Return the bytes of host memory per page if latent rows are kept there."""
    return page_size * sum(latent_row_nbytes(layer, kv_dtype) for layer in spec.layers if layer.mla)


def hot_bytes_per_page(
    spec: ModelSpec, page_size: int, kv_dtype: DType, dtype: torch.dtype, index_dtype: DType | None
) -> int:
    """Return the device bytes per page in that case: its index keys, and room for its rows in one layer."""
    rows = host_bytes_per_page(spec, page_size, kv_dtype)
    return bytes_per_page(spec, page_size, kv_dtype, dtype, index_dtype) - rows + rows // len(spec.layers)


def hot_bytes(
    spec: ModelSpec, capacity: Capacity, kv_dtype: DType, dtype: torch.dtype, index_dtype: DType | None
) -> int:
    """Return all device bytes in that case: hot buffers with their tables, and what each page takes."""
    row = host_bytes_per_page(spec, 1, kv_dtype) // len(spec.layers)
    pages = capacity.num_pages * hot_bytes_per_page(spec, capacity.page_size, kv_dtype, dtype, index_dtype)
    return capacity.hot_sizes.device_nbytes(len(spec.layers), row) + pages
