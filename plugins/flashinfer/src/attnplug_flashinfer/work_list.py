"""FlashInfer's work list of a captured paged call, rebuilt on the device from device lengths.

FlashInfer's planner builds the list on the host at every step. The list of a captured call has fixed addresses, and
only the KV lengths change. So our kernel, captured with the call, rebuilds the list, and a replay plans nothing on the
host.

Layout of the list, as in FlashInfer's fa2 scheduler: a work item is a tile of a request's query rows and a chunk of its
keys (split-KV). All chunks of a batch have the same length in whole pages, except the last one of a request. Each item
writes a partial result. The partial results of a row are contiguous and are merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

_MIN_CHUNK_KEYS = 128
"""Minimum keys per chunk, unless pages are larger: FlashInfer's rule."""
_PLAN_INFO_LENGTH = 15
NO_WINDOW = 1 << 30


@dataclass(frozen=True, slots=True)
class UniformPagedBatch:
    """Shape of a captured batch with ``queries`` query tokens per request.

    ``group`` is the number of query heads per KV head. ``window_left`` is -1 without a sliding window.
    """

    requests: int
    queries: int
    group: int
    page_size: int
    window_left: int

    def tiles(self, tile_rows: int) -> int:
        """Query tiles per request."""
        return -(-self.queries * self.group // tile_rows)

    def max_pages_seen(self, tile_rows: int) -> int:
        """Return the maximum number of pages that one tile's queries see, as FlashInfer counts them."""
        return NO_WINDOW if self.window_left < 0 else -(-(self.window_left + tile_rows) // self.page_size)

    @property
    def min_chunk_pages(self) -> int:
        """Minimum pages per chunk."""
        return max(_MIN_CHUNK_KEYS // self.page_size, 1)


@dataclass(frozen=True, slots=True, eq=False)
class PagedWorkList:
    """Views of one captured call's arrays in FlashInfer's workspace, where its kernels read them.

    Work items, ``[capacity]`` each: ``request_indices``, ``tile_indices`` of the request's query rows and
    ``chunk_indices`` of its keys, int32; ``valid`` uint8 marks the items in use. ``parts_indptr`` ``[requests + 1]``
    and ``merge_indptr`` ``[rows + 1]`` int32 are the offsets of each request's and each query row's partial results, in
    rows. ``chunk_rows`` ``[1]`` int32 is the chunk length in keys.
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
    def of(cls, plan_info: Sequence[int], workspace: Tensor, batch: UniformPagedBatch) -> PagedWorkList | None:
        """Return views of a plan's arrays; ``None`` for an unknown layout.

        ``plan_info`` is FlashInfer's ``PrefillPlanInfo``.
        """
        if len(plan_info) != _PLAN_INFO_LENGTH or not (plan_info[13] and plan_info[14]):
            return None
        capacity, rows, _, tile_rows, request, tile, chunk, merge, parts, length, _, _, valid, *_ = plan_info
        if rows != batch.requests * batch.queries:
            return None

        def array(offset: int, count: int) -> Tensor:
            return workspace[offset : offset + 4 * count].view(torch.int32)

        return cls(
            tile_rows,
            array(request, capacity),
            array(tile, capacity),
            array(chunk, capacity),
            workspace[valid : valid + capacity],
            array(parts, batch.requests + 1),
            array(merge, rows + 1),
            array(length, 1),
        )

    @property
    def capacity(self) -> int:
        return self.valid.shape[0]

    def arrays(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self)[1:])


@dataclass(frozen=True, slots=True, eq=False)
class PageCounts:
    """Static buffers of a captured batch's lengths, int32.

    ``kv_indptr`` ``[requests + 1]`` are the offsets of each request's page indices, ``last_page_lens`` ``[requests]``
    the rows in its last page.
    """

    kv_indptr: Tensor
    last_page_lens: Tensor


def lay_out_chunks(work_list: PagedWorkList, batch: UniformPagedBatch, chunks: Tensor) -> tuple[Tensor, ...]:
    """Return the list's arrays up to ``merge_indptr`` for requests of ``chunks`` ``[requests]`` chunks each."""
    per_request = chunks * batch.tiles(work_list.tile_rows)
    request = torch.repeat_interleave(torch.arange(batch.requests), per_request)
    place = torch.arange(len(request)) - (per_request.cumsum(0) - per_request)[request]
    valid = torch.arange(work_list.capacity) < len(request)
    merge = torch.zeros(batch.requests * batch.queries + 1, dtype=torch.int64)
    merge[1:] = chunks.repeat_interleave(batch.queries).cumsum(0)
    return request, place // chunks[request], place % chunks[request], valid, merge[:: batch.queries], merge


def work_list_problem(work_list: PagedWorkList, batch: UniformPagedBatch, kv_lens: Tensor) -> str:
    """Return why ``work_list`` is not laid out for ``kv_lens`` as this module expects; an empty string if it is.

    FlashInfer's own list is checked before it is overwritten: ours is correct only if the layout is the same.
    """
    tiles, chunk = batch.tiles(work_list.tile_rows), int(work_list.chunk_rows)
    if work_list.capacity < batch.requests * tiles:
        return f"capacity is {work_list.capacity} work items, but {batch.requests} requests have {tiles} each"
    if chunk < 1 or chunk % batch.page_size:
        return f"chunks of {chunk} keys are not whole pages of {batch.page_size}"
    pages = -(-kv_lens.long() // batch.page_size)
    seen = pages.clamp(max=batch.max_pages_seen(work_list.tile_rows))
    wanted = lay_out_chunks(work_list, batch, -(-seen // (chunk // batch.page_size)))
    for field, array, numbers in zip(fields(work_list)[1:], work_list.arrays(), wanted, strict=False):
        found = array.cpu()[: len(numbers)].long()
        if not torch.equal(found, numbers.long()):
            return f"{field.name} is {found[:8].tolist()} …, not {numbers.long()[:8].tolist()} …"
    return ""
