"""Plans for the batches of one KV group: eager ones, and those that a CUDA graph captures and replays.

vLLM builds metadata for every step without saying whether the step then runs layer by layer or replays a graph. An
eager plan is therefore made by the first layer that runs. A replayed graph runs no layer's Python code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import ForwardBatch, Geometry, PlanError
from attnplug.host import ModelAttention, plan_forward
from attnplug_vllm.kv_group import GroupAttention


@dataclass(slots=True, eq=False)
class PlannedBatch:
    """A batch with its plan. ``captured``: a CUDA graph captures it."""

    attention: ModelAttention
    batch: ForwardBatch
    captured: bool = False
    _refilled_in_capture: bool | None = None

    def refill(self) -> None:
        """Run the captured part of planning before the first layer, once in the warm-up and once in the capture.

        vLLM may use the same metadata for both.
        """
        capturing = torch.cuda.is_current_stream_capturing()
        if self._refilled_in_capture is not capturing:
            self._refilled_in_capture = capturing
            self.attention.refill(self.batch)


class GroupPlanner:
    """Plans the batches of a KV group and keeps the captured ones, by a key for their shape.

    ``max_requests`` and ``max_tokens`` bound captured batches. Captures over caches that are no longer bound are
    dropped.
    """

    def __init__(self, group: GroupAttention, max_requests: int, max_tokens: int) -> None:
        self.group = group
        self._max_sizes = max_requests, max_tokens
        self._batches: dict[tuple[int, ...], ForwardBatch] = {}
        self._attention: ModelAttention | None = None
        """The attention that ``_batches`` were captured with."""

    def plan(self, geometry: Geometry) -> PlannedBatch:
        """Plan a batch that runs without a graph."""
        attention, batch = self.group.ready(), ForwardBatch(geometry)
        plan_forward(attention.backend, batch)
        return PlannedBatch(attention, batch)

    def capture(self, key: tuple[int, ...], geometry: Geometry) -> PlannedBatch:
        """Plan a batch that a graph is about to capture. Every replay reads the geometry's tensors at their addresses.

        Raises :class:`PlanError` if the backend needs padded requests with a length: vLLM's have length 0.
        """
        attention, batch = self.group.ready(), ForwardBatch(geometry)
        if attention is not self._attention:
            attention.reserve(*self._max_sizes)
            if (length := attention.padding_length()) != 0:
                raise PlanError(
                    f"backend {attention.backend.backend_id.name} needs padded requests of length {length} in CUDA "
                    "graphs, but vLLM gives them length 0; use --compilation-config.cudagraph_mode PIECEWISE"
                )
            self._attention, self._batches = attention, {}
        attention.capture(batch, in_capture=True)
        self._batches[key] = batch
        return PlannedBatch(attention, batch, captured=True)

    def replay(
        self, key: tuple[int, ...], seq_lens: Tensor, block_table: Tensor, slot_mapping: Tensor | None = None
    ) -> None:
        """Plan a replay if a batch with this key was captured. vLLM may still run the step without the graph.

        Captured kernels read vLLM's tensors at the captured addresses. Tensors elsewhere are copied there.
        """
        batch = self._batches.get(key)
        if batch is None or (attention := self.group.ready()) is not self._attention:
            return
        geometry = batch.geometry
        if seq_lens.data_ptr() != geometry.seq_lens.data_ptr():
            geometry.seq_lens.copy_(seq_lens[: geometry.requests])
        table, slots = geometry.page_table, geometry.slots
        if block_table.data_ptr() != table.data_ptr():
            table.copy_(block_table[:, : table.shape[1]])
        if slots is not None and slot_mapping is not None and slot_mapping.data_ptr() != slots.data_ptr():
            slots.copy_(slot_mapping[: slots.shape[0]])
        attention.capture(batch)
