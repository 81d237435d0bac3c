"""FlashInfer's work list of a paged call, made on the device from the lengths there.

FlashInfer's own planner makes the list on the host: it needs the lengths there, takes 70 to 300 µs, and sends 0.6 MB to
the device at every step. A captured call has the same list at the same addresses every time, and only the KV lengths
change; so the list is made by a kernel of ours, captured with the call, and a replay plans nothing on the host.

What is in the list, from FlashInfer's scheduler: a work item is a tile of query rows (a row is one head of one query)
and a stretch of its keys. Clusters of multiprocessors walk their items. A tile whose keys are in one stretch
writes its result; one that is in several writes parts, which the merge entries then bring together, by rows.

How we divide. The keys of all tiles form one line, tile after tile, in steps of 64, which the kernels load at a time.
Every cluster gets an equal length of it, so that none waits for another, whatever the lengths of the requests. Merging
costs too: on an H200 a step takes 1.9 µs, and each further part of a tile 0.27 µs, whether or not clusters are idle. So
a length is at least such that the longest tile's steps and parts cost the same. And where whole tiles, dealt out
evenly, keep the busiest cluster within a tenth of its share, none is divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

TILE_ROWS = 64
"""Query rows of one multiprocessor; a cluster has as many times that as it has multiprocessors."""
KV_STEP = 64
MOST_WORKS = 16384

_MERGE = 5
MERGED_AT_ONCE = 4
"""Rows of the result that one multiprocessor merges at the same time."""
STEP_OVER_PART = 7.0
"""What a step of keys costs, in parts to merge."""
SLACK = 1.1


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """The arrays of one call, int32, where FlashInfer's kernels read them.

    Work items, ``[16384]`` each: the request's first query row and first page index, where its part goes (-1: it is
    the result), the request's queries and keys, the tile's first row, and the stretch of keys. ``work_indptr``
    ``[clusters + 1]`` says which items are whose. Merge entries, one for each multiprocessor: which rows of the result,
    counted over all heads, are merged from which rows of the parts, ``merge_stride`` apart.
    """

    cluster_size: int
    clusters: int
    q_indptr: Tensor
    kv_indptr: Tensor
    partial_indptr: Tensor
    merge_start: Tensor
    merge_end: Tensor
    merge_partial_start: Tensor
    merge_partial_end: Tensor
    merge_stride: Tensor
    q_len: Tensor
    kv_len: Tensor
    q_start: Tensor
    kv_start: Tensor
    kv_end: Tensor
    work_indptr: Tensor

    @classmethod
    def of(cls, plan_info: Sequence[int], workspace: Tensor) -> Schedule:
        """Where a plan put its arrays: sizes and byte offsets into ``workspace``, in the order of ``MLAPlanInfo``."""
        cluster_size, clusters, *offsets = plan_info
        processors = cluster_size * clusters
        arrays = []
        for number, offset in enumerate(offsets[:14]):
            is_merge = 3 <= number < 3 + _MERGE
            count = processors if is_merge else clusters + 1 if number == 13 else MOST_WORKS
            arrays.append(workspace[offset : offset + 4 * count].view(torch.int32))
        return cls(cluster_size, clusters, *arrays)

    @property
    def tile_rows(self) -> int:
        return TILE_ROWS * self.cluster_size

    def arrays(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self)[2:])


@dataclass(frozen=True, slots=True)
class UniformBatch:
    """A captured batch: every request has equally many queries, and room for equally many pages."""

    requests: int
    queries: int
    heads: int
    causal: bool
    pages: int

    def tiles(self, schedule: Schedule) -> int:
        """Query tiles of each request."""
        return -(-self.queries * self.heads // schedule.tile_rows)


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
    for entry in range(schedule.clusters * schedule.cluster_size):
        found = ((merge <= entry) & (entry < merge + merges)).nonzero().flatten().tolist()
        for array in schedule.arrays()[3 : 3 + _MERGE]:
            array[entry] = 0
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


def keys_seen(batch: UniformBatch, schedule: Schedule, kv_len: Tensor, tile: Tensor) -> Tensor:
    """The keys up to which a tile's last query sees: all of them, or fewer where later tiles have later queries."""
    if not batch.causal:
        return kv_len
    queries = -(-(tile + 1) * schedule.tile_rows // batch.heads)
    return (kv_len - batch.queries + queries.clamp(max=batch.queries)).clamp(min=0)


def schedule_problem(schedule: Schedule, batch: UniformBatch, kv_lens: Sequence[int], kv_indptr: Sequence[int]) -> str:
    """Why a schedule does not do the batch's work exactly once, in words; empty if it does.

    Asked of FlashInfer's own plan before it is replaced: if ours is not how it is laid out, we would not understand it.
    """
    host = Schedule(schedule.cluster_size, schedule.clusters, *(array.cpu() for array in schedule.arrays()))
    tiles, works = batch.tiles(schedule), host.work_indptr.tolist()
    if works[0] != 0 or works != sorted(works) or not 0 < works[-1] <= MOST_WORKS:
        return f"its clusters' items begin at {works}"
    lists = [array[: works[-1]].tolist() for array in (host.q_indptr, host.q_start, host.kv_start, host.kv_end)]
    known = [array[: works[-1]].tolist() for array in (host.kv_indptr, host.q_len, host.kv_len)]
    stretches: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for (row, q_start, kv_start, kv_end), given in zip(zip(*lists, strict=True), zip(*known, strict=True), strict=True):
        request, tile = row // batch.queries, q_start // schedule.tile_rows
        if not (0 <= request < batch.requests and 0 <= tile < tiles):
            return f"it works on row {row} and tile {tile}"
        if given != (wanted := (kv_indptr[request], batch.queries, kv_lens[request])):
            return f"request {request} has pages, queries and keys {wanted}, and it says {given}"
        stretches.setdefault((request, tile), []).append((kv_start, kv_end))
    for request in range(batch.requests):
        lengths = torch.full((tiles,), kv_lens[request])
        for tile, keys in enumerate(keys_seen(batch, schedule, lengths, torch.arange(tiles)).tolist()):
            at = 0
            for start, end in sorted(stretches.get((request, tile), [])):
                if start != at:
                    return f"tile {tile} of request {request} lacks the keys {at} to {start}"
                at = end
            if at != keys or (request, tile) not in stretches:
                return f"tile {tile} of request {request} has {at} of {keys} keys"
    return ""
