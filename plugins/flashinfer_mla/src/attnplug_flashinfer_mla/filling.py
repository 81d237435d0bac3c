"""Filling what FlashInfer's kernels read, on the device: page indices, write slots, and the work list.

On a CUDA device each is one kernel; elsewhere torch does the same.

How the work list is divided: the keys of all tiles form one line, tile after tile, in steps of 64 keys, as many as the
kernels load at a time. Every cluster gets a stretch of equal length, so no cluster waits for another, whatever the
lengths of the requests. Merging costs time too: on an H200 a step takes 1.9 µs, and each further part of a tile 0.27
µs, even if clusters are idle. So a stretch is at least as long as makes the steps and the parts of the longest tile
cost the same. If dealing out whole tiles evenly keeps the busiest cluster within a tenth of its share, no tile is
divided.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnplug_flashinfer_mla.lengths import Lengths
from attnplug_flashinfer_mla.schedule import (
    KV_STEP,
    MERGED_AT_ONCE,
    MERGES,
    SLACK,
    STEP_OVER_PART,
    Schedule,
    UniformBatch,
    keys_seen,
)


def fill_indices(page_table: Tensor, lengths: Lengths, page_size: int, kv_indices: Tensor, slots: Tensor) -> None:
    """Fill ``kv_indices`` with the pages of every request, and ``slots`` ``[queries]`` with the places of the new rows.

    The new rows of a request are its last ones. The slot is -1 for a row before the request's first, and for a row past
    the table's last column. Padded requests of a captured batch have length 0, so all of their slots are -1. Entries of
    the table after a request's last page are not read, and places of ``kv_indices`` that belong to no page keep what
    they hold.
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
    owner, place = _each(pages)
    kv_indices[lengths.kv_indptr.long()[owner] + place] = page_table[owner, place]
    new = lengths.qo_indptr.long().diff()
    owner, place = _each(new)
    position = (kv_lens - new)[owner] + place
    exists = (position >= 0) & (position < width * page_size)
    page = page_table[owner, torch.where(exists, position // page_size, 0)].long()
    slots.copy_(torch.where(exists, page * page_size + position % page_size, -1))


def fill_schedule(schedule: Schedule, batch: UniformBatch, kv_lens: Tensor) -> None:
    """Divide the work on ``kv_lens`` ``[requests]`` int32, all on the device."""
    if kv_lens.device.type == "cuda":
        from attnplug_flashinfer_mla.triton_kernels import launch_fill_schedule

        launch_fill_schedule(schedule, batch, kv_lens)
        return
    tiles, rows = batch.tiles(schedule), schedule.tile_rows
    item = torch.arange(batch.requests * tiles)
    request, tile = item // tiles, item % tiles
    kv_len = kv_lens.long()[request]
    keys = keys_seen(batch, schedule, kv_len, tile)
    steps = (keys + KV_STEP - 1) // KV_STEP
    end = steps.cumsum(0)
    start = end - steps
    longest, dealt = steps.max(), -(-len(item) // schedule.clusters)
    worth = torch.ceil(torch.sqrt(longest.float() / STEP_OVER_PART)).long()
    length = int(torch.maximum(-(-end[-1] // schedule.clusters), worth).clamp(min=1))
    first = (start // length).clamp(max=schedule.clusters - 1)
    last = torch.where(steps > 0, (end - 1) // length, first)
    if dealt * int(longest) <= SLACK * length:
        first = last = item // dealt
    stretches = last - first + 1
    work = stretches.cumsum(0) - stretches
    tile_size = torch.clamp(batch.queries * batch.heads - tile * rows, max=rows)
    divided = torch.where(stretches > 1, stretches, 0)
    parts = divided * tile_size
    part = parts.cumsum(0) - parts
    processors = schedule.clusters * schedule.cluster_size
    merges = torch.minimum(tile_size, divided * processors // divided.sum().clamp(min=1))
    merge = merges.cumsum(0) - merges
    for cluster in range(schedule.clusters):
        schedule.work_indptr[cluster] = (cluster - first).clamp(min=0).minimum(stretches).sum()
        for n in ((first <= cluster) & (cluster <= last)).nonzero().flatten().tolist():
            at = int(work[n]) + cluster - int(first[n])
            schedule.q_indptr[at] = request[n] * batch.queries
            schedule.kv_indptr[at] = request[n] * batch.pages
            schedule.partial_indptr[at] = part[n] + (cluster - first[n]) * tile_size[n] if stretches[n] > 1 else -1
            schedule.q_len[at] = batch.queries
            schedule.kv_len[at] = kv_len[n]
            schedule.q_start[at] = tile[n] * rows
            whole = stretches[n] == 1
            schedule.kv_start[at] = 0 if whole else max(cluster * length - int(start[n]), 0) * KV_STEP
            stop = ((cluster + 1) * length - int(start[n])) * KV_STEP
            schedule.kv_end[at] = keys[n] if whole else min(stop, int(keys[n]))
    schedule.work_indptr[schedule.clusters] = stretches.sum()
    arrays = schedule.arrays()
    for entry in range(schedule.clusters * schedule.cluster_size):
        found = ((merge <= entry) & (entry < merge + merges)).nonzero().flatten().tolist()
        for number in MERGES:
            arrays[number][entry] = 0
        for n in found:
            size, share = int(tile_size[n]), -(-int(tile_size[n]) // int(merges[n]))
            if share > MERGED_AT_ONCE:
                share = -(-share // MERGED_AT_ONCE) * MERGED_AT_ONCE
            begin = min((entry - int(merge[n])) * share, size)
            row = int(request[n]) * batch.queries * batch.heads + int(tile[n]) * rows
            schedule.merge_start[entry] = row + begin
            schedule.merge_end[entry] = row + min(begin + share, size)
            schedule.merge_partial_start[entry] = part[n] + begin
            schedule.merge_partial_end[entry] = part[n] + parts[n]
            schedule.merge_stride[entry] = size


def _each(counts: Tensor) -> tuple[Tensor, Tensor]:
    """For owners with ``counts`` things in a row: each thing's owner, and its number among that owner's things."""
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return owner, torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
