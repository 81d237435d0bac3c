"""Lengths and page tables → the calls that kernels are run with. Runs on any device."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from attnplug import Geometry, RaggedCall
from attnplug.kernels import split_table, to_device
from attnplug_flashattention.parts import KEY_TILE, Parts
from attnplug_flashattention.tables import fill_parts, fill_slots

# What a call costs besides its key tiles, counted in key tiles. A tile takes 1.4 µs on an H200: one multiprocessor
# needs 183 µs for the 128 tiles of 16384 keys. The first cost is paid whenever a tile of queries is started, the second
# once.
_START = 3
_MERGE = 4
_WAVES = 2
"""How many times over the multiprocessors may be filled. More parts would help only the longest requests."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedCall:
    """One call over the paged cache: each row of the table is a sequence of keys, with queries of its own.

    ``page_table`` ``[sequences, pages]`` int32 is in the kernel's pages, ``kv_lens`` ``[sequences]`` int32; both are on
    the device. ``queries`` is the number of queries of every sequence, or ``None`` if they differ: then ``ragged`` has
    the lengths. A captured call has no ``ragged``, because only the device knows its lengths. ``longest`` is an upper
    bound of them. With ``causal`` the last query sees the last key, and each earlier query one key less.
    """

    page_table: Tensor
    kv_lens: Tensor
    longest: int
    queries: int | None
    causal: bool
    ragged: RaggedCall | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GatheredCall:
    """The same for a kernel that reads no pages: ``rows`` ``[keys]`` int64 are the slots of all keys, in order."""

    rows: Tensor
    ragged: RaggedCall


@dataclass(frozen=True, slots=True, eq=False)
class DividedCall:
    """A decode with requests cut into ``count`` parts, each a sequence of ``call``; the parts' results are merged."""

    count: int
    call: PagedCall


@dataclass(frozen=True, slots=True, eq=False)
class CachedPlan:
    """How a batch reads the cache.

    ``divided`` is for layers that see all keys. Layers with a window see few keys and run ``whole``, which is ``None``
    if there are no such layers. ``tables`` are filled anew inside a graph, at the start of every replay.
    """

    whole: PagedCall | GatheredCall | None
    divided: DividedCall | None = None
    tables: tuple[Parts, ...] = ()


