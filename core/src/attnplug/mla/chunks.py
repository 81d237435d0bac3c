"""Chunk planner of chunked MLA prefill: divides the prefixes of a batch into chunks of bounded size (C3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Rows ``start … start + length - 1`` of one request's prefix; ``length`` is never 0."""

    request: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Spans that one kernel call attends to: at most one per request, in the order of requests."""

    spans: tuple[Span, ...]

    @property
    def rows(self) -> int:
        return sum(span.length for span in self.spans)


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
                chunks.append(Chunk(tuple(spans)))
                spans, free = [], capacity
    if spans:
        chunks.append(Chunk(tuple(spans)))
    return tuple(chunks)
