"""Linear attention on CUDA: long spans by flash-linear-attention's chunk kernels, short ones in place by our own.

The library's recurrent kernels serve contiguous states, one per request of the batch. Ours take the states where they
lie in the pool, know padded requests, and run all kinds of layer; see ``triton_recurrence``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attnplug import (
    BackendContext,
    BackendId,
    Captures,
    Claims,
    ForwardBatch,
    ForwardMode,
    Geometry,
    GraphLevel,
    GraphLimits,
    LayerSpec,
    LinearInputs,
    Plan,
)
from attnplug_hybrid_linear.fla_kernels import CHUNK, ChunkKernels, Chunks, FlaKernels
from attnplug_hybrid_linear.spans import Blocks, Spans, cut, plan_spans
from attnplug_hybrid_linear.states import States, check_accepted, nothing_to_commit, slots_of
from attnplug_hybrid_linear.triton_convolution import convolve_in_place, keep_newest
from attnplug_hybrid_linear.triton_recurrence import advance_in_place, clear_padded, put_states

FEW_TOKENS = 16
"""Up to as many per request, one after the other is faster than by chunks."""


@dataclass(slots=True, eq=False)
class Verified:
    """What a target verify keeps for its commit, by layer id, and whether it was committed."""

    inputs: dict[int, LinearInputs] = field(default_factory=dict)
    conv_rows: dict[int, Tensor] = field(default_factory=dict)
    committed: bool = False

    @property
    def due(self) -> bool:
        return not self.committed and bool(self.inputs or self.conv_rows)

    def clear(self) -> None:
        self.inputs.clear()
        self.conv_rows.clear()


@dataclass(frozen=True, slots=True, eq=False)
class FlaMetadata:
    """The spans of a batch, in blocks where one is long, and as the library wants them where it is to run them.

    ``verified`` is there for a target verify, and filled as its layers run. What a captured one holds is filled again
    by every replay, so it stays.
    """

    spans: Spans
    blocks: Blocks | None
    chunks: Chunks | None
    verified: Verified | None
    captured: bool

    @classmethod
    def of(cls, query_lens: Sequence[int], state_slots: Tensor, *, verify: bool, captured: bool = False) -> FlaMetadata:
        spans = plan_spans(query_lens, state_slots)
        blocks = cut(query_lens, CHUNK, state_slots.device) if spans.longest > FEW_TOKENS else None
        chunks = None if blocks is None or verify else Chunks.of(query_lens, blocks, spans.slots)
        return cls(spans, blocks, chunks, Verified() if verify else None, captured)


class FlaLinearBackend:
    """GDN, KDA, Lightning, Mamba2 and short convolutions. Holds the pool of states and nothing of any eager batch."""

    claims = Claims(cuda_graph=GraphLevel.UNIFORM)

    def __init__(self, context: BackendContext, kernels: ChunkKernels | None = None) -> None:
        self.backend_id = BackendId(context.name)
        self._page_size = context.page_size
        self._states = States(context)
        self._kernels = FlaKernels() if kernels is None else kernels
        self._captures: Captures[Plan] = Captures(self.backend_id)

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan:
        geometry = Geometry.of(batch, self._page_size)
        lens, slots = geometry.query_lens, slots_of(batch)
        verify = batch.forward_mode is ForwardMode.TARGET_VERIFY
        metadata = FlaMetadata.of(lens, slots, verify=verify)
        return Plan(self.backend_id, batch.forward_mode, geometry.query_rows, geometry.kv_rows, metadata)

    # ---- CUDA graphs ----

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing to reserve: what captured kernels read are the batch's own state slots, and lengths that stay."""
        self._captures.reserve(GraphLimits(max_bs, max_num_tokens))

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> Plan:
        plan = self._captures.find(forward_batch, in_capture, self._capture)
        metadata: FlaMetadata = plan.metadata
        if metadata.verified is not None:
            metadata.verified.committed = False  # the replay that follows fills it again
        return plan

    def _capture(self, batch: ForwardBatch) -> Plan:
        mode, requests, tokens = batch.forward_mode, batch.batch_size, batch.num_tokens
        lens = [tokens // requests] * requests
        metadata = FlaMetadata.of(lens, slots_of(batch), verify=mode is ForwardMode.TARGET_VERIFY, captured=True)
        return Plan(self.backend_id, mode, tokens, None, metadata)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Nothing: where states lie is read from the batch by every captured kernel itself."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 0

    # ---- layers ----

    def forward_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, layer: LayerSpec, batch: ForwardBatch, silu: bool
    ) -> Tensor:
        metadata: FlaMetadata = batch.plan_for(self.backend_id, x.shape[0]).metadata
        spans, verified = metadata.spans, metadata.verified
        out = _output(x, spans)
        states = self._states.conv(layer.layer_id)
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
        states = self._states.recurrent(layer.layer_id)
        advance_in_place(inputs, layer.scale, spans, states, out=out, store=verified is None)
        if verified is not None:
            verified.inputs[layer.layer_id] = _own(inputs)
        return out

    def _by_chunks(self, inputs: LinearInputs, layer: LayerSpec, spans: Spans, chunks: Chunks) -> Tensor:
        states = self._states.recurrent(layer.layer_id)
        before = states.index_select(0, chunks.slots)
        out, after = self._kernels.chunked(inputs, layer.scale, chunks, before)
        put_states(states, spans, after)
        clear_padded(out, spans)
        padding = inputs.v.shape[0] - spans.rows
        return out if not padding else torch.cat([out, out.new_zeros(padding, *out.shape[1:])])

    def commit_states(self, forward_batch: ForwardBatch, accepted: Tensor) -> None:
        check_accepted(forward_batch, accepted)
        metadata: FlaMetadata = forward_batch.plan_for(self.backend_id, forward_batch.num_tokens).metadata
        if forward_batch.forward_mode is ForwardMode.IDLE:
            return
        verified = metadata.verified
        if verified is None or not verified.due:
            raise nothing_to_commit(forward_batch.forward_mode)
        spans = metadata.spans.first(accepted.to(metadata.spans.lens.device, non_blocking=True))
        for layer_id, inputs in verified.inputs.items():
            advance_in_place(inputs, 1.0, spans, self._states.recurrent(layer_id), out=None, store=True)
        for layer_id, rows in verified.conv_rows.items():
            keep_newest(rows, spans, self._states.conv(layer_id))
        verified.committed = True
        if not metadata.captured:
            verified.clear()


def _output(like: Tensor, spans: Spans) -> Tensor:
    """Memory for the spans' rows, with zeros behind them."""
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    if spans.rows < out.shape[0]:
        out[spans.rows :] = 0
    return out


def _own(inputs: LinearInputs) -> LinearInputs:
    """The inputs in memory of their own: whoever keeps them need not care what the model does to its."""
    beta = None if inputs.beta is None else inputs.beta.clone()
    q, k, v, decay = (tensor.clone() for tensor in (inputs.q, inputs.k, inputs.v, inputs.log_decay))
    return replace(inputs, q=q, k=k, v=v, log_decay=decay, beta=beta)
