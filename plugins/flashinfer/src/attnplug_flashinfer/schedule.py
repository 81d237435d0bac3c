"""FlashInfer's work list of a captured call, made on the device from the lengths there.

FlashInfer's own planner makes the list on the host, at every step. A captured call has its list at the same addresses
every time, and only the KV lengths change. So a kernel of ours, captured with the call, makes the list, and a replay
plans nothing on the host.

The list, as FlashInfer's scheduler of fa2 lays it out: a work item is a tile of a request's query rows and a chunk of
its keys. All chunks of a batch are equally long, in whole pages, but for the last one of a request. Each item writes a
part, and the parts of each row, which lie together, are merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

_LEAST_KEYS = 128
"""A chunk has at least so many keys, where pages allow: FlashInfer's rule."""
_PLAN_NUMBERS = 15
NO_WINDOW = 1 << 30


@dataclass(frozen=True, slots=True)
class UniformBatch:
    """A captured batch: every request has the same number of queries. ``window_left`` is -1 without a window."""

    requests: int
    queries: int
    group: int
    page_size: int
    window_left: int

    def tiles(self, tile_rows: int) -> int:
        """Query tiles of each request."""
        return -(-self.queries * self.group // tile_rows)

    def most_seen(self, tile_rows: int) -> int:
        """Pages that the queries of one tile see at most, as FlashInfer counts."""
        return NO_WINDOW if self.window_left < 0 else -(-(self.window_left + tile_rows) // self.page_size)

    @property
    def least_chunk(self) -> int:
        """Pages of the shortest chunk."""
        return max(_LEAST_KEYS // self.page_size, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """The arrays of one captured call where FlashInfer's kernels read them: int32, ``valid`` uint8.

    Work items, ``[room]`` each: the request, the tile of its query rows, the chunk of its keys, and whether there is
    such an item. ``parts_indptr`` ``[requests + 1]`` and ``merge_indptr`` ``[rows + 1]`` say where the parts of each
    request and of each query row begin, counted in rows. ``chunk_rows`` ``[1]`` is the length of a chunk in keys.
    """

    tile_rows: int
    request_indices: Tensor
    tile_indices: Tensor
    chunk_indices: Tensor
    valid: Tensor
    parts_indptr: Tensor
    merge_indptr: Tensor
    chunk_rows: Tensor

    @classmethod
    def of(cls, plan_info: Sequence[int], workspace: Tensor, batch: UniformBatch) -> Schedule | None:
        """Where a plan put its arrays, in the order of ``PrefillPlanInfo``; ``None`` for a plan of another kind."""
        if len(plan_info) != _PLAN_NUMBERS or not (plan_info[13] and plan_info[14]):
            return None
        room, rows, _, tile_rows, request, tile, chunk, merge, parts, length, _, _, valid, *_ = plan_info
        if rows != batch.requests * batch.queries:
            return None

        def array(offset: int, count: int) -> Tensor:
            return workspace[offset : offset + 4 * count].view(torch.int32)

        return cls(
            tile_rows,
            array(request, room),
            array(tile, room),
            array(chunk, room),
            workspace[valid : valid + room],
            array(parts, batch.requests + 1),
            array(merge, rows + 1),
            array(length, 1),
        )

    @property
    def room(self) -> int:
        return self.valid.shape[0]

    def arrays(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self)[1:])


@dataclass(frozen=True, slots=True, eq=False)
class PageCounts:
    """Memory that the kernels take a captured batch's lengths from, int32: ``kv_indptr`` ``[requests + 1]`` says where
    each request's pages begin, ``last_page_lens`` ``[requests]`` how many rows its last page has."""

    kv_indptr: Tensor
    last_page_lens: Tensor


def divided(schedule: Schedule, batch: UniformBatch, chunks: Tensor) -> tuple[Tensor, ...]:
    """Items, ``valid`` and both indptrs of a batch whose requests have so many chunks, ``[requests]``."""
    per_request = chunks * batch.tiles(schedule.tile_rows)
    request = torch.repeat_interleave(torch.arange(batch.requests), per_request)
    place = torch.arange(len(request)) - (per_request.cumsum(0) - per_request)[request]
    valid = torch.arange(schedule.room) < len(request)
    merge = torch.zeros(batch.requests * batch.queries + 1, dtype=torch.int64)
    merge[1:] = chunks.repeat_interleave(batch.queries).cumsum(0)
    return request, place // chunks[request], place % chunks[request], valid, merge[:: batch.queries], merge


def schedule_problem(schedule: Schedule, batch: UniformBatch, kv_lens: Tensor) -> str:
    """Why a schedule is not one of ``kv_lens`` as this module knows them, in words; empty if it is.

    FlashInfer's own plan is checked before it is replaced, because ours is right only if it is laid out the same way.
    """
    tiles, chunk = batch.tiles(schedule.tile_rows), int(schedule.chunk_rows)
    if schedule.room < batch.requests * tiles:
        return f"it has room for {schedule.room} work items, and {batch.requests} requests have {tiles} each"
    if chunk < 1 or chunk % batch.page_size:
        return f"its chunks have {chunk} keys, in pages of {batch.page_size}"
    pages = -(-kv_lens.long() // batch.page_size)
    seen = pages.clamp(max=batch.most_seen(schedule.tile_rows))
    wanted = divided(schedule, batch, -(-seen // (chunk // batch.page_size)))
    for field, array, numbers in zip(fields(schedule)[1:], schedule.arrays(), wanted, strict=False):
        found = array.cpu()[: len(numbers)].long()
        if not torch.equal(found, numbers.long()):
            return f"its {field.name} are {found[:8].tolist()} …, not {numbers.long()[:8].tolist()} …"
    return ""