@dataclass(frozen=True, slots=True)
class Division:
    """What the number of parts depends on besides the batch."""

    kv_heads: int
    processors: int
    most: int = 0
    """The most parts; 0 for as many as pay."""

    def parts(self, requests: int, longest: int) -> int:
        """How many parts to cut each decoded request into, if the longest has ``longest`` rows.

        A tile of queries, which is one KV head of one request, keeps one multiprocessor busy. As long as there are more
        multiprocessors than tiles, parts give them work.
        """
        blocks = requests * self.kv_heads
        tiles = -(-longest // KEY_TILE)
        limit = min(tiles, _WAVES * self.processors // max(blocks, 1), self.most or tiles)
        best, least = 1, self._cost(blocks, tiles, 1)
        for count in range(2, limit + 1):
            if (cost := self._cost(blocks, tiles, count) + _MERGE) < least:
                best, least = count, cost
        return best

    def _cost(self, blocks: int, tiles: int, count: int) -> int:
        return -(-blocks * count // self.processors) * (-(-tiles // count) + _START)


def with_queries(geometry: Geometry) -> Geometry:
    """The requests that have queries. The others have neither rows of q nor results."""
    return geometry.only([request for request, new in enumerate(geometry.query_lens) if new])


def ragged_call(geometry: Geometry) -> RaggedCall:
    """The lengths of a batch in which every request has queries. Costs one copy to the device."""
    query_lens, kv_lens = tuple(geometry.query_lens), tuple(geometry.kv_lens)
    sums = [list(accumulate(query_lens, initial=0)), list(accumulate(kv_lens, initial=0))]
    query_indptr, kv_indptr = to_device(sums, geometry.device, np.int32).unbind()
    return RaggedCall(0, query_lens, kv_lens, not geometry.mode.is_decode, query_indptr, kv_indptr, geometry.lane)


def plan_cached(
    geometry: Geometry, live: Geometry, call: RaggedCall, kernel_page: int | None, division: Division | None
) -> tuple[Tensor, CachedPlan]:
    """Where a batch writes its new rows, and how it reads the cache. Nothing is copied from the device.

    ``live`` are its requests with queries, and ``call`` has their lengths. ``kernel_page`` is the page size that the
    kernel reads, ``None`` if it reads no pages. ``division`` is for kernels that do not divide long requests
    themselves.
    """
    decode, longest = geometry.mode.is_decode, max(call.kv_lens)
    if decode and geometry.slots is None:
        slots = torch.empty(geometry.rows, dtype=torch.int64, device=geometry.device)
        fill_slots(live.page_table, live.seq_lens, live.page_size, slots)
    else:
        slots = geometry.new_slots()
    if kernel_page is None:
        if geometry.slots is None and call.query_lens == call.kv_lens:
            return slots, CachedPlan(GatheredCall(slots, call))
        rows = live.span_slots(range(live.requests), [0] * live.requests, call.kv_lens)
        return slots, CachedPlan(GatheredCall(rows, call))
    ratio = geometry.page_size // kernel_page
    table = live.page_table if ratio == 1 else split_table(live.page_table, ratio)
    queries = call.query_lens[0] if len(set(call.query_lens)) == 1 else None
    whole = PagedCall(table, live.seq_lens, longest, queries, call.causal, call)
    divided = None
    if decode and division is not None and (count := division.parts(live.requests, longest)) > 1:
        parts = Parts.empty(live.requests, longest, count, live.page_size, kernel_page, live.device)
        fill_parts(live.page_table, live.seq_lens, parts)
        divided = divide(parts)
    return slots, CachedPlan(whole, divided)


def plan_captured(
    geometry: Geometry, kernel_page: int, division: Division | None, *, windowed: bool
) -> tuple[Tensor, CachedPlan]:
    """The same for a captured shape. :func:`refill` fills it inside the graph, at the start of every replay.

    Kernels that can read the batch's own table and lengths do so. The lengths at capture say nothing about later ones,
    so the number of parts is chosen for requests that fill the table. Shorter requests are cut into as many parts,
    which are smaller. ``windowed`` says whether some layer has a window.
    """
    decode, requests, device = geometry.mode.is_decode, geometry.requests, geometry.device
    slots = torch.full((geometry.rows,), -1, dtype=torch.int64, device=device)
    longest = geometry.page_table.shape[1] * geometry.page_size
    count = division.parts(requests, longest) if decode and division is not None else 1
    tables = []
    divided = whole = None
    if count > 1:
        tables.append(Parts.empty(requests, longest, count, geometry.page_size, kernel_page, device))
        divided = divide(tables[0])
    if count == 1 or windowed:
        table, kv_lens = geometry.page_table, geometry.seq_lens
        if kernel_page != geometry.page_size:
            cut = Parts.empty(requests, longest, 1, geometry.page_size, kernel_page, device)
            tables.append(cut)
            table, kv_lens = cut.page_table, cut.kv_lens
        whole = PagedCall(table, kv_lens, longest, geometry.rows // requests, causal=not decode)
    return slots, CachedPlan(whole, divided, tuple(tables))


def refill(geometry: Geometry, slots: Tensor, tables: tuple[Parts, ...]) -> None:
    """One launch for the slots of a captured batch, and one for each table that is not the batch's own."""
    if geometry.slots is None:
        fill_slots(geometry.page_table, geometry.seq_lens, geometry.page_size, slots)
    else:
        slots.copy_(geometry.slots)
    for parts in tables:
        fill_parts(geometry.page_table, geometry.seq_lens, parts)


def divide(parts: Parts) -> DividedCall:
    """The call over parts of requests that have one query each."""
    longest = parts.page_table.shape[1] * parts.kernel_page
    return DividedCall(parts.count, PagedCall(parts.page_table, parts.kv_lens, longest, queries=1, causal=False))
