"""Lengths and page tables → the calls that kernels are run with. Runs on any device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from attnplug import Geometry, RaggedCall, on_host, split_table, to_device
from attnplug_flashattention.tables import KEY_TILE, Parts, fill_parts, fill_slots

# What a call costs beside its key tiles, in the time of one: 1.4 µs on an H200, where one multiprocessor takes 183 µs
# for the 128 tiles of 16384 keys. The first is paid at every start of a tile of queries, the second once.
_START = 3
_MERGE = 4
_WAVES = 2
"""How often the multiprocessors may be filled: more parts than that would be for the longest requests alone."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedCall:
    """One call over the paged cache: each row of the table is a sequence of keys, with queries of its own.

    ``page_table`` ``[sequences, pages]`` int32 is in the kernel's pages, ``kv_lens`` ``[sequences]`` int32; both are on
    the device. ``queries`` is how many each has, where they are equally many, and else ``None``: then ``ragged`` has
    the lengths. A captured call has no ``ragged``: only the device knows its lengths. ``longest`` is never less than
    any of them. With ``causal`` the last query sees the last key and each one before it one key less.
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
    """A decode whose requests are cut into ``count`` parts, each a sequence of ``call``; their results are merged."""

    count: int
    call: PagedCall


@dataclass(frozen=True, slots=True, eq=False)
class CachedPlan:
    """How a batch writes its new rows to the cache, and how it reads them from there.

    ``new_slots`` ``[rows]`` int64; -1 for padded requests, of captured batches. ``whole`` is ``None`` for one without
    queries. ``divided`` is for layers that see all keys; those with a window, which see few, run ``whole``.
    """

    new_slots: Tensor
    whole: PagedCall | GatheredCall | None
    divided: DividedCall | None = None


@dataclass(frozen=True, slots=True)
class Division:
    """What the number of parts depends on beside a batch."""

    kv_heads: int
    processors: int
    most: int = 0
    """The most parts; 0 for as many as pay."""

    def parts(self, requests: int, longest: int) -> int:
        """Into how many parts to cut each of some decoded requests, the longest of that many rows.

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


def plan_cached(geometry: Geometry, kernel_page: int | None, division: Division | None) -> CachedPlan:
    """Plan a batch over the cache. Nothing is copied from the device.

    ``kernel_page`` is the page size that the kernel reads, ``None`` if it reads no pages; ``division`` is for kernels
    that do not divide long requests themselves.
    """
    device = geometry.page_table.device
    if not geometry.query_rows:
        return CachedPlan(torch.empty(0, dtype=torch.int64, device=device), None)
    geometry = without_empty_requests(geometry)
    ragged, kv_lens = _ragged(geometry)
    decode = geometry.mode.is_decode
    longest = max(geometry.kv_lens)
    if decode:
        slots = torch.empty(geometry.query_rows, dtype=torch.int64, device=device)
        fill_slots(geometry.page_table, kv_lens, geometry.page_size, slots)
    else:
        slots = geometry.new_slots()
    if kernel_page is None:
        fresh = list(geometry.query_lens) == list(geometry.kv_lens)
        requests = range(len(geometry.kv_lens))
        rows = slots if fresh else geometry.span_slots(requests, [0] * len(requests), geometry.kv_lens)
        return CachedPlan(slots, GatheredCall(rows, ragged))
    ratio = geometry.page_size // kernel_page
    table = geometry.page_table if ratio == 1 else split_table(geometry.page_table, ratio)
    queries = geometry.query_lens[0] if len(set(geometry.query_lens)) == 1 else None
    whole = PagedCall(table, kv_lens, longest, queries, not decode, ragged)
    divided = None
    if decode and division is not None and (count := division.parts(len(geometry.kv_lens), longest)) > 1:
        parts = Parts.empty(len(geometry.kv_lens), longest, count, geometry.page_size, kernel_page, device)
        fill_parts(geometry.page_table, kv_lens, parts)
        divided = divide(parts)
    return CachedPlan(slots, whole, divided)


def divide(parts: Parts) -> DividedCall:
    """The call over parts of requests that have one query each."""
    longest = parts.page_table.shape[1] * parts.kernel_page
    return DividedCall(parts.count, PagedCall(parts.page_table, parts.kv_lens, longest, queries=1, causal=False))


def plan_at_hand(geometry: Geometry) -> RaggedCall | None:
    """The call of an extend all of whose keys are new, over the rows at hand; ``None`` where there are others."""
    live = [(new, total) for new, total in zip(geometry.query_lens, geometry.kv_lens, strict=True) if new]
    if geometry.mode.is_decode or not live or any(new != total for new, total in live):
        return None
    lens = [new for new, _ in live]
    return RaggedCall.of(0, lens, lens, causal=True, device=geometry.page_table.device)


def without_empty_requests(geometry: Geometry) -> Geometry:
    """The requests that have queries: the others would have neither a row of q nor a result."""
    live = [request for request, new in enumerate(geometry.query_lens) if new]
    if len(live) == len(geometry.query_lens):
        return geometry
    return replace(
        geometry,
        query_lens=[geometry.query_lens[request] for request in live],
        kv_lens=[geometry.kv_lens[request] for request in live],
        page_table=geometry.page_table.index_select(0, to_device(live, geometry.page_table.device)),
    )


def _ragged(geometry: Geometry) -> tuple[RaggedCall, Tensor]:
    """The lengths of a batch on the device, and ``kv_lens`` ``[requests]`` int32 among them: one copy for all."""
    query_lens, kv_lens = tuple(geometry.query_lens), tuple(geometry.kv_lens)
    requests, device = len(kv_lens), geometry.page_table.device
    numbers = on_host((*accumulate(query_lens, initial=0), *accumulate(kv_lens, initial=0), *kv_lens), device, np.int32)
    if device.type != "cpu":
        numbers = numbers.to(device, non_blocking=True)
    query_indptr, kv_indptr = numbers[: requests + 1], numbers[requests + 1 : 2 * requests + 2]
    ragged = RaggedCall(0, query_lens, kv_lens, not geometry.mode.is_decode, query_indptr, kv_indptr)
    return ragged, numbers[2 * requests + 2 :]
