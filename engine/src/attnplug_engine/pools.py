"""The memory that an engine makes for a model: pages and who has which, pools for its layers, and what they take."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnplug import (
    COMPRESSED,
    INDEX_KEYS,
    AttentionKind,
    CompressedPool,
    DType,
    IndexKeyPool,
    MHAPool,
    MLAPool,
    ModelSpec,
    PoolError,
)
from attnplug.host import (
    CacheKey,
    KVPools,
    LinearStatePool,
    PageAllocator,
    PagedCache,
    SlotTable,
    compressed_page_bytes,
    torch_dtype,
)


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


def build_table(capacity: Capacity, device: torch.device) -> tuple[PageAllocator, SlotTable]:
    """The pages, and which request has which."""
    # A config may claim any context, and the table is as wide; no request gets more pages than there are.
    longest = capacity.context_length + capacity.spare
    width = min(-(-longest // capacity.page_size), max(capacity.num_pages, 1 << 16))
    try:
        allocator = PageAllocator(capacity.num_pages)
        table = SlotTable(
            allocator,
            page_size=capacity.page_size,
            max_requests=capacity.max_batch,
            max_pages=width,
            device=device,
        )
    except MemoryError as error:
        raise PoolError(
            f"the table of {capacity.max_batch} requests with {width} pages of {capacity.page_size} tokens each, of "
            f"{capacity.num_pages} pages in all, cannot be allocated; lower `max_batch`, `context_length` or "
            "`num_pages`",
            settings=["max_batch", "context_length", "num_pages"],
        ) from error
    return allocator, table


def build_pools(
    spec: ModelSpec,
    capacity: Capacity,
    dtype: torch.dtype,
    kv_dtype: DType,
    device: torch.device,
    index_dtype: DType | None = None,
) -> KVPools:
    """The pools that the layers of a rank's ``spec`` need; ``dtype`` is the model's, and that of index keys unless they
    have another."""
    try:
        return _build_pools(spec, capacity, dtype, kv_dtype, device, index_dtype)
    except (RuntimeError, MemoryError) as error:  # torch's allocators raise the first, and its subclass for CUDA
        needed = capacity.num_pages * bytes_per_page(
            spec, capacity.page_size, kv_dtype, dtype, index_dtype, drafts=capacity.nodes - 1
        )
        what = f"{capacity.num_pages} pages of {capacity.page_size} tokens take {needed / 2**30:.1f} GiB"
        settings = ["num_pages"]
        if capacity.state_slots:
            states = capacity.state_slots * bytes_per_state(spec, dtype)
            what += f" and {capacity.state_slots} linear states {states / 2**30:.1f} GiB"
            settings += ["state_slots", "max_batch"]
        lower = " or ".join(f"`{setting}`" for setting in settings)
        raise PoolError(f"{what}, which cannot be allocated; lower {lower}", settings=settings) from error


def _build_pools(
    spec: ModelSpec,
    capacity: Capacity,
    dtype: torch.dtype,
    kv_dtype: DType,
    device: torch.device,
    index_dtype: DType | None,
) -> KVPools:
    kinds = spec.kinds
    mha = mla = None
    if AttentionKind.MHA in kinds:
        mha = MHAPool(
            spec.layers, num_pages=capacity.num_pages, page_size=capacity.page_size, dtype=kv_dtype, device=device
        )
    if AttentionKind.MLA in kinds:
        mla = MLAPool(
            spec.layers, num_pages=capacity.num_pages, page_size=capacity.page_size, dtype=kv_dtype, device=device
        )
    own_dtype = _own(dtype)
    linear = None
    if spec.linear_layers:
        linear = LinearStatePool(spec.layers, num_slots=capacity.state_slots, dtype=own_dtype, device=device)
    caches: dict[CacheKey[PagedCache], PagedCache] = {}
    if spec.index_layers:
        caches[INDEX_KEYS] = IndexKeyPool(
            spec.layers,
            num_pages=capacity.num_pages,
            page_size=capacity.page_size,
            dtype=index_dtype or own_dtype,
            device=device,
        )
    if spec.compressed_layers:
        caches[COMPRESSED] = CompressedPool(
            spec.layers,
            num_pages=capacity.num_pages,
            page_size=capacity.page_size,
            dtype=own_dtype,
            device=device,
            drafts=capacity.nodes - 1,
        )
    return KVPools(mha=mha, mla=mla, linear=linear, caches=caches)


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
            row += IndexKeyPool.key_nbytes(layer.indexer, index_dtype or _own(dtype))
    return page_size * row + compressed_page_bytes(spec.layers, page_size, dtype, drafts)


def _own(dtype: torch.dtype) -> DType:
    return DType(str(dtype).removeprefix("torch."))
