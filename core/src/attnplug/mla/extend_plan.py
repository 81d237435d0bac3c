"""Calls of an MLA extend that runs as MHA: prefix chunks and their slots (C3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

from attnplug.contract.geometry import Geometry, spread
from attnplug.contract.ragged import Part, RaggedCall
from attnplug.declare.problem import ExtendPath


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
    chunks: list[list[Span]] = []
    free = 0
    for request, prefix_len in enumerate(prefix_lens):
        if prefix_len < 0:
            raise ValueError(f"request {request} has a prefix of {prefix_len} rows")
        start = 0
        while start < prefix_len:
            if not free:
                chunks.append([])
                free = capacity
            length = min(free, prefix_len - start)
            chunks[-1].append(Span(request, start, length))
            start += length
            free -= length
    return tuple(map(tuple, chunks))


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
