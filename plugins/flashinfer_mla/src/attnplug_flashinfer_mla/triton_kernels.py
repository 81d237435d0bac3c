"""Triton kernels of ``device_planner``. Imported on CUDA devices only."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnplug_flashinfer_mla.lengths import CallLengths
from attnplug_flashinfer_mla.work_list import (
    KV_STEP,
    MERGED_AT_ONCE,
    SLACK,
    STEP_OVER_PART,
    MLAWorkList,
    UniformMLABatch,
)

_BLOCK = 512
_MAX_PROGRAMS = 16
"""Maximum programs per request: 128k tokens in pages of one are 256 blocks."""


@triton.jit(do_not_specialize=["table_stride", "width"])
def _fill_indices(
    table, table_stride, width, qo_indptr, kv_indptr, kv_lens, kv_indices, slots, page_size, BLOCK: tl.constexpr
):  # fmt: skip
    request = tl.program_id(0)
    first, step = tl.program_id(1) * BLOCK, tl.num_programs(1) * BLOCK
    row = table + request.to(tl.int64) * table_stride
    kv_len = tl.load(kv_lens + request)
    pages = tl.minimum((kv_len + page_size - 1) // page_size, width)
    target = kv_indices + tl.load(kv_indptr + request).to(tl.int64)
    for at in range(first, pages, step):
        place = at + tl.arange(0, BLOCK)
        tl.store(target + place, tl.load(row + place, mask=place < pages), mask=place < pages)
    begin = tl.load(qo_indptr + request)
    new = tl.load(qo_indptr + request + 1) - begin
    for at in range(first, new, step):
        place = at + tl.arange(0, BLOCK)
        position = kv_len - new + place
        exists = (place < new) & (position >= 0) & (position // page_size < width)
        page = tl.load(row + position // page_size, mask=exists, other=0).to(tl.int64)
        slot = tl.where(exists, page * page_size + position % page_size, -1)
        tl.store(slots + begin + place, slot, mask=place < new)


def launch_fill_indices(
    page_table: Tensor, lengths: CallLengths, page_size: int, kv_indices: Tensor, slots: Tensor
) -> None:
    requests, width = page_table.shape
    programs = min(_MAX_PROGRAMS, max(triton.cdiv(width, _BLOCK), triton.cdiv(slots.shape[0], requests * _BLOCK)))
    _fill_indices[(requests, max(programs, 1))](
        page_table,
        page_table.stride(0),
        width,
        lengths.qo_indptr,
        lengths.kv_indptr,
        lengths.kv_lens,
        kv_indices,
        slots,
        page_size,
        BLOCK=_BLOCK,
    )


@triton.jit(do_not_specialize=["items", "tiles", "queries", "pages"])
def _fill_schedule(
    q_indptr, kv_indptr, partial_indptr, merge_start, merge_end, merge_partial_start, merge_partial_end, merge_stride,
    q_len, kv_len, q_start, kv_start, kv_end, work_indptr,
    kv_lens, items, tiles, queries, heads, pages, clusters, cluster_size,
    CAUSAL: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, COST: tl.constexpr, SLACK: tl.constexpr,
    AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill a work list, one program per multiprocessor.

    Each program sums over all tiles itself, which costs less than synchronizing, and then writes the items of its
    cluster and its own merge entry. Names as in ``device_planner.fill_work_list``.
    """
    me = tl.program_id(0)
    item = tl.arange(0, BLOCK)
    exists = item < items
    request, tile = item // tiles, item % tiles
    length_of = tl.load(kv_lens + request, mask=exists, other=0)
    keys = length_of
    if CAUSAL:
        seen = tl.minimum(((tile + 1) * TILE + heads - 1) // heads, queries)
        keys = tl.where(exists, tl.maximum(length_of - queries + seen, 0), 0)
    steps = (keys + STEP - 1) // STEP
    end = tl.cumsum(steps, 0)
    start = end - steps
    longest, dealt = tl.max(steps, 0), (items + clusters - 1) // clusters
    worth = tl.ceil(tl.sqrt_rn(longest.to(tl.float32) / COST)).to(tl.int32)
    length = tl.maximum(tl.maximum((tl.sum(steps, 0) + clusters - 1) // clusters, worth), 1)
    first = tl.minimum(start // length, clusters - 1)
    last = tl.where(steps > 0, (end - 1) // length, first)
    if dealt * longest <= SLACK * length:
        first = item // dealt
        last = first
    stretches = tl.where(exists, last - first + 1, 0)
    work = tl.cumsum(stretches, 0) - stretches
    tile_size = tl.minimum(queries * heads - tile * TILE, TILE)
    divided = tl.where(stretches > 1, stretches, 0)
    parts = divided * tile_size
    part = tl.cumsum(parts, 0) - parts
    merges = tl.minimum(tile_size, divided * clusters * cluster_size // tl.maximum(tl.sum(divided, 0), 1))
    merge = tl.cumsum(merges, 0) - merges

    if me < clusters:
        mine = exists & (first <= me) & (me <= last)
        at = work + me - first
        tl.store(q_indptr + at, request * queries, mask=mine)
        tl.store(kv_indptr + at, request * pages, mask=mine)
        tl.store(partial_indptr + at, tl.where(stretches > 1, part + (me - first) * tile_size, -1), mask=mine)
        tl.store(q_len + at, tl.zeros([BLOCK], tl.int32) + queries, mask=mine)
        tl.store(kv_len + at, length_of, mask=mine)
        tl.store(q_start + at, tile * TILE, mask=mine)
        begin = tl.where(stretches > 1, tl.maximum(me * length - start, 0) * STEP, 0)
        stop = tl.where(stretches > 1, tl.minimum(((me + 1) * length - start) * STEP, keys), keys)
        tl.store(kv_start + at, begin, mask=mine)
        tl.store(kv_end + at, stop, mask=mine)
        before = tl.minimum(tl.maximum(me - first, 0), stretches)
        tl.store(work_indptr + me, tl.sum(tl.where(exists, before, 0), 0))
        if me == clusters - 1:
            tl.store(work_indptr + clusters, tl.sum(stretches, 0))

    here = (merge <= me) & (me < merge + merges)
    share = (tile_size + merges - 1) // tl.maximum(merges, 1)
    share = tl.where(share > AT_ONCE, (share + AT_ONCE - 1) // AT_ONCE * AT_ONCE, share)
    own = tl.minimum((me - merge) * share, tile_size)
    row = request * queries * heads + tile * TILE
    tl.store(merge_start + me, tl.sum(tl.where(here, row + own, 0), 0))
    tl.store(merge_end + me, tl.sum(tl.where(here, row + tl.minimum(own + share, tile_size), 0), 0))
    tl.store(merge_partial_start + me, tl.sum(tl.where(here, part + own, 0), 0))
    tl.store(merge_partial_end + me, tl.sum(tl.where(here, part + parts, 0), 0))
    tl.store(merge_stride + me, tl.sum(tl.where(here, tile_size, 0), 0))


def launch_fill_work_list(work_list: MLAWorkList, batch: UniformMLABatch, kv_lens: Tensor) -> None:
    tiles = batch.tiles(work_list)
    items = batch.requests * tiles
    block = max(triton.next_power_of_2(items), 32)
    _fill_schedule[(work_list.clusters * work_list.cluster_size,)](
        *work_list.arrays(),
        kv_lens,
        items,
        tiles,
        batch.queries,
        batch.heads,
        batch.pages,
        work_list.clusters,
        work_list.cluster_size,
        CAUSAL=batch.causal,
        TILE=work_list.tile_rows,
        STEP=KV_STEP,
        COST=STEP_OVER_PART,
        SLACK=SLACK,
        AT_ONCE=MERGED_AT_ONCE,
        BLOCK=block,
        num_warps=min(max(block // 128, 1), 8),
    )
