"""FlashInfer's work list of a paged MLA call, rebuilt on the device from device lengths.

FlashInfer's planner builds the list on the host: it needs host lengths, takes 70 to 300 µs, and copies 0.6 MB to the
device at every step. The list of a captured call has fixed addresses, and only the KV lengths change. So our kernel,
captured with the call, rebuilds the list, and a replay plans nothing on the host.

Layout of the list, as in FlashInfer's scheduler: a work item is a tile of query rows (a row is one head of one query
token) and a range of its keys, a KV split. Each cluster of multiprocessors processes its items in order. A tile with
one split writes its result. A tile with several splits writes partial results, which the merge entries combine row by
row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

TILE_ROWS = 64
"""Query rows per multiprocessor. A cluster's tile has ``TILE_ROWS * cluster_size`` rows."""
KV_STEP = 64
MAX_WORK_ITEMS = 16384

MERGES = range(3, 8)
"""Indices of the arrays that hold merge entries."""
MERGED_AT_ONCE = 4
"""Result rows that one multiprocessor merges concurrently."""
STEP_OVER_PART = 7.0
"""Cost of one step of ``KV_STEP`` keys, in units of one merged partial result."""
SLACK = 1.1
"""Load imbalance that is accepted in order not to split any tile."""


@dataclass(frozen=True, slots=True, eq=False)
class MLAWorkList:
    """Views of one call's int32 arrays in FlashInfer's workspace, where its kernels read them.

    Work items, ``[16384]`` each: the request's first query row (``q_indptr``) and first page index (``kv_indptr``), the
    offset of the partial result (``partial_indptr``, -1 if the item writes the result), the request's queries and keys
    (``q_len``, ``kv_len``), the tile's first row (``q_start``), and its key range (``kv_start``, ``kv_end``).
    ``work_indptr`` ``[clusters + 1]`` are the offsets of each cluster's items. Merge entries, one per multiprocessor:
    result rows ``merge_start`` to ``merge_end``, counted over all heads, are merged from the partial rows
    ``merge_partial_start`` to ``merge_partial_end``, ``merge_stride`` apart.
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
    def of(cls, plan_info: Sequence[int], workspace: Tensor) -> MLAWorkList:
        """Return views of a plan's arrays.

        ``plan_info`` is ``MLAPlanInfo``: sizes, then byte offsets into ``workspace``.
        """
        cluster_size, clusters, *offsets = plan_info
        processors = cluster_size * clusters
        arrays = []
        for number, offset in enumerate(offsets[:14]):
            count = processors if number in MERGES else clusters + 1 if number == 13 else MAX_WORK_ITEMS
            arrays.append(workspace[offset : offset + 4 * count].view(torch.int32))
        return cls(cluster_size, clusters, *arrays)

    @property
    def tile_rows(self) -> int:
        return TILE_ROWS * self.cluster_size

    def arrays(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self)[2:])


@dataclass(frozen=True, slots=True)
class UniformMLABatch:
    """Shape of a captured batch: ``queries`` query tokens and at most ``pages`` pages per request."""

    requests: int
    queries: int
    heads: int
    causal: bool
    pages: int

    def tiles(self, work_list: MLAWorkList) -> int:
        """Query tiles per request."""
        return -(-self.queries * self.heads // work_list.tile_rows)


def keys_seen(batch: UniformMLABatch, work_list: MLAWorkList, kv_len: Tensor, tile: Tensor) -> Tensor:
    """Return the number of keys that each tile's last query sees: all, or fewer if later queries follow (causal)."""
    if not batch.causal:
        return kv_len
    queries = -(-(tile + 1) * work_list.tile_rows // batch.heads)
    return (kv_len - batch.queries + queries.clamp(max=batch.queries)).clamp(min=0)


def work_list_problem(
    work_list: MLAWorkList, batch: UniformMLABatch, kv_lens: Sequence[int], kv_indptr: Sequence[int]
) -> str:
    """Return why the work list does not cover the batch exactly once; an empty string if it does.

    FlashInfer's own list is checked before it is overwritten: ours is correct only if the layout is the same.
    """
    host = MLAWorkList(work_list.cluster_size, work_list.clusters, *(array.cpu() for array in work_list.arrays()))
    tiles, works = batch.tiles(work_list), host.work_indptr.tolist()
    if works[0] != 0 or works != sorted(works) or not 0 < works[-1] <= MAX_WORK_ITEMS:
        return f"work_indptr is {works}"
    lists = [array[: works[-1]].tolist() for array in (host.q_indptr, host.q_start, host.kv_start, host.kv_end)]
    known = [array[: works[-1]].tolist() for array in (host.kv_indptr, host.q_len, host.kv_len)]
    splits: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for (row, q_start, kv_start, kv_end), given in zip(zip(*lists, strict=True), zip(*known, strict=True), strict=True):
        request, tile = row // batch.queries, q_start // work_list.tile_rows
        if not (0 <= request < batch.requests and 0 <= tile < tiles):
            return f"an item has query row {row} and tile {tile}"
        if given != (wanted := (kv_indptr[request], batch.queries, kv_lens[request])):
            return f"request {request} has (first page, queries, keys) {wanted}, but the list has {given}"
        splits.setdefault((request, tile), []).append((kv_start, kv_end))
    for request in range(batch.requests):
        lengths = torch.full((tiles,), kv_lens[request])
        for tile, keys in enumerate(keys_seen(batch, work_list, lengths, torch.arange(tiles)).tolist()):
            at = 0
            for start, end in sorted(splits.get((request, tile), [])):
                if start != at:
                    return f"keys {at} to {start} of tile {tile} of request {request} are missing"
                at = end
            if at != keys or (request, tile) not in splits:
                return f"tile {tile} of request {request} has {at} of {keys} keys"
    return ""
