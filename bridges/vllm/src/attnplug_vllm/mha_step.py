"""MHA steps: the metadata that vLLM hands to every layer. The first layer plans an eager step for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attnplug import ForwardExtras, LayerSpec
from attnplug_vllm.geometry import GeometryBuilder, leading_decodes, split
from attnplug_vllm.planner import GroupPlanner, PlannedBatch


@dataclass(slots=True, eq=False)
class LayerCall:
    """Arguments of one layer: q ``[tokens, heads, head_dim]``, k and v ``[tokens, kv_heads, head_dim]``, and ``out``,
    vLLM's memory for the result. ``save``: write k and v to the cache; False for a layer that shares another one's."""

    layer: LayerSpec
    q: Tensor
    k: Tensor | None
    v: Tensor | None
    out: Tensor
    save: bool
    sinks: Tensor | None = None

    def rows(self, start: int, end: int) -> LayerCall:
        """Return the call for rows ``[start, end)``."""
        k, v = (None if rows is None else rows[start:end] for rows in (self.k, self.v))
        return LayerCall(self.layer, self.q[start:end], k, v, self.out[start:end], self.save, self.sinks)

    def run(self, planned: PlannedBatch) -> None:
        """Attend by the plan of a batch and write the result to ``out``."""
        attention, batch = planned.attention, planned.batch
        if "out" in attention.backend.claims.extras:
            extras = ForwardExtras(sinks=self.sinks, out=self.out)
            attention.attend(self.q, self.k, self.v, self.layer, batch, save_kv_cache=self.save, extras=extras)
            return
        wanted = None if self.sinks is None else ForwardExtras(sinks=self.sinks)
        result = attention.attend(self.q, self.k, self.v, self.layer, batch, save_kv_cache=self.save, extras=wanted)
        self.out.copy_(result)


class EagerMHAStep:
    """A batch that runs without a graph, from vLLM's ``CommonAttentionMetadata``.

    ``threshold``: requests with at most this many new tokens run as a batch of their own, before the others. 0: all
    requests run as one batch.
    """

    __slots__ = ("_geometries", "_metadata", "_parts", "_planner", "_threshold")

    def __init__(self, planner: GroupPlanner, geometries: GeometryBuilder, metadata: Any, threshold: int = 0) -> None:
        self._planner, self._geometries, self._metadata, self._threshold = planner, geometries, metadata, threshold
        self._parts: list[tuple[PlannedBatch, int, int]] = []

    def attend(self, call: LayerCall) -> None:
        """Run one layer. Rows behind those of the requests are neither read nor written."""
        for planned, start, end in self._parts or self._plan():
            whole = call.q.shape[0] == end - start
            (call if whole else call.rows(start, end)).run(planned)

    def _plan(self) -> list[tuple[PlannedBatch, int, int]]:
        start = 0
        for metadata in self._batches():
            planned = self._planner.plan(self._geometries.eager(metadata))
            end = start + planned.batch.geometry.rows
            self._parts.append((planned, start, end))
            start = end
        return self._parts

    def _batches(self) -> tuple[Any, ...]:
        metadata = self._metadata
        if not self._threshold or metadata.max_query_len <= self._threshold:
            return (metadata,)
        decodes = leading_decodes(metadata, self._threshold)
        return split(metadata, decodes) if decodes else (metadata,)


class CapturedMHAStep:
    """A batch that a graph captures. Rows behind those of the requests are padding, and the backend zeroes them."""

    __slots__ = ("planned",)

    def __init__(self, planned: PlannedBatch) -> None:
        self.planned = planned

    def attend(self, call: LayerCall) -> None:
        """Run one layer, inside the capture or in the warm-up before it."""
        self.planned.refill()
        call.run(self.planned)


def capture_key(metadata: Any) -> tuple[int, int, int]:
    """Shape of a captured batch: requests, tokens, and new tokens of the longest request."""
    return metadata.num_reqs, metadata.num_actual_tokens, metadata.max_query_len
