"""Planner: host lengths and page tables → calls of FlashInfer's paged kernels. Runs on any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from attnplug import Geometry
from attnplug.kernels import on_host
from attnplug_flashinfer_mla.device_planner import fill_indices
from attnplug_flashinfer_mla.lengths import CallLengths

# FlashInfer's scheduler keeps its work items in arrays of 16384 and, before 0.7.2, does not check for overflow. A query
# tile is one item, and KV splits add at most one per cluster of multiprocessors.
_MAX_TILES = 16384 - 1024
_TILE_ROWS = 64


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive requests of one call. The first and the last may contribute only some of their queries.

    The queries of request i are the last ``query_lens[i]`` of its first ``kv_lens[i]`` rows.
    """

    first_request: int
    first_row: int
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + sum(self.query_lens))

    @property
    def requests(self) -> slice:
        return slice(self.first_request, self.first_request + len(self.query_lens))


@dataclass(frozen=True, slots=True, eq=False)
class MLAPagedCall:
    """Arguments with which one call over the paged cache is planned.

    ``rows`` are its rows of q. ``lengths`` are on the host. ``kv_indices`` ``[pages]`` int32 is on the device; request
    i's pages start at ``kv_indptr[i]``. ``heads`` includes padding heads.
    """

    rows: slice
    heads: int
    causal: bool
    lengths: CallLengths
    kv_indices: Tensor
    page_table: Tensor
    kv_lens: Tensor
    """``[requests]`` int32 on the device, like ``page_table`` ``[requests, max_pages]``: for kernels that read both."""


@dataclass(frozen=True, slots=True, eq=False)
class MLAPagedCalls:
    """Calls of one batch, in the order of its rows, and the write slots ``new_slots`` ``[rows]`` int64."""

    calls: tuple[MLAPagedCall, ...]
    new_slots: Tensor


def split_segments(query_lens: Sequence[int], kv_lens: Sequence[int], heads: int) -> list[Segment]:
    """Split a batch into non-empty segments within FlashInfer's limit of work items. Nearly always there is one."""
    if sum(-(-queries * heads // _TILE_ROWS) for queries in query_lens) <= _MAX_TILES:
        return [Segment(0, 0, tuple(query_lens), tuple(kv_lens))]
    segments: list[Segment] = []
    queries: list[int] = []
    rows: list[int] = []
    first_request = first_row = row = 0
    free = _MAX_TILES
    for request, (new, total) in enumerate(zip(query_lens, kv_lens, strict=True)):
        left = new
        while left:
            taken = min(left, free * _TILE_ROWS // heads)
            if not taken:
                segments.append(Segment(first_request, first_row, tuple(queries), tuple(rows)))
                queries, rows, first_request, first_row, free = [], [], request, row, _MAX_TILES
                continue
            left -= taken
            queries.append(taken)
            rows.append(total - left)
            free -= -(-taken * heads // _TILE_ROWS)
            row += taken
    return [*segments, Segment(first_request, first_row, tuple(queries), tuple(rows))]


def plan_paged(geometry: Geometry, heads: int, *, causal: bool) -> MLAPagedCalls:
    """Plan a batch from exact host lengths. Copies nothing from the device."""
    slots = torch.empty(geometry.rows, dtype=torch.int64, device=geometry.device)
    if not geometry.rows:
        return MLAPagedCalls((), slots)
    # FlashInfer's scheduler uses tiles of 128 rows if requests average more than 64, otherwise tiles of 64. Requests
    # without queries would lower the average and could halve the tile, which with more than 64 heads would then end
    # within a token (see ``padded_heads``).
    live = geometry.only([request for request, new in enumerate(geometry.query_lens) if new])
    planned = padded_heads(heads) if causal else heads
    calls = [
        _call(live, segment, planned, causal, slots)
        for segment in split_segments(live.query_lens, live.kv_lens, planned)
    ]
    return MLAPagedCalls(tuple(calls), slots if geometry.slots is None else geometry.slots)


def padded_heads(heads: int) -> int:
    """Return ``heads`` padded to a power of two, which divides a query tile.

    A tile that ends between the heads of one token loses that token's last key in causal calls, if the key starts a
    tile of its own: the kernels round the end of the tile down where their scheduler rounds it up. FlashInfer 0.7.2
    raises an error for such calls; earlier versions return wrong results. With a power of two up to 128, every tile
    ends with a token.
    """
    return 1 << (heads - 1).bit_length()


def _call(geometry: Geometry, segment: Segment, heads: int, causal: bool, slots: Tensor) -> MLAPagedCall:
    page_table = geometry.page_table[segment.requests]
    host, device, kv_indices = index_pages(
        page_table, segment.query_lens, segment.kv_lens, geometry.page_size, slots[segment.rows]
    )
    return MLAPagedCall(segment.rows, heads, causal, host, kv_indices, page_table, device.kv_lens)


def index_pages(
    page_table: Tensor, query_lens: Sequence[int], kv_lens: Sequence[int], page_size: int, slots: Tensor
) -> tuple[CallLengths, CallLengths, Tensor]:
    """Return a call's lengths on the host, its lengths on the device, and ``kv_indices``.

    Fills ``slots`` ``[queries]``.
    """
    device, pages = page_table.device, [-(-rows // page_size) for rows in kv_lens]
    numbers = on_host((*accumulate(query_lens, initial=0), *accumulate(pages, initial=0), *kv_lens), device, np.int32)
    lengths = CallLengths.of(numbers.to(device, non_blocking=True))  # one copy for all three arrays
    kv_indices = torch.empty(sum(pages), dtype=torch.int32, device=device)
    fill_indices(page_table, lengths, page_size, kv_indices, slots)
    return CallLengths.of(numbers), lengths, kv_indices
