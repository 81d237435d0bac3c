"""Model runner: builds pools and backend for a model, and runs its steps."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from operator import add
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from attnplug import BackendError, ExtendPath, ForwardBatch, ForwardMode, Geometry, Serving
from attnplug.contract.batch import apply_skip_attn_backend_init
from attnplug.host import (
    AttnplugError,
    ExtendPolicy,
    ForwardingBackend,
    HostContext,
    HostLengths,
    Limits,
    ModelAttention,
    Parallel,
    Selection,
    TypicalLens,
    WorkspaceOwner,
    build_selection,
)
from attnplug.kernels import to_device
from attnplug_engine.execution.backend_usage import BackendUsage
from attnplug_engine.execution.extend_times import ExtendTimes
from attnplug_engine.execution.in_flight import StepInFlight, fill_pending_tokens
from attnplug_engine.execution.invariant_attention import InvariantAttention
from attnplug_engine.execution.sampler import Sampler
from attnplug_engine.execution.step_output import StepOutput
from attnplug_engine.execution.two_batch import LANES, TwoBatch
from attnplug_engine.kernels.invariant import arithmetic
from attnplug_engine.memory.capacity import Capacity
from attnplug_engine.memory.pools import build_coordinator, build_pools
from attnplug_engine.models.decoder import LoadedModel, kv_scales
from attnplug_engine.parallel.collectives import SINGLE, TensorParallel
from attnplug_engine.scheduling.slot_table import build_table
from attnplug_engine.scheduling.state_allocator import StateAllocator
from attnplug_engine.scheduling.step import PENDING, Step

_REPLANNED = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY)
"""Modes of batches that are planned before they are padded, and may be planned again afterwards (B1)."""


class NotFinite(AttnplugError):
    """A layer produced NaN or infinity. ``layer_id`` is the first such layer."""

    def __init__(self, layer_id: int) -> None:
        self.layer_id = layer_id
        super().__init__(f"the output of layer {layer_id} is not finite: it is the first layer with NaN or infinity")


class Phase(StrEnum):
    """Phases of a runner, in their only order."""

    BUILD = "build"
    WARM_UP = "warm up"
    CAPTURE = "capture"
    SERVE = "serve"


class ReplayedStep(NamedTuple):
    """A step that a captured graph ran."""

    batch: ForwardBatch
    logits: Tensor
    """``[requests, vocab]``, padded requests included. Valid until the next replay."""
    sampled: Tensor
    """Tokens ``[sampled requests]`` on the device. Valid until the next replay."""
    output: StepOutput | None
    """The tokens on the host, if the graph itself writes them there."""


class StepGraphs(Protocol):
    """Captured steps of a model, as the runner calls them."""

    def replay(self, step: Step, sampler: Sampler) -> ReplayedStep | None:
        """Replay the graph that fits a step. Return None if there is none: the step then runs eagerly."""
        ...


class ModelRunner:
    """A model with its pools and its backend. Runs one step at a time, as the scheduler decides.

    Construction order is the only one that the types allow: pools, then the coordinator, then backends, which capture
    both. ``serving`` describes the steps to the backends; what ``policy`` implies for it is filled in here. Batches
    carry exact lengths on the host only if the backend needs them, or if they decide the path of an MLA extend.

    All device work is on one stream, in the order of the calls. ``tokens [requests + 1]`` on the device holds the last
    token of each row of the slot table, so that a step can be launched before the host knows its tokens.
    """

    def __init__(
        self,
        model: LoadedModel,
        selection: Selection,
        capacity: Capacity,
        *,
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: str,
        index_dtype: str | None = None,
        parallel: TensorParallel = SINGLE,
        policy: ExtendPolicy | None = None,
        serving: Serving | None = None,
        check_layers: bool = False,
        seed: int = 0,
        two_batch_overlap: bool = False,
    ) -> None:
        policy = policy or ExtendPolicy()
        serving = replace(serving or Serving(), disable_chunked_prefix_cache=policy.disable_chunked_prefix_cache)
        self.model, self.spec, self.capacity, self.device = model.module, model.spec, capacity, device
        hot = capacity.hot_buffer > 0
        self.pools = build_pools(
            model.spec, capacity, dtype, kv_dtype, device, index_dtype, scales=kv_scales(model.module), hot=hot
        )
        self.coordinator = build_coordinator(self.pools)
        """Brings rows from host memory, if they are kept there. Serves the target only; a draft's rows are on the
        device."""
        self.workspace = WorkspaceOwner()
        context = HostContext(
            model=model.spec,
            device=device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            page_size=capacity.page_size,
            limits=Limits(
                capacity.max_batch,
                capacity.max_rows,
                capacity.context_length + capacity.lookahead,
                lanes=LANES if two_batch_overlap else 1,
            ),
            pools=self.pools,
            workspace=self.workspace,
            parallel=Parallel(parallel.rank, parallel.size),
            serving=serving,
            coordinator=self.coordinator,
        )
        self.backend = build_selection(selection, context)
        attention = InvariantAttention if self.model.batch_invariant else ModelAttention
        self.attention = attention(self.backend, self.pools, policy)
        claims = self.backend.claims
        chooses_path = self.pools.mla is not None and claims.mla_extend != {ExtendPath.ABSORBED}
        self._exact_decode = claims.needs_cpu_seq_lens
        self._exact_extend = claims.needs_cpu_seq_lens or chooses_path or two_batch_overlap
        self._two_batch = TwoBatch(self.model, self.attention, device) if two_batch_overlap else None
        self.allocator, self.table = build_table(capacity, device)
        self.states = None if self.pools.linear is None else StateAllocator(self.pools.linear)
        self.tokens = torch.zeros(capacity.max_batch + 1, dtype=torch.int64, device=device)
        self.sampler = Sampler(seed)
        self.graphs: StepGraphs | None = None
        self.extend_times: ExtendTimes | None = None
        """Measured times of extends, by which captured and eager ones are compared."""
        self.backend_usage = BackendUsage(shared=isinstance(self.backend, ForwardingBackend))
        self.phase = Phase.BUILD
        self.dtype, self.parallel = dtype, parallel
        if check_layers:
            self._check_every_layer()

    def enter(self, phase: Phase, instead: str = "") -> None:
        """Go to the next phase. ``instead`` is the advice in the error raised if ``phase`` is not the next one."""
        order = list(Phase)
        if order.index(phase) != order.index(self.phase) + 1:
            raise BackendError(f"a runner in phase {self.phase} cannot go to phase {phase}; {instead}")
        self.phase = phase

    @torch.inference_mode()
    def launch(self, step: Step) -> StepInFlight:
        """Launch a step on the device without waiting for it."""
        self.phase = Phase.SERVE
        if step.copies:
            self.pools.copy_pages(step.copies)
        replayed = None if self.graphs is None else self.graphs.replay(step, self.sampler)
        if replayed is not None:
            batch, logits, sampled, output = replayed
            self.backend_usage.add(batch)
        else:
            (logits, sampled), output = self._eager(step), None
        with arithmetic(self.model.batch_invariant):
            in_flight = StepInFlight(step, logits, sampled, output, replayed=replayed is not None)
        if step.snapshots and self.pools.linear is not None:
            for source, target in step.snapshots:
                self.pools.linear.copy(source, target)
        return in_flight

    def _eager(self, step: Step) -> tuple[Tensor, Tensor]:
        """Return logits ``[sampled, vocab]`` and tokens ``[sampled]`` of the step's sampled rows, in their order."""
        hidden = self.run_model(self.batch(step))
        if not step.mode.is_decode:  # a decode step samples every row
            hidden = hidden[to_device(step.sampled_rows, self.device)]
        logits = self.model.logits(hidden)
        requests = step.sampled_requests
        if not requests:
            return logits, self.tokens[:0]
        positions = [
            entry.position + len(entry.token_ids) - len(entry.request.prompt) for entry in step.entries if entry.sampled
        ]
        with arithmetic(self.model.batch_invariant):
            sampled = self.sampler.sample(logits, requests, positions)
        rows = [row for row, entry in zip(step.rows, step.entries, strict=True) if entry.sampled]
        # -1 stands for a token that could not be sampled. The next step's row is ignored, but still looks up its
        # embedding.
        self.tokens.index_copy_(0, to_device(rows, self.device), sampled.clamp(min=0))
        return logits, sampled

    @torch.inference_mode()
    def hidden_states(self, step: Step) -> Tensor:
        """Return hidden states ``[tokens, hidden]`` of a step, behind the last norm, entry by entry."""
        if step.copies:
            self.pools.copy_pages(step.copies)
        return self.run_model(self.batch(step))

    def prepare(self, step: Step) -> ForwardBatch:
        """Return the batch of a step, planned ahead of its forward and marked so (B2). Writes nothing to the cache.

        The batch is not split for two-batch overlap. It may be padded before it runs: decode and verify depend on
        nothing but their geometry, and are then planned again.
        """
        batch = self.batch(step)
        self.attention.plan(batch)
        batch.mark_forward_metadata_ready(replan_equivalent=step.mode in _REPLANNED)
        return batch

    def forward(self, batch: ForwardBatch, *, skip_attn_backend_init: bool | None = None) -> Tensor:
        """Return hidden states ``[tokens, hidden]``. Plans the batch unless it is marked as planned.

        ``skip_attn_backend_init`` is the old flag, kept for callers that have not moved to the marker (B3).
        """
        apply_skip_attn_backend_init(batch, skip_attn_backend_init)
        with torch.inference_mode():
            return self.run_model(batch)

    def run_model(self, batch: ForwardBatch) -> Tensor:
        """Return hidden states ``[tokens, hidden]``. The caller is in inference mode. Used by steps and captures."""
        assert batch.input_ids is not None and batch.positions is not None
        if self._two_batch is not None and (halves := self._two_batch.halves(batch)) is not None:
            self.backend_usage.add(*halves)
            with arithmetic(self.model.batch_invariant):
                return self._two_batch.forward(halves)
        with self.attention.running() as attention:
            attention.plan(batch)
            if not batch.geometry.captured:  # captured batches are counted when they are replayed
                self.backend_usage.add(batch)
            return self.model.forward(batch.input_ids, batch.positions, batch)

    def batch(self, step: Step) -> ForwardBatch:
        """Return the batch of a step, to be planned by its forward."""
        entries = step.entries
        tokens = [token for entry in entries for token in entry.token_ids]
        starts = [entry.position for entry in entries]
        if step.mode.is_decode:
            exact, counts, positions = self._exact_decode, [1] * len(entries), starts
        else:
            exact, counts = self._exact_extend, [len(entry.token_ids) for entry in entries]
            positions = [position for entry in entries for position in entry.positions]
        lengths, longest = list(map(add, starts, counts)), max(counts)
        uniform, typical = len(tokens) == longest * len(entries), TypicalLens.of(lengths)
        ids = to_device(tokens + positions, self.device)
        page_table, seq_lens = self.table.batch(step.rows)
        if self.capacity.lookahead:  # table rows then include lookahead rows
            seq_lens = to_device(lengths, self.device, np.int32)
        geometry = Geometry(
            step.mode,
            page_table,
            seq_lens,
            self.capacity.page_size,
            rows=len(tokens),
            max_seq_len=typical.longest,
            max_new=longest,
            new_lens=None if uniform else to_device(counts, self.device, np.int32),
            host=HostLengths(counts, lengths) if exact else None,
            state_slots=None if self.pools.linear is None else to_device(step.state_slots, self.device),
            table_rows=None if self.coordinator is None else to_device(step.rows, self.device),
            typical=typical,
        )
        if PENDING in tokens:
            fill_pending_tokens(ids, step, self.tokens)
        return ForwardBatch(geometry, ids[: len(tokens)], ids[len(tokens) :])

    def _check_every_layer(self) -> None:
        """Raise NotFinite at the first layer whose output is not finite (debugging)."""

        def checker(layer_id: int) -> None:
            def check(_module: object, _inputs: object, output: Tensor) -> None:
                if bool(torch.isfinite(output).logical_not().any()):  # false on tensors without values
                    raise NotFinite(layer_id)

            self.model.layers[layer_id].register_forward_hook(check)

        for layer_id in range(len(self.model.layers)):
            checker(layer_id)
