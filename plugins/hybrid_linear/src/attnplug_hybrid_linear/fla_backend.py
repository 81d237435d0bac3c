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

from attnplug import BackendContext, ForwardBatch, Geometry, LayerSpec, LinearInputs, Plan, PlanError
from attnplug_hybrid_linear.fla_kernels import CHUNK, ChunkKernels, Chunks, FlaKernels
from attnplug_hybrid_linear.spans import Blocks, Spans, cut, plan_spans
from attnplug_hybrid_linear.states import LinearMetadata, StateBackend, Verified
from attnplug_hybrid_linear.triton_convolution import convolve_in_place, keep_newest
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

    def metadata(self, query_lens: Sequence[int], state_slots: Tensor, verified: Verified | None) -> FlaMetadata:
        spans = plan_spans(query_lens, state_slots)
        blocks = cut(query_lens, CHUNK, state_slots.device) if spans.longest > FEW_TOKENS else None
        chunks = None if blocks is None or verified is not None else Chunks.of(query_lens, blocks, spans.slots)
        return FlaMetadata(verified, spans, blocks, chunks)

    def capture(self, geometry: Geometry, memory: Any) -> Plan:
        return self.plan_of(geometry, [geometry.rows // geometry.requests] * geometry.requests, captured=True)

    def refill(self, plan: Plan, geometry: Geometry) -> None:
        """Nothing to make: captured kernels read the state slots of the batch that was captured first."""
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
        out = _output(x, spans)
        states = self.conv(layer.layer_id)
        convolve_in_place(x, weight, bias, spans, metadata.blocks, states, out, silu=silu, store=verified is None)
        if verified is not None:
            verified.conv_rows[layer.layer_id] = x.clone()
        return out

    def forward_linear(self, inputs: LinearInputs, layer: LayerSpec, batch: ForwardBatch) -> Tensor:
        v = inputs.v
        metadata: FlaMetadata = batch.plan_for(self.backend_id, v.shape[0]).metadata
        spans, verified = metadata.spans, metadata.verified
        if metadata.chunks is not None:
            return self._by_chunks(inputs, layer, spans, metadata.chunks)
        out = _output(v, spans)
        states = self.recurrent(layer.layer_id)
        advance_in_place(inputs, layer.scale, spans, states, out=out, store=verified is None)
        if verified is not None:
            verified.inputs[layer.layer_id] = _own(inputs)
        return out

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


def _output(like: Tensor, spans: Spans) -> Tensor:
    """Memory for the spans' rows, with zeros after them."""
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    if spans.rows < out.shape[0]:
        out[spans.rows :] = 0
    return out


def _own(inputs: LinearInputs) -> LinearInputs:
    """A copy of the inputs, to be kept: the model may overwrite its own."""
    beta = None if inputs.beta is None else inputs.beta.clone()
    q, k, v, decay = (tensor.clone() for tensor in (inputs.q, inputs.k, inputs.v, inputs.log_decay))
    return replace(inputs, q=q, k=k, v=v, log_decay=decay, beta=beta)
