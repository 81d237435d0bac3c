"""Path of an MLA extend, chosen by lengths, thresholds and declared abilities, never by name (C1), and its calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

from attnplug.contract.geometry import Geometry, spread
from attnplug.contract.mode import ForwardMode
from attnplug.contract.ragged import Part, RaggedCall
from attnplug.declare.errors import PlanError, UsageError
from attnplug.declare.problem import ExtendPath


@dataclass(frozen=True, slots=True)
class ExtendPolicy:
    """Choice of the fastest path of an extend.

    Absorbed attention reads the cache directly, but multiplies rows of ``kv_lora_rank``. As MHA, rows are up-projected
    first, which pays for long prefixes, from ``chunk_threshold`` prefix rows per batch, and if many queries read each
    row: from ``query_threshold`` new tokens per prefix row, on average. (With 512 latent columns and heads of 192 and
    128, 171 queries are as much arithmetic on both paths.) ``chunk_capacity`` is the maximum number of prefix rows to
    up-project at a time. ``forced`` overrides all.
    """

    chunk_threshold: int = 8192
    query_threshold: int = 192
    chunk_capacity: int = 131072
    disable_chunked_prefix_cache: bool = False
    disable_ragged: bool = False
    forced: ExtendPath | None = None

    def __post_init__(self) -> None:
        if self.chunk_capacity < 1:
            raise UsageError(f"a chunk capacity of {self.chunk_capacity} rows holds nothing; give 1 or more")
        if self.chunk_threshold < 0:
            raise UsageError(f"a chunk threshold of {self.chunk_threshold} rows is negative; give 0 or more")

    def choose(
        self,
        mode: ForwardMode,
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        abilities: frozenset[ExtendPath],
        requested: ExtendPath | None = None,
    ) -> ExtendPath:
        """Return the path of one batch: the requested one, if any.

        Decoding is absorbed. A backend that can extend absorbed runs only a plain extend as MHA, because other modes
        have few queries per request. A backend that cannot runs everything as MHA. Raises PlanError if no path is both
        allowed and supported.
        """
        if mode.is_decode:
            return ExtendPath.ABSORBED
        able = ", ".join(sorted(abilities))
        forced = requested or (self.forced if mode is ForwardMode.EXTEND else None)
        if forced is not None:
            if forced not in abilities:
                raise PlanError(f"the extend path {forced} is asked for, but the backend can run {able}")
            return forced
        absorbed = ExtendPath.ABSORBED in abilities
        total, prefix = sum(kv_lens), sum(kv_lens) - sum(query_lens)
        chunks_allowed = not self.disable_chunked_prefix_cache
        reads = sum(new * (kv - new) for new, kv in zip(query_lens, kv_lens, strict=True))
        enough = prefix >= self.chunk_threshold or reads >= self.query_threshold * prefix
        pays = not prefix or (chunks_allowed and enough)
        if absorbed and (self.disable_ragged or mode is not ForwardMode.EXTEND or not pays):
            return ExtendPath.ABSORBED
        if self.disable_ragged:
            raise PlanError(f"ragged attention is disabled, but the backend can only run {able}")
        if total <= self.chunk_capacity and ExtendPath.ONE_SHOT in abilities:
            return ExtendPath.ONE_SHOT
        if ExtendPath.CHUNKED in abilities and (chunks_allowed or not prefix):
            return ExtendPath.CHUNKED
        if absorbed:
            return ExtendPath.ABSORBED
        # More rows than the capacity, or disabled chunks, but the backend supports nothing else.
        return ExtendPath.ONE_SHOT if ExtendPath.ONE_SHOT in abilities else ExtendPath.CHUNKED


@dataclass(frozen=True, slots=True)
class Span:
    """Rows ``start … start + length - 1`` of one request's prefix; ``length`` is never 0."""

    request: int
    start: int
    length: int


Chunk: TypeAlias = tuple[Span, ...]
"""Spans that one kernel call attends to: at most one per request, in the order of requests."""


def plan_prefix_chunks(prefix_lens: Sequence[int], capacity: int) -> tuple[Chunk, ...]:
    """Cover every prefix row exactly once, with as few chunks of at most ``capacity`` rows as possible.

    Chunks are filled one after the other, across requests. Every chunk but the last is full, however skewed the lengths
    are. (Dividing the capacity evenly among requests would leave most of it unused once the short ones end.)
    Requests without a prefix appear in no chunk, since kernels return garbage for empty spans.
    """
    if capacity < 1:
        raise ValueError(f"a chunk capacity of {capacity} rows holds nothing; give 1 or more")
    chunks: list[Chunk] = []
    spans: list[Span] = []
    free = capacity
    for request, prefix_len in enumerate(prefix_lens):
        if prefix_len < 0:
            raise ValueError(f"request {request} has a prefix of {prefix_len} rows")
        start = 0
        while start < prefix_len:
            length = min(free, prefix_len - start)
            spans.append(Span(request, start, length))
            start += length
            free -= length
            if free == 0:
                chunks.append(tuple(spans))
                spans, free = [], capacity
    if spans:
        chunks.append(tuple(spans))
    return tuple(chunks)


def plan_extend(geometry: Geometry, path: ExtendPath, chunk_capacity: int) -> tuple[Part, ...]:
    """Plan the calls of a batch that runs as MHA, one-shot or chunked. Copies nothing from the device."""
    query_lens, kv_lens, device = geometry.query_lens, geometry.kv_lens, geometry.device
    live = [request for request, new in enumerate(query_lens) if new]
    queries = [query_lens[request] for request in live]
    if path is ExtendPath.ONE_SHOT:
        rows = [kv_lens[request] for request in live]
        call = RaggedCall.of(0, queries, rows, causal=True, device=device, lane=geometry.lane)
        return (Part(call, geometry.span_slots(live, [0] * len(live), rows), None),)
    call = RaggedCall.of(0, queries, queries, causal=True, device=device, lane=geometry.lane)
    parts = [Part(call, None, None)]
    prefixes = [kv - new if new else 0 for new, kv in zip(query_lens, kv_lens, strict=True)]
    for index, chunk in enumerate(plan_prefix_chunks(prefixes, chunk_capacity), start=1):
        parts.append(_chunk_part(geometry, index, chunk, live))
    return tuple(parts)


def _chunk_part(geometry: Geometry, index: int, chunk: Chunk, live: list[int]) -> Part:
    """Plan a non-causal call: all queries of a chunk's requests come behind the prefix and attend to the whole span."""
    requests = [span.request for span in chunk]
    queries = [geometry.query_lens[request] for request in requests]
    lens = [span.length for span in chunk]
    call = RaggedCall.of(index, queries, lens, causal=False, device=geometry.device, lane=geometry.lane)
    slots = geometry.span_slots(requests, [span.start for span in chunk], lens)
    rows = None
    if requests != live:
        starts = list(accumulate(geometry.query_lens, initial=0))
        _, rows = spread([starts[request] for request in requests], queries, geometry.device)
    return Part(call, slots, rows)
