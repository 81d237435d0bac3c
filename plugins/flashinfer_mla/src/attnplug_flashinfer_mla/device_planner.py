"""Device-side planning: page indices, write slots, and FlashInfer's work list.

Each function is one Triton kernel on CUDA and plain torch on other devices.

Split-KV policy of the work list: the keys of all tiles are concatenated, in steps of 64 keys (one load of the kernels),
and every cluster gets a range of equal length. So clusters are balanced whatever the lengths. Merging has a cost: on an
H200 a step takes 1.9 µs, and each additional split of a tile 0.27 µs, even if clusters are idle. So a range has at
least the length at which the steps and the merges of the longest tile cost the same. If assigning whole tiles evenly
keeps the busiest cluster within 10 % of its share, no tile is split.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnplug_flashinfer_mla.lengths import CallLengths
from attnplug_flashinfer_mla.work_list import (
    KV_STEP,
    MERGED_AT_ONCE,
    MERGES,
    SLACK,
    STEP_OVER_PART,
    MLAWorkList,
    UniformMLABatch,
    keys_seen,
)


def fill_indices(page_table: Tensor, lengths: CallLengths, page_size: int, kv_indices: Tensor, slots: Tensor) -> None:
    """Fill ``kv_indices`` ``[pages]`` int32 with every request's pages and ``slots`` ``[queries]`` int64 with write
    slots.

    ``page_table`` is ``[requests, max_pages]`` int32. A request's new rows are its last ones. The slot is -1 for a
    position before the request's first row or beyond the table's last column. Padded requests of a captured batch have
    length 0, so all of their slots are -1. Table entries behind a request's last page are not read. Elements of
    ``kv_indices`` that belong to no page are not written.
    """
    if page_table.stride(1) != 1:
        page_table = page_table.contiguous()
    if page_table.device.type == "cuda":
        from attnplug_flashinfer_mla.triton_kernels import launch_fill_indices

        launch_fill_indices(page_table, lengths, page_size, kv_indices, slots)
        return
    kv_lens = lengths.kv_lens.long()
    width = page_table.shape[1]
    pages = ((kv_lens + page_size - 1) // page_size).clamp(max=width)
    group, place = _enumerate_groups(pages)
    kv_indices[lengths.kv_indptr.long()[group] + place] = page_table[group, place]
    new = lengths.qo_indptr.long().diff()
    group, place = _enumerate_groups(new)
    position = (kv_lens - new)[group] + place
    exists = (position >= 0) & (position < width * page_size)
    page = page_table[group, torch.where(exists, position // page_size, 0)].long()
    slots.copy_(torch.where(exists, page * page_size + position % page_size, -1))


def fill_work_list(work_list: MLAWorkList, batch: UniformMLABatch, kv_lens: Tensor) -> None:
    """Fill ``work_list`` for ``kv_lens`` ``[requests]`` int32. Does not synchronize with the device on CUDA."""
    if kv_lens.device.type == "cuda":
        from attnplug_flashinfer_mla.triton_kernels import launch_fill_work_list

        launch_fill_work_list(work_list, batch, kv_lens)
        return
    tiles, rows = batch.tiles(work_list), work_list.tile_rows
    item = torch.arange(batch.requests * tiles)
    request, tile = item // tiles, item % tiles
    kv_len = kv_lens.long()[request]
    keys = keys_seen(batch, work_list, kv_len, tile)
    steps = (keys + KV_STEP - 1) // KV_STEP
    end = steps.cumsum(0)
    start = end - steps
    longest, dealt = steps.max(), -(-len(item) // work_list.clusters)
    worth = torch.ceil(torch.sqrt(longest.float() / STEP_OVER_PART)).long()
    length = int(torch.maximum(-(-end[-1] // work_list.clusters), worth).clamp(min=1))
    first = (start // length).clamp(max=work_list.clusters - 1)
    last = torch.where(steps > 0, (end - 1) // length, first)
    if dealt * int(longest) <= SLACK * length:
        first = last = item // dealt
    splits = last - first + 1
    work = splits.cumsum(0) - splits
    tile_size = torch.clamp(batch.queries * batch.heads - tile * rows, max=rows)
    divided = torch.where(splits > 1, splits, 0)
    parts = divided * tile_size
    part = parts.cumsum(0) - parts
    processors = work_list.clusters * work_list.cluster_size
    merges = torch.minimum(tile_size, divided * processors // divided.sum().clamp(min=1))
    merge = merges.cumsum(0) - merges
    for cluster in range(work_list.clusters):
        work_list.work_indptr[cluster] = (cluster - first).clamp(min=0).minimum(splits).sum()
        for n in ((first <= cluster) & (cluster <= last)).nonzero().flatten().tolist():
            at = int(work[n]) + cluster - int(first[n])
            work_list.q_indptr[at] = request[n] * batch.queries
            work_list.kv_indptr[at] = request[n] * batch.pages
            work_list.partial_indptr[at] = part[n] + (cluster - first[n]) * tile_size[n] if splits[n] > 1 else -1
            work_list.q_len[at] = batch.queries
            work_list.kv_len[at] = kv_len[n]
            work_list.q_start[at] = tile[n] * rows
            whole = splits[n] == 1
            work_list.kv_start[at] = 0 if whole else max(cluster * length - int(start[n]), 0) * KV_STEP
            stop = ((cluster + 1) * length - int(start[n])) * KV_STEP
            work_list.kv_end[at] = keys[n] if whole else min(stop, int(keys[n]))
    work_list.work_indptr[work_list.clusters] = splits.sum()
    arrays = work_list.arrays()
    for entry in range(work_list.clusters * work_list.cluster_size):
        found = ((merge <= entry) & (entry < merge + merges)).nonzero().flatten().tolist()
        for number in MERGES:
            arrays[number][entry] = 0
        for n in found:
            size, share = int(tile_size[n]), -(-int(tile_size[n]) // int(merges[n]))
            if share > MERGED_AT_ONCE:
                share = -(-share // MERGED_AT_ONCE) * MERGED_AT_ONCE
            begin = min((entry - int(merge[n])) * share, size)
            row = int(request[n]) * batch.queries * batch.heads + int(tile[n]) * rows
            work_list.merge_start[entry] = row + begin
            work_list.merge_end[entry] = row + min(begin + share, size)
            work_list.merge_partial_start[entry] = part[n] + begin
            work_list.merge_partial_end[entry] = part[n] + parts[n]
            work_list.merge_stride[entry] = size


def _enumerate_groups(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return group and index within the group for the elements of groups of ``counts`` elements each."""
    group = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return group, torch.arange(len(group)) - (counts.cumsum(0) - counts)[group]
