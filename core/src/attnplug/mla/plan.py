"""Planning of an MLA extend as MHA, once per batch: its ragged calls, and the rows each one reads (C2)."""

from __future__ import annotations

from itertools import accumulate

from attnplug.contract.geometry import Geometry, spread
from attnplug.contract.ragged import Part, RaggedCall
from attnplug.declare.problem import ExtendPath
from attnplug.mla.chunks import Chunk, plan_prefix_chunks


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
    requests = [span.request for span in chunk.spans]
    queries = [geometry.query_lens[request] for request in requests]
    lens = [span.length for span in chunk.spans]
    call = RaggedCall.of(index, queries, lens, causal=False, device=geometry.device, lane=geometry.lane)
    slots = geometry.span_slots(requests, [span.start for span in chunk.spans], lens)
    rows = None
    if requests != live:
        starts = list(accumulate(geometry.query_lens, initial=0))
        _, rows = spread([starts[request] for request in requests], queries, geometry.device)
    return Part(call, slots, rows)
