"""Lengths and page tables → the calls that FlashInfer's paged kernels are planned with. Runs on any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from attnplug import Geometry
from attnplug.kernels import on_host
from attnplug_flashinfer_mla.filling import fill_indices
from attnplug_flashinfer_mla.lengths import Lengths

# FlashInfer's scheduler keeps its work items in arrays of 16384 and, before 0.7.2, does not check whether they fit. A
# query tile is one item, and splitting long caches adds at most one for each cluster of multiprocessors.
_MOST_TILES = 16384 - 1024
_TILE_ROWS = 64


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive requests that run in one call; the first and the last may take part with only some of their queries.

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
class PagedCall:
    """One call over the paged cache, as it is planned.

    ``lengths`` are on the host. ``kv_indices`` ``[pages]`` int32 is on the device and holds request i's pages from
    ``kv_indptr[i]`` on. ``heads`` may be more than the model has; the rest is padding.
    """

    rows: slice
    heads: int
    causal: bool
    lengths: Lengths
    kv_indices: Tensor
    page_table: Tensor
    kv_lens: Tensor
    """``[requests]`` int32 and ``page_table`` ``[requests, pages]`` on the device, for kernels that read these."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedCalls:
    """The calls of one batch, which cover its new rows in order, and where these rows are written."""

    calls: tuple[PagedCall, ...]
    new_slots: Tensor


def divide(query_lens: Sequence[int], kv_lens: Sequence[int], heads: int) -> list[Segment]:
    """Segments that the kernels' scheduler has room for: nearly always one, with all requests. None is empty."""
    if sum(-(-queries * heads // _TILE_ROWS) for queries in query_lens) <= _MOST_TILES:
        return [Segment(0, 0, tuple(query_lens), tuple(kv_lens))]
    segments: list[Segment] = []
    queries: list[int] = []
    rows: list[int] = []
    first_request = first_row = row = 0
    free = _MOST_TILES
    for request, (new, total) in enumerate(zip(query_lens, kv_lens, strict=True)):
        left = new
        while left:
            taken = min(left, free * _TILE_ROWS // heads)
            if not taken:
                segments.append(Segment(first_request, first_row, tuple(queries), tuple(rows)))
                queries, rows, first_request, first_row, free = [], [], request, row, _MOST_TILES
                continue
            left -= taken
            queries.append(taken)
            rows.append(total - left)
            free -= -(-taken * heads // _TILE_ROWS)
            row += taken
    return [*segments, Segment(first_request, first_row, tuple(queries), tuple(rows))]


def plan_paged(geometry: Geometry, heads: int, *, causal: bool) -> PagedCalls:
    """Plan a batch, by exact lengths on the host. Nothing is copied from the device."""
    slots = torch.empty(geometry.rows, dtype=torch.int64, device=geometry.device)
    if not geometry.rows:
        return PagedCalls((), slots)
    # FlashInfer's scheduler takes tiles of 128 rows if requests have more than 64 on average, and otherwise of 64.
    # Counting requests without queries could halve the tile. With more than 64 heads it would then end within a token
    # (see ``padded_heads``).
    live = geometry.only([request for request, new in enumerate(geometry.query_lens) if new])
    planned = padded_heads(heads) if causal else heads
    calls = [_call(live, segment, planned, causal, slots) for segment in divide(live.query_lens, live.kv_lens, planned)]
    return PagedCalls(tuple(calls), slots if geometry.slots is None else geometry.slots)


def padded_heads(heads: int) -> int:
    """Heads that divide a query tile.

    A tile that ends between the heads of one token loses that token's last key in causal calls, if the key starts a
    tile of its own: the kernels round the end of the tile down where their scheduler rounds it up. FlashInfer 0.7.2
    refuses such calls; earlier versions give wrong results. With a power of two up to 128, every tile ends with a
    token.
    """
    return 1 << (heads - 1).bit_length()


def _call(geometry: Geometry, segment: Segment, heads: int, causal: bool, slots: Tensor) -> PagedCall:
    page_table = geometry.page_table[segment.requests]
    host, device, kv_indices = index_pages(
        page_table, segment.query_lens, segment.kv_lens, geometry.page_size, slots[segment.rows]
    )
    return PagedCall(segment.rows, heads, causal, host, kv_indices, page_table, device.kv_lens)


def index_pages(
    page_table: Tensor, query_lens: Sequence[int], kv_lens: Sequence[int], page_size: int, slots: Tensor
) -> tuple[Lengths, Lengths, Tensor]:
    """Lengths of a call on the host and on the device, and the indices of its pages there. Fills ``slots`` too."""
    device, pages = page_table.device, [-(-rows // page_size) for rows in kv_lens]
    numbers = on_host((*accumulate(query_lens, initial=0), *accumulate(pages, initial=0), *kv_lens), device, np.int32)
    lengths = Lengths.of(numbers.to(device, non_blocking=True))  # one copy for the three
    kv_indices = torch.empty(sum(pages), dtype=torch.int32, device=device)
    fill_indices(page_table, lengths, page_size, kv_indices, slots)
    return Lengths.of(numbers), lengths, kv_indices
