"""A step of vLLM's as our layers run it: planned when its first layer runs, or captured in a CUDA graph.

vLLM builds metadata for every step, and does not say whether the step then runs layer by layer or replays a graph. So a
plan is made when the first layer asks for it; in a replayed graph, none does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnplug import ForwardBatch, ForwardExtras, Geometry, LayerSpec, PlanError
from attnplug.host import ModelAttention
from attnplug_vllm.geometry import Shape, decoding, split


@dataclass(slots=True, eq=False)
class LayerCall:
    """What vLLM gives a layer: q ``[tokens, heads, head_dim]``, k and v ``[tokens, kv_heads, head_dim]``, and memory
    for the result. ``save`` says that the new rows are to be written; a layer that shares another one's cache writes
    none."""

    layer: LayerSpec
    q: Tensor
    k: Tensor | None
    v: Tensor | None
    out: Tensor
    save: bool
    sinks: Tensor | None = None

    def rows(self, start: int, end: int) -> LayerCall:
        """The call for some rows."""
        k, v = (None if rows is None else rows[start:end] for rows in (self.k, self.v))
        return LayerCall(self.layer, self.q[start:end], k, v, self.out[start:end], self.save, self.sinks)

    def run(self, attention: ModelAttention, batch: ForwardBatch) -> None:
        """Attend, by the plan of a batch."""
        if "out" in attention.backend.claims.extras:
            extras = ForwardExtras(sinks=self.sinks, out=self.out)
            attention.attend(self.q, self.k, self.v, self.layer, batch, save_kv_cache=self.save, extras=extras)
            return
        asked = None if self.sinks is None else ForwardExtras(sinks=self.sinks)
        found = attention.attend(self.q, self.k, self.v, self.layer, batch, save_kv_cache=self.save, extras=asked)
        self.out.copy_(found)


class Step:
    """A batch outside of graphs. ``threshold``: requests with at most so many new tokens run as a batch of their own,
    before the others; 0 if all run as one batch."""

    __slots__ = ("_attention", "_metadata", "_parts", "_shape", "_threshold")

    def __init__(self, attention: ModelAttention, shape: Shape, metadata: Any, threshold: int = 0) -> None:
        self._attention, self._shape, self._metadata, self._threshold = attention, shape, metadata, threshold
        self._parts: list[tuple[ForwardBatch, int, int]] = []

    def attend(self, call: LayerCall) -> None:
        """One layer: new rows to the cache, and the result to memory of vLLM's. Rows past those of requests are left
        alone."""
        for batch, start, end in self._parts or self._plan():
            whole = call.q.shape[0] == end - start
            (call if whole else call.rows(start, end)).run(self._attention, batch)

    def _plan(self) -> list[tuple[ForwardBatch, int, int]]:
        start = 0
        for metadata in self._batches():
            batch = ForwardBatch(self._shape.geometry(metadata))
            self._attention.plan(batch)
            self._parts.append((batch, start, start + batch.geometry.rows))
            start += batch.geometry.rows
        return self._parts

    def _batches(self) -> tuple[Any, ...]:
        metadata = self._metadata
        if not self._threshold or metadata.max_query_len <= self._threshold:
            return (metadata,)
        first = decoding(metadata, self._threshold)
        return split(metadata, first) if first else (metadata,)


class CapturedStep:
    """A batch that a graph captures. The part of its plan that lengths decide is the first thing in the graph."""

    __slots__ = ("_attention", "_filled", "batch")

    def __init__(self, attention: ModelAttention, geometry: Geometry) -> None:
        self._attention, self.batch = attention, ForwardBatch(geometry)
        self._filled: bool | None = None
        attention.plan_captured(self.batch, in_capture=True)

    def attend(self, call: LayerCall) -> None:
        # The same metadata may serve a run that warms up and the capture that follows.
        capturing = torch.cuda.is_current_stream_capturing()
        if self._filled is not capturing:
            self._filled = capturing
            self._attention.refill(self.batch)
        call.run(self._attention, self.batch)

    def replayed(self, metadata: Any) -> None:
        """Plan a replay. Captured kernels read vLLM's tensors where they were; other ones are copied there."""
        geometry = self.batch.geometry
        given = metadata.seq_lens, metadata.block_table_tensor, metadata.slot_mapping
        for tensor, captured in zip(given, (geometry.seq_lens, geometry.page_table, geometry.slots), strict=True):
            if captured is not None and tensor.data_ptr() != captured.data_ptr():
                captured.copy_(tensor[: captured.shape[0]] if tensor.dim() == 1 else tensor[:, : captured.shape[1]])
        self._attention.plan_captured(self.batch)


class Captures:
    """The captured batches of a KV group, by requests and tokens."""

    def __init__(self, requests: int, tokens: int) -> None:
        self._most = requests, tokens
        self._steps: dict[tuple[int, int, int], CapturedStep] = {}
        self._attention: ModelAttention | None = None

    def capture(self, attention: ModelAttention, shape: Shape, metadata: Any) -> CapturedStep:
        if attention is not self._attention:  # caches have moved: what was captured over the old ones is gone
            attention.reserve_graphs(*self._most)
            if (length := attention.padding_length()) != 0:
                raise PlanError(
                    f"backend {attention.backend.backend_id.name} wants padded requests of length {length} in CUDA "
                    "graphs, and vLLM gives them length 0; use --compilation-config.cudagraph_mode PIECEWISE"
                )
            self._attention, self._steps = attention, {}
        step = CapturedStep(attention, shape.captured(metadata))
        self._steps[self._key(metadata)] = step
        return step

    def replay(self, attention: ModelAttention, metadata: Any) -> None:
        """Plan a replay, if a batch of this shape was captured. vLLM may still run it outside of the graph."""
        step = self._steps.get(self._key(metadata)) if self._steps and attention is self._attention else None
        if step is not None:
            step.replayed(metadata)

    @staticmethod
    def _key(metadata: Any) -> tuple[int, int, int]:
        return metadata.num_reqs, metadata.num_actual_tokens, metadata.max_query_len
