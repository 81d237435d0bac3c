"""FlashInfer's work list of a paged call, made on the device from the lengths there.

FlashInfer's own planner makes the list on the host: it needs the lengths there, takes 70 to 300 µs, and sends 0.6 MB to
the device at every step. A captured call has its list at the same addresses every time, and only the KV lengths change.
So a kernel of ours, captured with the call, makes the list, and a replay plans nothing on the host.

The list, as FlashInfer's scheduler lays it out: a work item is a tile of query rows (a row is one head of one query)
and a stretch of its keys. Each cluster of multiprocessors works through its items. A tile with all keys in one stretch
writes its result. A tile with several stretches writes parts, which the merge entries then combine row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

TILE_ROWS = 64
"""Query rows per multiprocessor; a cluster's tile has this many for each of its multiprocessors."""
KV_STEP = 64
MOST_WORKS = 16384

MERGES = range(3, 8)
"""Which of the arrays hold merge entries."""
MERGED_AT_ONCE = 4
"""Rows of the result that one multiprocessor merges at the same time."""
STEP_OVER_PART = 7.0
"""What a step of keys costs, in parts to merge."""
SLACK = 1.1


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """The arrays of one call, int32, where FlashInfer's kernels read them.

    Work items, ``[16384]`` each: the request's first query row and first page index, where its part goes (-1 for the
    result itself), the request's queries and keys, the tile's first row, and the stretch of keys. ``work_indptr``
    ``[clusters + 1]`` says which items belong to which cluster. Merge entries, one per multiprocessor: which rows of
    the result, counted over all heads, are merged from which rows of the parts, ``merge_stride`` apart.
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
            count = processors if number in MERGES else clusters + 1 if number == 13 else MOST_WORKS
            arrays.append(workspace[offset : offset + 4 * count].view(torch.int32))
        return cls(cluster_size, clusters, *arrays)

    @property
    def tile_rows(self) -> int:
        return TILE_ROWS * self.cluster_size

    def arrays(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self)[2:])


@dataclass(frozen=True, slots=True)
class UniformBatch:
    """A captured batch: every request has the same number of queries, and room for the same number of pages."""

    requests: int
    queries: int
    heads: int
    causal: bool
    pages: int

    def tiles(self, schedule: Schedule) -> int:
        """Query tiles of each request."""
        return -(-self.queries * self.heads // schedule.tile_rows)


def keys_seen(batch: UniformBatch, schedule: Schedule, kv_len: Tensor, tile: Tensor) -> Tensor:
    """How many keys a tile's last query sees: all of them, or fewer if later tiles have later queries."""
    if not batch.causal:
        return kv_len
    queries = -(-(tile + 1) * schedule.tile_rows // batch.heads)
    return (kv_len - batch.queries + queries.clamp(max=batch.queries)).clamp(min=0)


def schedule_problem(schedule: Schedule, batch: UniformBatch, kv_lens: Sequence[int], kv_indptr: Sequence[int]) -> str:
    """Why a schedule does not do the batch's work exactly once, in words; empty if it does.

    FlashInfer's own plan is checked before it is replaced, because ours is right only if it is laid out the same way.
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
