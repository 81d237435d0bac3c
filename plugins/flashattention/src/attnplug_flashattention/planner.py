"""Planner: lengths and page tables → kernel calls, with split-KV for decode. Runs on any device."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from attnplug import Geometry, RaggedCall
from attnplug.kernels import split_table, to_device
from attnplug_flashattention.kv_splits import KEY_TILE, KVSplits
from attnplug_flashattention.tables import fill_slots, fill_splits

# Cost model in units of one key tile, which takes 1.4 µs on an H200 (183 µs for the 128 tiles of 16384 keys on one
# multiprocessor). The start cost is paid per query tile, the merge cost once.
_TILE_START_COST = 3
_MERGE_COST = 4
_MAX_WAVES = 2
"""Maximum waves of query tiles. More splits would help only the longest requests."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedCall:
    """One call over the paged cache. Each row of the table is a sequence of keys with its own queries.

    ``page_table`` ``[sequences, pages]`` int32, in kernel pages, and ``kv_lens`` ``[sequences]`` int32 are on the
    device. ``queries`` is the number of queries per sequence; if it is ``None``, they differ and ``ragged`` has the
    lengths. A captured call has no ``ragged``, because its lengths are known on the device only. ``longest`` is an
    upper bound of ``kv_lens``. With ``causal``, the last query sees the last key, and each earlier query one key less.
    """

    page_table: Tensor
    kv_lens: Tensor
    longest: int
    queries: int | None
    causal: bool
    ragged: RaggedCall | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GatheredCall:
    """One call over gathered rows, for kernels that read no pages. ``rows`` ``[keys]`` int64 are the keys' slots."""

    rows: Tensor
    ragged: RaggedCall


@dataclass(frozen=True, slots=True, eq=False)
class SplitCall:
    """A split-KV decode: each request has ``count`` splits, which are sequences of ``call``. Results are merged."""

    count: int
    call: PagedCall


@dataclass(frozen=True, slots=True, eq=False)
class CachedPlan:
    """Calls of a batch over the cache.

    Layers that see all keys run ``split`` if it is set. Layers with a sliding window see few keys and run ``whole``,
    which is ``None`` in a captured plan without such layers. ``tables`` are refilled inside a graph at every replay.
    """

    whole: PagedCall | GatheredCall | None
    split: SplitCall | None = None
    tables: tuple[KVSplits, ...] = ()


@dataclass(frozen=True, slots=True)
class SplitHeuristic:
    """Cost model that chooses the number of KV splits of a decode."""

    kv_heads: int
    processors: int
    most: int = 0
    """Maximum number of splits; 0 for no limit."""

    def num_splits(self, requests: int, longest: int) -> int:
        """Return the number of KV splits per request, if the longest request has ``longest`` rows.

        A query tile, one KV head of one request, occupies one multiprocessor. Splits use the multiprocessors that would
        otherwise be idle.
        """
        blocks = requests * self.kv_heads
        tiles = -(-longest // KEY_TILE)
        limit = min(tiles, _MAX_WAVES * self.processors // max(blocks, 1), self.most or tiles)
        best, least = 1, self._cost(blocks, tiles, 1)
        for count in range(2, limit + 1):
            if (cost := self._cost(blocks, tiles, count) + _MERGE_COST) < least:
                best, least = count, cost
        return best

    def _cost(self, blocks: int, tiles: int, count: int) -> int:
        return -(-blocks * count // self.processors) * (-(-tiles // count) + _TILE_START_COST)


def requests_with_queries(geometry: Geometry) -> Geometry:
    """Return the geometry without requests that have no queries."""
    return geometry.only([request for request, new in enumerate(geometry.query_lens) if new])


def ragged_call(geometry: Geometry) -> RaggedCall:
    """Return the lengths of a batch whose requests all have queries. Copies once to the device."""
    query_lens, kv_lens = tuple(geometry.query_lens), tuple(geometry.kv_lens)
    sums = [list(accumulate(query_lens, initial=0)), list(accumulate(kv_lens, initial=0))]
    query_indptr, kv_indptr = to_device(sums, geometry.device, np.int32).unbind()
    return RaggedCall(0, query_lens, kv_lens, not geometry.mode.is_decode, query_indptr, kv_indptr, geometry.lane)


def plan_cached(
    geometry: Geometry, live: Geometry, call: RaggedCall, kernel_page: int | None, heuristic: SplitHeuristic | None
) -> tuple[Tensor, CachedPlan]:
    """Plan an eager batch. Returns the write slots ``[rows]`` int64 and the calls. Copies nothing from the device.

    ``live`` are the requests with queries, ``call`` has their lengths. ``kernel_page`` is the kernel's page size;
    ``None`` if rows are gathered. ``heuristic`` is for kernels that do not split KV themselves.
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
    split = None
    if decode and heuristic is not None and (count := heuristic.num_splits(live.requests, longest)) > 1:
        splits = KVSplits.empty(live.requests, longest, count, live.page_size, kernel_page, live.device)
        fill_splits(live.page_table, live.seq_lens, splits)
        split = split_call(splits)
    return slots, CachedPlan(whole, split)


def plan_captured(
    geometry: Geometry, kernel_page: int, heuristic: SplitHeuristic | None, *, windowed: bool
) -> tuple[Tensor, CachedPlan]:
    """Plan a captured batch shape. Returns as :func:`plan_cached`; :func:`refill` fills the plan inside the graph.

    Kernels read the batch's own table and lengths if the page sizes agree. Lengths at capture say nothing about later
    ones, so the number of splits is chosen for requests that fill the table; shorter requests have the same number of
    smaller splits. ``windowed``: some layer has a sliding window.
    """
    decode, requests, device = geometry.mode.is_decode, geometry.requests, geometry.device
    slots = torch.full((geometry.rows,), -1, dtype=torch.int64, device=device)
    longest = geometry.page_table.shape[1] * geometry.page_size
    count = heuristic.num_splits(requests, longest) if decode and heuristic is not None else 1
    tables = []
    split = whole = None
    if count > 1:
        tables.append(KVSplits.empty(requests, longest, count, geometry.page_size, kernel_page, device))
        split = split_call(tables[0])
    if count == 1 or windowed:
        table, kv_lens = geometry.page_table, geometry.seq_lens
        if kernel_page != geometry.page_size:
            splits = KVSplits.empty(requests, longest, 1, geometry.page_size, kernel_page, device)
            tables.append(splits)
            table, kv_lens = splits.page_table, splits.kv_lens
        whole = PagedCall(table, kv_lens, longest, geometry.rows // requests, causal=not decode)
    return slots, CachedPlan(whole, split, tuple(tables))


def refill(geometry: Geometry, slots: Tensor, tables: tuple[KVSplits, ...]) -> None:
    """Fill the slots of a captured batch and each table that is not the batch's own, by one launch each."""
    if geometry.slots is None:
        fill_slots(geometry.page_table, geometry.seq_lens, geometry.page_size, slots)
    else:
        slots.copy_(geometry.slots)
    for splits in tables:
        fill_splits(geometry.page_table, geometry.seq_lens, splits)


def split_call(splits: KVSplits) -> SplitCall:
    """Return the call over the splits of requests with one query each."""
    longest = splits.page_table.shape[1] * splits.kernel_page
    return SplitCall(splits.count, PagedCall(splits.page_table, splits.kv_lens, longest, queries=1, causal=False))
