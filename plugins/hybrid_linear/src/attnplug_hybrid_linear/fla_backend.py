"""The ``fla`` backend: long sequences by flash-linear-attention's chunk kernels, short ones by Triton kernels in place.

The library's recurrent kernels need a batch's states in contiguous memory. Ours update the states in the pool, support
padded requests, and run all layer kinds; see ``triton_recurrence``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnplug import BackendContext, ForwardBatch, Geometry, LayerSpec, Plan, PlanError
from attnplug.linear import DeltaInputs, LinearInputs
from attnplug_hybrid_linear.fla_kernels import CHUNK, ChunkKernels, FlaChunks, FlaKernels
from attnplug_hybrid_linear.plugin import COUNTERS
from attnplug_hybrid_linear.states import LinearMetadata, StateBackend, VerifyInputs, slots_of
from attnplug_hybrid_linear.triton_convolution import convolve_in_place, keep_newest
from attnplug_hybrid_linear.triton_delta import MAX_STATE, decode_delta
from attnplug_hybrid_linear.triton_recurrence import advance_in_place, clear_padded, put_states, take_states
from attnplug_hybrid_linear.varlen import CapturedVarlen, VarlenBatch, VarlenBlocks, plan_varlen, split_blocks

MAX_RECURRENT_TOKENS = 16
"""Maximum tokens per request for which the recurrent kernel is faster than the chunk kernels."""


@dataclass(frozen=True, slots=True, eq=False)
class FlaMetadata(LinearMetadata):
    """A plan's metadata. ``blocks`` is set if a sequence is long, ``chunks`` if the library runs ``chunked`` sequences,
    and ``refilled`` if the batch is a captured extend. ``short`` are the sequences before ``chunked``, if any."""

    varlen: VarlenBatch
    blocks: VarlenBlocks | None
    chunks: FlaChunks | None = None
    chunked: VarlenBatch | None = None
    short: VarlenBatch | None = None
    refilled: CapturedVarlen | None = None


class FlaLinearBackend(StateBackend):
    """GDN, KDA, Lightning, Mamba2 and short convolutions on CUDA.

    A mixed batch has its decodes first. They run token by token beside the library's chunks, where one token takes as
    long as 64 and its state is copied twice. A captured extend runs by chunks as a whole.

    Captured kernels of decode and verify read the batch's own state slots, and lengths that do not change. Captured
    extends have fixed memory in their plan, which the graph refills from ``new_lens`` and ``state_slots``. ``kernels``
    replaces the library in tests.

    If levels of invariance beyond ``run`` are requested, all batches run token by token, on one configuration. The
    library's chunks begin with a batch's first new row, so they depend on how a prompt was split; and its kernels are
    tuned when they are first used.
    """

    def __init__(self, context: BackendContext, kernels: ChunkKernels | None = None) -> None:
        super().__init__(context)
        self._invariant = bool(context.invariant - {"run"})
        self._kernels = FlaKernels() if kernels is None else kernels
        self._overlap = context.device.type == "cuda" and torch.cuda.get_device_capability(context.device) >= (9, 0)
        key_heads = (layer.linear.key_heads for layer in context.model.layers if layer.linear is not None)
        self._key_heads = max(key_heads, default=0)
        for lane in range(context.limits.lanes):
            self._counters(context.limits.max_requests, lane)

    def metadata(self, query_lens: Sequence[int], state_slots: Tensor, verified: VerifyInputs | None) -> FlaMetadata:
        varlen = plan_varlen(query_lens, state_slots)
        blocks = split_blocks(query_lens, CHUNK, state_slots.device) if varlen.longest > MAX_RECURRENT_TOKENS else None
        if blocks is None or verified is not None or self._invariant:
            return FlaMetadata(verified, varlen, blocks)
        lens = [tokens for tokens in query_lens if tokens]
        first = next(number for number, tokens in enumerate(lens) if tokens > MAX_RECURRENT_TOKENS)
        short, chunked = varlen.divide(first, sum(lens[:first]))
        long = lens[first:]
        chunks = FlaChunks.of(long, split_blocks(long, CHUNK, state_slots.device) if first else blocks)
        return FlaMetadata(verified, varlen, blocks, chunks, chunked, short if first else None)

    def capture(self, geometry: Geometry, memory: Any) -> Plan:
        if geometry.new_lens is not None:
            return self._capture_extend(geometry)
        self._counters(geometry.requests, geometry.lane)  # now: the workspace may be frozen later
        return self.plan_of(geometry, [geometry.rows // geometry.requests] * geometry.requests, captured=True)

    def _capture_extend(self, geometry: Geometry) -> Plan:
        varlen = CapturedVarlen(geometry.requests, geometry.rows, CHUNK, geometry.device)
        short = geometry.rows <= MAX_RECURRENT_TOKENS
        blocks = None if short else varlen.blocks
        chunks = None if short or self._invariant else FlaChunks.captured(varlen)
        metadata = FlaMetadata(None, varlen.batch, blocks, chunks, varlen.batch, refilled=varlen)
        return Plan.of(self.backend_id, geometry, metadata)

    def refill(self, plan: Plan, geometry: Geometry) -> None:
        """Update the lengths and slots of a captured extend. Of other batches, check that they have the state slots'
        memory that was captured; there is nothing to fill."""
        metadata: FlaMetadata = plan.metadata
        if metadata.refilled is not None:
            assert geometry.new_lens is not None
            metadata.refilled.refill(geometry.new_lens, slots_of(geometry))
            if metadata.chunks is not None:
                metadata.chunks.renew()
            return
        if plan.metadata.verified is not None:
            plan.metadata.verified.committed = False  # a warm-up precedes the capture
        slots = geometry.state_slots
        if slots is None or slots.data_ptr() != plan.metadata.varlen.slots.data_ptr():
            raise PlanError(
                f"a {geometry.mode} batch of {geometry.requests} requests was captured in lane {geometry.lane} with "
                "other state slots, which its kernels read directly; capture it in a lane of its own"
            )

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> Plan:
        plan = super().init_forward_metadata_out_graph(forward_batch, in_capture)
        metadata: FlaMetadata = plan.metadata
        if metadata.verified is not None:
            metadata.verified.committed = False  # the replay that follows refills it
        return plan

    def forward_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, layer: LayerSpec, batch: ForwardBatch, silu: bool
    ) -> Tensor:
        metadata: FlaMetadata = batch.plan_for(self.backend_id, x.shape[0]).metadata
        varlen, verified = metadata.varlen, metadata.verified
        out = _output(x, varlen, *x.shape[1:])
        states = self.conv(layer.layer_id)
        store, early = verified is None, self._overlap
        convolve_in_place(x, weight, bias, varlen, metadata.blocks, states, out, silu=silu, store=store, overlap=early)
        if verified is not None:
            verified.conv_rows[layer.layer_id] = x.clone()
        return out

    def forward_linear(self, inputs: LinearInputs, layer: LayerSpec, batch: ForwardBatch) -> Tensor:
        v = inputs.v
        metadata: FlaMetadata = batch.plan_for(self.backend_id, v.shape[0]).metadata
        varlen, verified = metadata.varlen, metadata.verified
        if metadata.chunks is not None:
            return self._by_chunks(inputs, layer, metadata, metadata.chunks)
        out = _output(v, varlen, *v.shape[1:])
        states = self.recurrent(layer.layer_id)
        advance_in_place(
            inputs,
            layer.scale,
            varlen,
            states,
            out=out,
            store=verified is None,
            overlap=self._overlap,
            invariant=self._invariant,
        )
        if verified is not None:
            verified.inputs[layer.layer_id] = _clone(inputs)
        return out

    def forward_delta(self, inputs: DeltaInputs, layer: LayerSpec, batch: ForwardBatch) -> Tensor | None:
        """Run a decode of a delta-rule layer in one kernel. Returns ``None`` for other batches, and if levels of
        invariance are requested: other batches have no such kernel, and must give the same bits."""
        if self._invariant:
            return None
        rows = inputs.rows
        metadata: FlaMetadata = batch.plan_for(self.backend_id, rows.shape[0]).metadata
        varlen, dims = metadata.varlen, layer.linear
        assert dims is not None
        one_each = varlen.longest == 1 and varlen.numbers is None and metadata.verified is None
        if not one_each or varlen.captured or dims.key_dim * dims.value_dim > MAX_STATE:
            return None
        out = _output(rows, varlen, dims.heads * dims.value_dim)
        conv, states = self.conv(layer.layer_id), self.recurrent(layer.layer_id)
        counters = self._counters(varlen.rows, batch.geometry.lane)
        decode_delta(inputs, layer.scale, dims.key_heads, varlen, conv, states, counters, out, overlap=self._overlap)
        return out

    def _counters(self, requests: int, lane: int) -> Tensor:
        """Return arrival counters, one zeroed int32 per request and key head, for the heads that share it."""
        context, count = self.context, requests * self._key_heads
        memory = context.workspace.request(context.name, context.device, COUNTERS, 4 * max(count, 1), lane=lane)
        return memory.buffer.view(torch.int32)

    def _by_chunks(self, inputs: LinearInputs, layer: LayerSpec, metadata: FlaMetadata, chunks: FlaChunks) -> Tensor:
        states, chunked, short = self.recurrent(layer.layer_id), metadata.chunked, metadata.short
        assert chunked is not None
        long = inputs if short is None else _from_row(inputs, short.rows)
        out, after = self._kernels.chunked(long, layer.scale, chunks, take_states(states, chunked))
        put_states(states, chunked, after)
        parts = [out]
        if short is not None:
            first = out.new_empty(short.rows, *out.shape[1:])
            advance_in_place(inputs, layer.scale, short, states, out=first, store=True, overlap=self._overlap)
            parts.insert(0, first)
        if padding := inputs.v.shape[0] - metadata.varlen.rows:
            parts.append(out.new_zeros(padding, *out.shape[1:]))
        out = torch.cat(parts) if len(parts) > 1 else out
        clear_padded(out, chunked)
        return out

    def commit(self, metadata: FlaMetadata, verified: VerifyInputs, accepted: Tensor) -> None:
        varlen = metadata.varlen.first(accepted)
        for layer_id, inputs in verified.inputs.items():
            states = self.recurrent(layer_id)
            advance_in_place(inputs, 1.0, varlen, states, out=None, store=True, invariant=self._invariant)
        for layer_id, rows in verified.conv_rows.items():
            keep_newest(rows, varlen, self.conv(layer_id))


def _output(like: Tensor, varlen: VarlenBatch, *shape: int) -> Tensor:
    """Allocate as many rows of ``shape`` as ``like`` has. Rows behind the batch's last one are zero."""
    out = torch.empty((like.shape[0], *shape), dtype=like.dtype, device=like.device)
    if varlen.rows < out.shape[0]:
        out[varlen.rows :] = 0
    return out


def _from_row(inputs: LinearInputs, first: int) -> LinearInputs:
    """Return the inputs of rows ``first`` and following."""
    q, k, v = (tensor[first:] for tensor in (inputs.q, inputs.k, inputs.v))
    decay = inputs.log_decay if inputs.log_decay.dim() == 1 else inputs.log_decay[first:]  # [heads]: for all tokens
    return replace(inputs, q=q, k=k, v=v, log_decay=decay, beta=None if inputs.beta is None else inputs.beta[first:])


def _clone(inputs: LinearInputs) -> LinearInputs:
    """Copy the inputs. A verify keeps them, and the model may overwrite its own."""
    beta = None if inputs.beta is None else inputs.beta.clone()
    q, k, v, decay = (tensor.clone() for tensor in (inputs.q, inputs.k, inputs.v, inputs.log_decay))
    return replace(inputs, q=q, k=k, v=v, log_decay=decay, beta=beta)
