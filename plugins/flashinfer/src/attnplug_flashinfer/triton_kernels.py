"""Triton kernel of ``device_planner``. Imported on CUDA devices only."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnplug_flashinfer.work_list import PageCounts, PagedWorkList, UniformPagedBatch

_BLOCK = 256


@triton.jit(do_not_specialize=["requests", "queries", "tiles", "room", "width", "most_seen", "least_chunk"])
def _fill_schedule(
    request_indices, tile_indices, chunk_indices, valid, parts_indptr, merge_indptr, chunk_rows,
    kv_lens, kv_indptr, last_page_lens, requests, queries, tiles, room, page_size, width, most_seen, least_chunk,
    REQUESTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill a work list, one program per request.

    Each program reads all lengths itself, which costs less than synchronizing, and then writes the items of its
    request. The last one also marks unused items invalid. Names as in ``device_planner.fill_work_list``.
    """
    me = tl.program_id(0)
    request = tl.arange(0, REQUESTS)
    rows = tl.minimum(tl.load(kv_lens + request, mask=request < requests, other=0), width * page_size)
    pages = (rows + page_size - 1) // page_size
    seen = tl.minimum(pages, most_seen)
    longest = tl.max(seen, 0)
    low = tl.minimum(longest, 0) + least_chunk  # a tensor, whatever number is given
    high = tl.maximum(longest, low)
    while low < high:
        middle = (low + high) // 2
        over = tl.sum((seen + middle - 1) // middle, 0) * tiles > room
        low = tl.where(over, middle + 1, low)
        high = tl.where(over, high, middle)
    chunks = (seen + low - 1) // low
    mine = tl.sum(tl.where(request == me, chunks, 0), 0)
    before = tl.sum(tl.where(request < me, chunks, 0), 0)
    my_rows = tl.sum(tl.where(request == me, rows, 0), 0)
    my_pages = tl.sum(tl.where(request == me, pages, 0), 0)
    pages_before = tl.sum(tl.where(request < me, pages, 0), 0)
    tl.store(kv_indptr + me, pages_before)
    tl.store(last_page_lens + me, my_rows - tl.maximum(my_pages - 1, 0) * page_size)
    tl.store(parts_indptr + me, before * queries)
    some = tl.arange(0, BLOCK)
    nothing = some * 0
    first, items, divisor = before * tiles, mine * tiles, tl.maximum(mine, 1)
    for at in range(0, items, BLOCK):
        item = at + some
        exists = item < items
        tl.store(request_indices + first + item, nothing + me, mask=exists)
        tl.store(tile_indices + first + item, item // divisor, mask=exists)
        tl.store(chunk_indices + first + item, item % divisor, mask=exists)
        tl.store(valid + first + item, (nothing + 1).to(tl.uint8), mask=exists)
    for at in range(0, queries, BLOCK):
        query = at + some
        tl.store(merge_indptr + me * queries + query, before * queries + query * mine, mask=query < queries)
    if me == requests - 1:
        tl.store(kv_indptr + requests, pages_before + my_pages)
        tl.store(parts_indptr + requests, (before + mine) * queries)
        tl.store(merge_indptr + requests * queries, (before + mine) * queries)
        tl.store(chunk_rows, low * page_size)
        for at in range(first + items, room, BLOCK):
            tl.store(valid + at + some, nothing.to(tl.uint8), mask=at + some < room)


def launch_fill_work_list(
    work_list: PagedWorkList, batch: UniformPagedBatch, kv_lens: Tensor, width: int, counts: PageCounts
) -> None:
    block = max(triton.next_power_of_2(batch.requests), 32)
    _fill_schedule[(batch.requests,)](
        *work_list.arrays(),
        kv_lens,
        counts.kv_indptr,
        counts.last_page_lens,
        batch.requests,
        batch.queries,
        batch.tiles(work_list.tile_rows),
        work_list.capacity,
        batch.page_size,
        width,
        batch.max_pages_seen(work_list.tile_rows),
        batch.min_chunk_pages,
        REQUESTS=block,
        BLOCK=_BLOCK,
        num_warps=min(max(block // 128, 1), 8),
    )
