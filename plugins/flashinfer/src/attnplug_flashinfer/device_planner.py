"""Device-side planning of captured calls: one Triton kernel on CUDA, plain torch on other devices."""

from __future__ import annotations

import torch
from torch import Tensor

from attnplug_flashinfer.work_list import PageCounts, PagedWorkList, UniformPagedBatch, lay_out_chunks


def fill_work_list(
    work_list: PagedWorkList, batch: UniformPagedBatch, kv_lens: Tensor, width: int, counts: PageCounts
) -> None:
    """Fill ``work_list`` and ``counts`` for ``kv_lens`` ``[requests]`` int32 of up to ``width`` pages each.

    Chunks have the minimum length at which all items fit into the list. A padded request, of length 0, has no items:
    merging returns zeros for its rows.
    """
    if kv_lens.device.type == "cuda":
        from attnplug_flashinfer.triton_kernels import launch_fill_work_list

        launch_fill_work_list(work_list, batch, kv_lens, width, counts)
        return
    rows = kv_lens.long().clamp(max=width * batch.page_size)
    pages = -(-rows // batch.page_size)
    counts.kv_indptr[0] = 0
    counts.kv_indptr[1:] = pages.cumsum(0)
    counts.last_page_lens.copy_(rows - (pages - 1).clamp(min=0) * batch.page_size)
    tiles = batch.tiles(work_list.tile_rows)
    seen = pages.clamp(max=batch.max_pages_seen(work_list.tile_rows))
    low, high = batch.min_chunk_pages, max(int(seen.max()), batch.min_chunk_pages)
    while low < high:
        middle = (low + high) // 2
        if int((-(-seen // middle)).sum()) * tiles > work_list.capacity:
            low = middle + 1
        else:
            high = middle
    wanted = lay_out_chunks(work_list, batch, -(-seen // low))
    for array, numbers in zip(work_list.arrays(), (*wanted, torch.tensor([low * batch.page_size])), strict=True):
        array[: len(numbers)] = numbers
