"""One step of a model: pools, backend and batch brought together, captured where that is possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from operator import add

import numpy as np
import torch
from torch import Tensor

from attnplug import (
    BackendError,
    DType,
    ExtendPath,
    ForwardBatch,
    ForwardingBackend,
    ForwardMode,
    Geometry,
    GraphLevel,
    PoolError,
    Serving,
)
from attnplug.host import (
    AttnplugError,
    ExtendPolicy,
    HostContext,
    HostLengths,
    Limits,
    ModelAttention,
    Parallel,
    Selection,
    TypicalLens,
    WorkspaceOwner,
    apply_skip_attn_backend_init,
    build_selection,
)
from attnplug.kernels import to_device
from attnplug_engine.capture import Capture
from attnplug_engine.capture_check import CaptureCheck
from attnplug_engine.graphs import CapturedStep, DecodeGraphs
from attnplug_engine.inputs import put_newest
from attnplug_engine.launched import Launched
from attnplug_engine.letters import Delivery
from attnplug_engine.models.architectures import LoadedModel
from attnplug_engine.parallel import SINGLE, TensorParallel
from attnplug_engine.pools import Capacity, build_coordinator, build_pools, build_table
from attnplug_engine.prefill_graphs import PrefillGraphs
from attnplug_engine.request import PENDING, Step
from attnplug_engine.sampler import Sampler
from attnplug_engine.served import Served
from attnplug_engine.two_batch import LANES, TwoBatch

_REPLANNED = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY)
"""Modes of batches that are planned before they are padded, and may be planned again after (B1)."""


class NotFinite(AttnplugError):
    """A layer produced NaN or infinity. ``layer_id`` is the first that did."""

    def __init__(self, layer_id: int) -> None:
        self.layer_id = layer_id
        super().__init__(f"the output of layer {layer_id} is not finite: it is the first layer with NaN or infinity")


class Phase(StrEnum):
    """How far a runner is. Each phase follows the one before it, and none comes back."""

    BUILD = "build"
    WARM_UP = "warm up"
    CAPTURE = "capture"
    SERVE = "serve"


class ModelRunner:
    """A model with its pools and its backend; runs one step at a time, for whoever schedules.

    Built in the only order that types allow: pools, then the coordinator, then backends, which capture both.
    ``serving`` tells them how steps will be made; what ``policy`` decides of it is filled in here. Batches have
    exact lengths on the host only if the backend needs them, or if they decide the path of an MLA extend.

    All device work is on one stream, in the order of the calls. ``tokens`` ``[requests + 1]`` on the device is the last
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
        kv_dtype: DType,
        index_dtype: DType | None = None,
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
        self.pools = build_pools(model.spec, capacity, dtype, kv_dtype, device, index_dtype, hot=hot)
        self.coordinator = build_coordinator(self.pools)
        """What brings rows from host memory, if they are there. There is one; a draft's rows are on the device."""
        self.workspace = WorkspaceOwner()
        context = HostContext(
            model=model.spec,
            device=device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            page_size=capacity.page_size,
            limits=Limits(
                capacity.max_batch,
                capacity.most_rows,
                capacity.context_length + capacity.spare,
                lanes=LANES if two_batch_overlap else 1,
            ),
            pools=self.pools,
            workspace=self.workspace,
            parallel=Parallel(parallel.rank, parallel.size),
            serving=serving,
            coordinator=self.coordinator,
        )
        self.backend = build_selection(selection, context)
        self.attention = ModelAttention(self.backend, self.pools, policy)
        claims = self.backend.claims
        chooses_path = self.pools.mla is not None and claims.mla_extend != {ExtendPath.ABSORBED}
        self._exact_decode = claims.needs_cpu_seq_lens
        self._exact_extend = claims.needs_cpu_seq_lens or chooses_path or two_batch_overlap
        self._two_batch = TwoBatch(self.model, self.attention, device) if two_batch_overlap else None
        self.allocator, self.table = build_table(capacity, device)
        self.tokens = torch.zeros(capacity.max_batch + 1, dtype=torch.int64, device=device)
        self.sampler = Sampler(seed)
        self.graphs: DecodeGraphs | None = None
        self.prefill_graphs: PrefillGraphs | None = None
        self.served = Served(shared=isinstance(self.backend, ForwardingBackend))
        self.phase = Phase.BUILD
        self.dtype, self._parallel = dtype, parallel
        if check_layers:
            self._check_every_layer()

    # Capturing

    @torch.inference_mode()
    def capture(
        self,
        sizes: Sequence[int],
        capture: Capture,
        progress: Callable[[int, int], None] | None = None,
        *,
        prefills: Sequence[int] = (),
        keep_all: bool = True,
    ) -> DecodeGraphs:
        """Capture steps of ``prefills`` tokens, and decode steps of these batch sizes, the largest first, so that the
        others reuse its memory. Of prefills only those that pay are kept, unless all are to be.

        Each is compared with eager attention before it is trusted. From here on the workspace does not grow.
        """
        self.enter(Phase.WARM_UP, "capture graphs once, before the first step")
        held = (self.attention, self.table, self.tokens, self.capacity)
        graphs = DecodeGraphs(
            lambda batch: self.model.logits(self._forward(batch)),
            *held,
            largest=max(sizes),
            has_states=self.pools.linear is not None,
        )
        ahead = None
        if prefills:
            ahead = PrefillGraphs(
                lambda batch, rows: self.model.logits(self._forward(batch).index_select(0, rows)),
                *held,
                largest=max(prefills),
                slower=None if self.attention.graph_level is GraphLevel.ALWAYS else self.spec,
                least=None if keep_all else self._least_of_ranks,
            )
        check = CaptureCheck(
            self.spec, self.attention, self.pools, self.allocator, self.dtype, self.device, self.coordinator
        )
        todo: list[tuple[DecodeGraphs | PrefillGraphs, int]] = []
        if ahead is not None:
            todo += [(ahead, size) for size in sorted(prefills, reverse=True)]
        todo += [(graphs, size) for size in sorted(sizes, reverse=True)]
        making, size = todo[0]
        try:
            graphs.reserve(self.allocator, *(() if ahead is None else (ahead.requests, ahead.largest)))
            self.enter(Phase.CAPTURE)
            for done, (making, size) in enumerate(todo, 1):
                try:
                    for captured in making.capture(size, capture):
                        check.run(captured.batch, capture)
                except torch.OutOfMemoryError:
                    if isinstance(making, DecodeGraphs) or keep_all or self._parallel.size > 1:
                        raise
                    making.drop(size)  # nobody asked for it
                if progress is not None:
                    progress(done, len(todo))
        except torch.OutOfMemoryError as error:
            raise self.no_memory(size, making.sizes, prefill=making is ahead) from error
        self.workspace.freeze()
        self.graphs, self.prefill_graphs = graphs, ahead if ahead is not None and ahead.sizes else None
        self.enter(Phase.SERVE)
        return graphs

    def _least_of_ranks(self, mine: float) -> float:
        """Ranks run the same steps, so what they measure is one number for all."""
        return float(self._parallel.all_gather(torch.tensor([mine], device=self.device), 0).min())

    def no_memory(self, size: int, done: Sequence[int], *, prefill: bool = False) -> PoolError:
        """Of a graph of so many requests, or tokens, after those that are ``done``."""
        free, total = torch.cuda.mem_get_info(self.device)
        caches = self.pools.nbytes - (0 if self.coordinator is None else self.coordinator.host_nbytes)
        larger = f" after those of {', '.join(map(str, reversed(done)))}" if done else ""
        what, sizes, off = "requests", "cuda_graph_batch_sizes", "disable_cuda_graph"
        if prefill:
            what, sizes, off = "tokens", "cuda_graph_prefill_sizes", "disable_prefill_cuda_graph"
        return PoolError(
            f"the CUDA graph of {size} {what} does not fit into memory{larger}: {free / 2**20:.0f} MiB of "
            f"{total / 2**20:.0f} are free beside the weights and {caches / 2**20:.0f} MiB of caches; lower "
            f"`{sizes}`, `num_pages` or `max_batch`, or turn these graphs off by `{off}`",
            settings=[sizes, "num_pages", "max_batch", off],
        )

    def enter(self, phase: Phase, instead: str = "") -> None:
        """Go to the next phase; ``instead`` says what to do where this is not the next."""
        order = list(Phase)
        if order.index(phase) != order.index(self.phase) + 1:
            raise BackendError(f"a runner in phase {self.phase} cannot go to phase {phase}; {instead}")
        self.phase = phase

    # Steps

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        """Run a step: asks everything of the device and waits for nothing."""
        self.phase = Phase.SERVE
        if step.copies:
            self.pools.copy_pages(step.copies)
        if (replayed := self._replayed(step)) is not None:
            captured, sampled, delivery = replayed
            self.served.add(captured.batch)
            logits = captured.logits[0]  # those of padded requests, too
        else:
            (logits, sampled), delivery = self._eager(step), None
        launched = Launched(step, logits, sampled, delivery, replayed=replayed is not None)
        if step.snapshots and self.pools.linear is not None:
            for source, target in step.snapshots:
                self.pools.linear.copy(source, target)
        return launched

    def _replayed(self, step: Step) -> tuple[CapturedStep, Tensor, Delivery | None] | None:
        """What a graph does of a step: tokens of its sampled requests, and what brings them to the host if it does."""
        if step.mode.is_decode:
            if self.graphs is not None:
                captured = self.graphs.fitting(len(step.entries), step.entries)
                if captured is not None:
                    return captured, *self.graphs.run(captured, step, self.sampler)
        elif self.prefill_graphs is not None:
            captured = self.prefill_graphs.fitting(step)
            if captured is not None:
                return captured, self.prefill_graphs.run(captured, step, self.sampler), None
        return None

    def _eager(self, step: Step) -> tuple[Tensor, Tensor]:
        """Logits ``[sampled, vocab]`` and tokens ``[sampled]`` of the step's sampled rows, in their order."""
        hidden = self._forward(self.batch(step))
        if not step.mode.is_decode:  # which samples every row
            hidden = hidden[to_device(step.sampled_rows, self.device)]
        logits = self.model.logits(hidden)
        requests = step.sampled_requests
        if not requests:
            return logits, self.tokens[:0]
        positions = [
            entry.position + len(entry.token_ids) - len(entry.request.prompt) for entry in step.entries if entry.sampled
        ]
        sampled = self.sampler.sample(logits, requests, positions)
        rows = [row for row, entry in zip(step.rows, step.entries, strict=True) if entry.sampled]
        # What follows a token that could not be chosen is ignored, but it is looked up all the same.
        self.tokens.index_copy_(0, to_device(rows, self.device), sampled.clamp(min=0))
        return logits, sampled

    @torch.inference_mode()
    def hidden_states(self, step: Step) -> Tensor:
        """Hidden states ``[tokens, hidden]`` of a step after the last norm, one entry's rows after the other's."""
        if step.copies:
            self.pools.copy_pages(step.copies)
        return self._forward(self.batch(step))

    def prepare(self, step: Step) -> ForwardBatch:
        """The batch of a step, planned ahead of its forward and marked so (B2); writes nothing to the cache.

        It runs in one piece. It may be padded before it runs: a decode and a verify depend on nothing but their
        geometry, and are planned again then.
        """
        batch = self.batch(step)
        self.attention.plan(batch)
        batch.mark_forward_metadata_ready(replan_equivalent=step.mode in _REPLANNED)
        return batch

    def forward(self, batch: ForwardBatch, *, skip_attn_backend_init: bool | None = None) -> Tensor:
        """Hidden states ``[tokens, hidden]``. Plans the batch unless whoever made it has.

        ``skip_attn_backend_init`` is the old flag, kept for callers that have not moved to the marker (B3).
        """
        apply_skip_attn_backend_init(batch, skip_attn_backend_init)
        with torch.inference_mode():
            return self._forward(batch)

    def _forward(self, batch: ForwardBatch) -> Tensor:
        assert batch.input_ids is not None and batch.positions is not None
        if self._two_batch is not None and (halves := self._two_batch.halves(batch)) is not None:
            self.served.add(*halves)
            return self._two_batch.forward(halves)
        with self.attention.running() as attention:
            attention.plan(batch)
            if not batch.geometry.captured:  # a graph counts when it is replayed
                self.served.add(batch)
            return self.model.forward(batch.input_ids, batch.positions, batch)

    def batch(self, step: Step) -> ForwardBatch:
        """The batch of a step, which its forward plans."""
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
        if self.capacity.spare:  # rows of the table reach past their tokens then
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
            put_newest(ids, step, self.tokens)
        return ForwardBatch(geometry, ids[: len(tokens)], ids[len(tokens) :])

    def _check_every_layer(self) -> None:
        """For debugging: stop at the first layer whose output is not finite."""

        def checker(layer_id: int) -> None:
            def check(_module: object, _inputs: object, output: Tensor) -> None:
                if not bool(torch.isfinite(output).all()):
                    raise NotFinite(layer_id)

            self.model.layers[layer_id].register_forward_hook(check)

        for layer_id in range(len(self.model.layers)):
            checker(layer_id)
