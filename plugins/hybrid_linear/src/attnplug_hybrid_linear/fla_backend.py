"""Linear attention on CUDA: long spans by flash-linear-attention's chunk kernels, short ones in place by our own.

The library's recurrent kernels need contiguous states, one per request of the batch. Ours work on the states in the
pool itself, support padded requests, and run all kinds of layer; see ``triton_recurrence``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnplug import BackendContext, ForwardBatch, Geometry, LayerSpec, Plan, PlanError
from attnplug.linear import DeltaInputs, LinearInputs
from attnplug_hybrid_linear.fla_kernels import CHUNK, ChunkKernels, Chunks, FlaKernels
from attnplug_hybrid_linear.plugin import COUNTERS
from attnplug_hybrid_linear.spans import Blocks, Spans, cut, plan_spans
from attnplug_hybrid_linear.states import LinearMetadata, StateBackend, Verified
from attnplug_hybrid_linear.triton_convolution import convolve_in_place, keep_newest
from attnplug_hybrid_linear.triton_delta import MOST_STATE, decode_delta
from attnplug_hybrid_linear.triton_recurrence import advance_in_place, clear_padded, put_states

FEW_TOKENS = 16
"""Up to this many tokens per request, going token by token is faster than by chunks."""


@dataclass(frozen=True, slots=True, eq=False)
class FlaMetadata(LinearMetadata):
    """A batch's spans: cut into blocks if one is long, and in the library's form if the library runs them."""

    spans: Spans
    blocks: Blocks | None
    chunks: Chunks | None


class FlaLinearBackend(StateBackend):
    """GDN, KDA, Lightning, Mamba2 and short convolutions.

    Captured kernels read the batch's own state slots, and lengths that do not change, so graphs need no further memory.
    """

    def __init__(self, context: BackendContext, kernels: ChunkKernels | None = None) -> None:
        super().__init__(context)
        self._kernels = FlaKernels() if kernels is None else kernels
        self._overlap = context.device.type == "cuda" and torch.cuda.get_device_capability(context.device) >= (9, 0)
        key_heads = (layer.linear.key_heads for layer in context.model.layers if layer.linear is not None)
        self._key_heads = max(key_heads, default=0)
        for lane in range(context.limits.lanes):
            self._counters(context.limits.max_requests, lane)

    def metadata(self, query_lens: Sequence[int], state_slots: Tensor, verified: Verified | None) -> FlaMetadata:
        spans = plan_spans(query_lens, state_slots)
        blocks = cut(query_lens, CHUNK, state_slots.device) if spans.longest > FEW_TOKENS else None
        chunks = None if blocks is None or verified is not None else Chunks.of(query_lens, blocks, spans.slots)
        return FlaMetadata(verified, spans, blocks, chunks)

    def capture(self, geometry: Geometry, memory: Any) -> Plan:
        self._counters(geometry.requests, geometry.lane)  # now, because the workspace may be frozen after this
        return self.plan_of(geometry, [geometry.rows // geometry.requests] * geometry.requests, captured=True)

    def refill(self, plan: Plan, geometry: Geometry) -> None:
        """Nothing to make: captured kernels read the state slots of the batch that was captured first."""
        if plan.metadata.verified is not None:
            plan.metadata.verified.committed = False  # a verify is warmed up before it is captured
        slots = geometry.state_slots
        if slots is None or slots.data_ptr() != plan.metadata.spans.slots.data_ptr():
            raise PlanError(
                f"a {geometry.mode} batch of {geometry.requests} requests was captured in lane {geometry.lane} with "
                "its state slots in other memory, which its kernels read directly; capture it in a lane of its own"
            )

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> Plan:
        plan = super().init_forward_metadata_out_graph(forward_batch, in_capture)
        metadata: FlaMetadata = plan.metadata
        if metadata.verified is not None:
            metadata.verified.committed = False  # the replay that follows fills it again
        return plan

    def forward_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, layer: LayerSpec, batch: ForwardBatch, silu: bool
    ) -> Tensor:
        metadata: FlaMetadata = batch.plan_for(self.backend_id, x.shape[0]).metadata
        spans, verified = metadata.spans, metadata.verified
        out = _output(x, spans, *x.shape[1:])
        states = self.conv(layer.layer_id)
        store, early = verified is None, self._overlap
        convolve_in_place(x, weight, bias, spans, metadata.blocks, states, out, silu=silu, store=store, overlap=early)
        if verified is not None:
            verified.conv_rows[layer.layer_id] = x.clone()
        return out

    def forward_linear(self, inputs: LinearInputs, layer: LayerSpec, batch: ForwardBatch) -> Tensor:
        v = inputs.v
        metadata: FlaMetadata = batch.plan_for(self.backend_id, v.shape[0]).metadata
        spans, verified = metadata.spans, metadata.verified
        if metadata.chunks is not None:
            return self._by_chunks(inputs, layer, spans, metadata.chunks)
        out = _output(v, spans, *v.shape[1:])
        states = self.recurrent(layer.layer_id)
        advance_in_place(inputs, layer.scale, spans, states, out=out, store=verified is None, overlap=self._overlap)
        if verified is not None:
            verified.inputs[layer.layer_id] = _own(inputs)
        return out

    def forward_delta(self, inputs: DeltaInputs, layer: LayerSpec, batch: ForwardBatch) -> Tensor | None:
        """A decode in one kernel; anything else by its parts."""
        rows = inputs.rows
        metadata: FlaMetadata = batch.plan_for(self.backend_id, rows.shape[0]).metadata
        spans, dims = metadata.spans, layer.linear
        assert dims is not None
        one_each = spans.longest == 1 and spans.numbers is None and metadata.verified is None
        if not one_each or dims.key_dim * dims.value_dim > MOST_STATE:
            return None
        out = _output(rows, spans, dims.heads * dims.value_dim)
        conv, states = self.conv(layer.layer_id), self.recurrent(layer.layer_id)
        counters = self._counters(spans.rows, batch.geometry.lane)
        decode_delta(inputs, layer.scale, dims.key_heads, spans, conv, states, counters, out, overlap=self._overlap)
        return out

    def _counters(self, requests: int, lane: int) -> Tensor:
        """A zero for every key head, int32: heads that share one count themselves there."""
        context, count = self.context, requests * self._key_heads
        memory = context.workspace.request(context.name, context.device, COUNTERS, 4 * max(count, 1), lane=lane)
        return memory.buffer.view(torch.int32)

    def _by_chunks(self, inputs: LinearInputs, layer: LayerSpec, spans: Spans, chunks: Chunks) -> Tensor:
        states = self.recurrent(layer.layer_id)
        before = states.index_select(0, chunks.slots)
        out, after = self._kernels.chunked(inputs, layer.scale, chunks, before)
        put_states(states, spans, after)
        clear_padded(out, spans)
        padding = inputs.v.shape[0] - spans.rows
        return out if not padding else torch.cat([out, out.new_zeros(padding, *out.shape[1:])])

    def commit(self, metadata: FlaMetadata, verified: Verified, accepted: Tensor) -> None:
        spans = metadata.spans.first(accepted)
        for layer_id, inputs in verified.inputs.items():
            advance_in_place(inputs, 1.0, spans, self.recurrent(layer_id), out=None, store=True)
        for layer_id, rows in verified.conv_rows.items():
            keep_newest(rows, spans, self.conv(layer_id))


def _output(like: Tensor, spans: Spans, *shape: int) -> Tensor:
    """Memory for rows of this shape, as many as ``like`` has, with zeros after those of the spans."""
    out = torch.empty((like.shape[0], *shape), dtype=like.dtype, device=like.device)
    if spans.rows < out.shape[0]:
        out[spans.rows :] = 0
    return out


def _own(inputs: LinearInputs) -> LinearInputs:
    """A copy of the inputs, to be kept: the model may overwrite its own."""
    beta = None if inputs.beta is None else inputs.beta.clone()
    q, k, v, decay = (tensor.clone() for tensor in (inputs.q, inputs.k, inputs.v, inputs.log_decay))
    return replace(inputs, q=q, k=k, v=v, log_decay=decay, beta=beta)
