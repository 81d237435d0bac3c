"""What an MLA extend prepares once per batch: its path, the ragged calls, and the cache rows each reads (C2)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from attnplug.contract.geometry import Geometry, spread
from attnplug.contract.ragged import RaggedCall
from attnplug.declare.claims import ExtendPath
from attnplug.mla.chunks import Chunk, plan_prefix_chunks


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One ragged call of an extend.

    ``slots`` ``[rows]`` are the cache rows to read and up-project; ``None`` means the new rows, which are at hand.
    ``rows`` ``[queries]`` are the query rows that take part; ``None`` means all of them.
    """

    call: RaggedCall
    slots: Tensor | None
    rows: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class MLAExtendPlan:
    """How the MLA layers of one batch run. ``new_slots`` ``[tokens]`` is where new rows go, by MHA; an absorbed
    extend leaves writing and planning to the backend."""

    path: ExtendPath
    new_slots: Tensor
    query_rows: int
    parts: tuple[Part, ...] = ()

    @property
    def calls(self) -> tuple[RaggedCall, ...]:
        return tuple(part.call for part in self.parts)


ABSORBED = MLAExtendPlan(ExtendPath.ABSORBED, torch.empty(0, dtype=torch.int64), 0)


def plan_extend(geometry: Geometry, path: ExtendPath, chunk_capacity: int) -> MLAExtendPlan:
    """Prepare a batch to run as MHA, in one shot or by chunks. Nothing is copied from the device."""
    new_slots = geometry.new_slots()
    device = geometry.page_table.device
    live = [request for request, new in enumerate(geometry.query_lens) if new]
    queries = [geometry.query_lens[request] for request in live]
    if path is ExtendPath.ONE_SHOT:
        rows = [geometry.kv_lens[request] for request in live]
        call = RaggedCall.of(0, queries, rows, causal=True, device=device)
        slots = geometry.span_slots(live, [0] * len(live), rows)
        return MLAExtendPlan(path, new_slots, geometry.query_rows, (Part(call, slots, None),))
    parts = [Part(RaggedCall.of(0, queries, queries, causal=True, device=device), None, None)]
    prefixes = [kv - new if new else 0 for new, kv in zip(geometry.query_lens, geometry.kv_lens, strict=True)]
    for index, chunk in enumerate(plan_prefix_chunks(prefixes, chunk_capacity), start=1):
        parts.append(_chunk_part(geometry, index, chunk, live))
    return MLAExtendPlan(path, new_slots, geometry.query_rows, tuple(parts))


def _chunk_part(geometry: Geometry, index: int, chunk: Chunk, live: list[int]) -> Part:
    """Every query of a chunk's requests sees every row of its span: the prefix lies before all of them."""
    requests = [span.request for span in chunk.spans]
    queries = [geometry.query_lens[request] for request in requests]
    device = geometry.page_table.device
    lens = [span.length for span in chunk.spans]
    call = RaggedCall.of(index, queries, lens, causal=False, device=device)
    slots = geometry.span_slots(requests, [span.start for span in chunk.spans], lens)
    rows = None
    if requests != live:
        starts = list(accumulate(geometry.query_lens, initial=0))
        _, rows = spread([starts[request] for request in requests], queries, device)
    return Part(call, slots, rows)
