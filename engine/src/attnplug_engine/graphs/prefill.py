"""Captured prefills: one CUDA graph per number of tokens, replayed for every short prefill that fits.

A prefill of few tokens is bound by the host: launching its kernels takes longer than running them. On one host of an
H200, 16 tokens of a model with 16 layers took 8.5 ms, on another 15.7 ms; the device was busy for 0.9 ms of them
(``benchmarks/decode_h200.py``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from attnplug import AttentionBackend, ForwardBatch, ForwardMode, Geometry, GraphLevel, ModelSpec
from attnplug.host import ForwardingBackend, ModelAttention
from attnplug.machine.runtime import runtime_of
from attnplug.wrappers.forwarding import HybridLinearBackend
from attnplug_engine.execution.extend_times import ExtendTimes
from attnplug_engine.execution.in_flight import fill_pending_tokens
from attnplug_engine.execution.sampler import Sampler, sample
from attnplug_engine.execution.sampling_inputs import SamplingArrays
from attnplug_engine.graphs.capture import CaptureFunction
from attnplug_engine.graphs.decode import CapturedStep, store_tokens
from attnplug_engine.graphs.staging import Staging
from attnplug_engine.kernels.sampling_metadata import SamplingMetadata
from attnplug_engine.memory.capacity import Capacity
from attnplug_engine.scheduling.slot_table import SlotTable
from attnplug_engine.scheduling.step import Step

_TIMED_RUNS = 4  # the first one is a warm-up
_DEVICE_BOUND = 1.5
"""Ratio of a step's time to that of its launches from which on the device is the bound: a graph saves nothing."""
_EAGER = 1.25
"""Ratio of an eager step's time on the host to that of its launches: it plans its batch, and the device waits for the
first launches. MLA of 16 layers and 2048 tokens on an H200: 11.7 ms eagerly, 9.0 in a graph."""

_MULTIPLY_ADDS_PER_SECOND = 9e13
"""Multiply-adds per second of absorbed extends by ``triton_mla`` on an H200, for devices without tables."""
_MAX_STATES = 32
"""Most requests of a captured prefill of a model with linear layers. The layers' chunk kernels read and write a state
for each of them, padded or not: 2 MiB per layer in Qwen3-Next, so 32 take about 30 µs per layer on an H200."""
_SAVED_PER_LAYER = 4e-4
"""Upper bound of the seconds that a graph saves per layer; launching a layer takes the host 0.5 to 0.9 ms."""


class PrefillGraphs:
    """Prefills of one model, captured for several numbers of tokens over one set of inputs.

    Any step fits whose tokens and requests do, decoding requests beside a prefill included. The last tokens of a graph
    are padding and belong to no request. Tokens that the host does not know yet are read from ``tokens [requests +
    1]``, as in :class:`DecodeGraphs`, and new tokens are written there.
    """

    def __init__(
        self,
        run_model: Callable[[ForwardBatch, Tensor], Tensor],
        attention: ModelAttention,
        table: SlotTable,
        tokens: Tensor,
        capacity: Capacity,
        *,
        largest: int,
        has_states: bool,
        slower: ModelSpec | None = None,
        times: ExtendTimes | None = None,
        as_mha: bool = False,
        all_reduce_min: Callable[[float], float] | None = None,
    ) -> None:
        """``run_model`` returns the logits of the given rows of a batch. ``slower`` is the model if an uncaptured
        backend is faster for its prefills: steps with much attention then run eagerly. ``times`` are measured ones, if
        there are any; otherwise the captured attention is estimated, and compared with the launches that a graph saves.
        ``as_mha``: each size is captured a second time, with MLA layers as MHA, for steps without prefixes.
        ``all_reduce_min`` is the minimum over ranks; if given, a graph is kept only if it saves time on every rank."""
        self._run_model, self._attention, self._table, self._tokens = run_model, attention, table, tokens
        self._page_size = capacity.page_size
        self._context = min(capacity.context_length, table.max_pages * capacity.page_size)
        self._slower, self._times, self._all_reduce_min = slower, times, all_reduce_min
        self._per_pair = 0.0 if slower is None else _work(slower) / _MULTIPLY_ADDS_PER_SECOND
        self._has_states, self._as_mha = has_states, as_mha
        self.requests = min(capacity.max_batch, largest, _MAX_STATES if has_states else largest)
        self.largest = largest
        """Largest number of requests and of tokens of a captured step."""
        fill = attention.padding_length()
        self.inputs = PrefillInputs(largest, self.requests, table.max_requests, fill, tokens.device)
        self._page_table = torch.zeros(self.requests, table.max_pages, dtype=torch.int32, device=tokens.device)
        self._steps: dict[int, CapturedStep] = {}
        self._mha_steps: dict[int, CapturedStep] = {}
        """Steps in which MLA layers run as MHA."""
        self._saved: dict[int, float] = {}
        """Seconds that the graph of each size saves at most, if the captured backend is the slower one."""
        self.sampled = torch.zeros(self.requests, dtype=torch.int64, device=tokens.device)
        """Sampled tokens of the last replay; -1 where the logits were not finite."""
        self._logits: Tensor | None = None
        """Logits buffer ``[requests, vocab]``, shared by all graph sizes to save hundreds of MB."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Captured numbers of tokens in ascending order."""
        return tuple(sorted({*self._steps, *self._mha_steps}))

    def capture(self, size: int, capture: CaptureFunction) -> Sequence[CapturedStep]:
        """Capture a step of ``size`` padding tokens, as MHA too where that is possible; return what is kept."""
        found = self._capture(size, capture, as_mha=False)
        if found is not None:
            step, saved = found
            self._steps[size] = step
            if self._slower is not None:
                self._saved[size] = min(saved, _SAVED_PER_LAYER * len(self._slower.layers))
        as_mha = self._capture(size, capture, as_mha=True) if self._as_mha else None
        if as_mha is not None:
            self._mha_steps[size] = as_mha[0]
        return [step for step, _ in filter(None, (found, as_mha))]

    def _capture(self, size: int, capture: CaptureFunction, *, as_mha: bool) -> tuple[CapturedStep, float] | None:
        """Capture a step and plan and mark its batch (B2). Returns it and the seconds that it saves.

        The graph is kept if an eager step takes the host longer than the device needs to run it. Otherwise the host is
        ahead without a graph, and padding would only cost time. A step that is clearly bound by the device is
        not captured at all: its memory would stay in the graphs' pool.
        """
        inputs, tokens, requests = self.inputs, self._tokens, min(self.requests, size)
        geometry = Geometry(
            ForwardMode.EXTEND,
            self._page_table[:requests],
            inputs.seq_lens[:requests],
            self._page_size,
            rows=size,
            max_seq_len=self._context,
            max_new=min(size, self._context),
            new_lens=inputs.new_lens[:requests],
            state_slots=inputs.state_slots[:requests] if self._has_states else None,
            captured=True,
            table_rows=inputs.rows[:requests],
        )
        batch = ForwardBatch(geometry, inputs.ids[:size], inputs.positions[:size])
        mirror, sampling = self._table.mirror(), inputs.sampling(requests)
        rows, lasts, targets = inputs.rows[:requests], inputs.lasts[:requests], inputs.targets[:requests]
        self._attention.capture(batch, in_capture=True, as_mha=as_mha)

        def run() -> None:
            torch.index_select(mirror, 0, rows, out=geometry.page_table)
            self._attention.refill(batch)
            logits = self._kept(self._run_model(batch, lasts), requests)
            store_tokens(self.sampled, tokens, targets, sample(logits, sampling))

        launching, saved = 0.0, math.inf
        if self._all_reduce_min is not None:
            launching = _seconds(run, tokens.device, waits=False)
            if self._all_reduce_min(_DEVICE_BOUND * launching - _seconds(run, tokens.device, waits=True)) < 0:
                return None
        replay = capture(run)
        if self._all_reduce_min is not None:
            saved = self._all_reduce_min(_EAGER * launching - _seconds(replay, tokens.device, waits=True))
        if saved < 0:
            return None
        assert self._logits is not None
        return CapturedStep(size, batch, replay, [self._logits[:requests]]), saved

    def _kept(self, logits: Tensor, requests: int) -> Tensor:
        """Copy the logits to the buffer that all sizes share. The largest size comes first and allocates it."""
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        return self._logits[:requests].copy_(logits)

    def drop(self, size: int) -> None:
        """Remove a captured size."""
        self._steps.pop(size, None)
        self._mha_steps.pop(size, None)
        self._saved.pop(size, None)

    def fitting(self, step: Step) -> CapturedStep | None:
        """Return the smallest captured step that holds the step's tokens and requests; None if none does."""
        if len(step.entries) > self.requests:
            return None
        tokens = step.num_tokens
        if self._mha_steps and not any([position for _, position, _, _ in step.entries]):
            size = min((size for size in self._mha_steps if size >= tokens), default=None)
            if size is not None:
                return self._mha_steps[size]
        size = min((size for size in self._steps if size >= tokens), default=None)
        return None if size is None or not self._pays(step, size) else self._steps[size]

    def _pays(self, step: Step, size: int) -> bool:
        """Return True if a step's attention in the graph takes no longer than eager attention, or than the launches
        that the graph saves."""
        if self._slower is None:
            return True
        if self._times is not None:
            captured, eager = self._times.seconds(step)
        else:
            captured, eager = _pairs(step) * self._per_pair, 0.0
        return captured <= max(self._saved[size], eager)

    def run(self, captured: CapturedStep, step: Step, sampler: Sampler) -> Tensor:
        """Replay a captured step; return the tokens of its ``sampled_requests``, valid until the next replay."""
        self._table.mirror()
        self.inputs.fill(step, captured.size, sampler)
        fill_pending_tokens(self.inputs.ids, step, self._tokens)
        self._attention.capture(captured.batch)
        captured.replay()
        return self.sampled[: len(step.sampled_requests)]


def _seconds(run: Callable[[], None], device: torch.device, *, waits: bool) -> float:
    """Return the shortest of several runs, timed on the host alone or until the device is done (``waits``)."""
    shortest = math.inf
    synchronize = runtime_of(device).module.synchronize
    for _ in range(_TIMED_RUNS):
        synchronize(device)
        started = time.perf_counter()
        run()
        if waits:
            synchronize(device)
        shortest = min(shortest, time.perf_counter() - started)
    return shortest


def _work(model: ModelSpec) -> int:
    """Multiply-adds of all layers per pair of a query row and a KV row."""
    return sum(
        2 * layer.num_heads * (layer.mla.row_dim + layer.mla.kv_lora_rank if layer.mla else 2 * layer.head_dim)
        for layer in model.full_layers
    )


def _pairs(step: Step) -> int:
    """Upper bound of the number of pairs of a query row and a KV row."""
    return sum([len(ids) * (position + len(ids)) for _, position, ids, _ in step.entries])


class PrefillInputs:
    """Inputs of captured prefills of up to ``tokens`` tokens and ``requests`` requests, sent by one copy per step.

    ``rows`` are the requests' rows of the slot table. A padded request has ``padding_row``, no new tokens, the length
    ``fill`` and the state slot -1. For requests that are sampled, ``lasts`` are the batch rows with their logits and
    ``targets`` the slot table rows that receive their tokens.
    """

    def __init__(self, tokens: int, requests: int, padding_row: int, fill: int, device: torch.device) -> None:
        self._padding_row, self._fill = padding_row, fill
        nbytes = 16 * tokens + (32 + SamplingArrays.ROW_BYTES + 8) * requests
        self._staging = Staging(nbytes, device, lambda memory: _PrefillHost(memory, tokens, requests))
        fields = _fields(self._staging.memory, tokens, requests)
        self.ids, self.positions, self.rows, self.lasts, self.targets, self.state_slots, *fields = fields
        self.seq_lens, self.new_lens, drawn = fields
        self._sampling = SamplingMetadata.over(drawn, requests)
        with self._staging.write() as host:
            self._pad(host, 0, 0, 0)

    def sampling(self, requests: int) -> SamplingMetadata:
        """Sampling parameters of the first ``requests`` sampled requests."""
        return self._sampling.rows(slice(0, requests))

    def fill(self, step: Step, size: int, sampler: Sampler) -> None:
        """Send a step's requests, padded to ``size`` tokens. Waits only for an older step's copy."""
        entries, requests = step.entries, step.sampled_requests
        counts = [len(entry.token_ids) for entry in entries]
        ends = np.cumsum(counts)
        starts = np.array([entry.position for entry in entries])
        sampled = np.array([entry.sampled for entry in entries])
        count, tokens = len(entries), int(ends[-1])
        with self._staging.write() as host:
            self._pad(host, tokens, count, len(requests))
            host.ids[:tokens] = [token for entry in entries for token in entry.token_ids]
            host.positions[:tokens] = np.arange(tokens) + np.repeat(starts - ends + counts, counts)
            host.rows[:count] = step.rows
            if step.state_slots:
                host.state_slots[:count] = step.state_slots
            host.new_lens[:count] = counts
            host.seq_lens[:count] = starts + counts
            host.lasts[: len(requests)] = ends[sampled] - 1
            host.targets[: len(requests)] = np.array(step.rows)[sampled]
            before = [len(request.prompt) for request in requests]
            host.sampling.fill(requests, sampler.seed_of, ((starts + counts)[sampled] - before).tolist())

    def _pad(self, host: _PrefillHost, tokens: int, requests: int, sampled: int) -> None:
        """Pad behind the first ``tokens`` tokens, ``requests`` requests and ``sampled`` sampled requests."""
        host.ids[tokens:] = 0
        host.positions[tokens:] = 0
        host.rows[requests:] = self._padding_row
        host.state_slots[requests:] = -1
        host.new_lens[requests:] = 0
        host.seq_lens[requests:] = self._fill
        host.lasts[sampled:] = 0
        host.targets[sampled:] = self._padding_row


class _PrefillHost:
    """Host view of the inputs."""

    def __init__(self, memory: Tensor, tokens: int, requests: int) -> None:
        *fields, sampling = (field.numpy() for field in _fields(memory, tokens, requests))
        self.ids, self.positions, self.rows, self.lasts, self.targets, self.state_slots, *lens = fields
        self.seq_lens, self.new_lens = lens
        self.sampling = SamplingArrays.over(sampling, requests)


def _fields(memory: Tensor, tokens: int, requests: int) -> list[Tensor]:
    """Split the memory: ids, positions, rows, lasts, targets and state slots in int64, lengths and new lengths in
    int32, and the bytes of the sampling parameters, which precede the lengths because they are aligned to 8 bytes."""
    drawn = 16 * tokens + 32 * requests
    lens = drawn + SamplingArrays.ROW_BYTES * requests
    long = memory[:drawn].view(torch.int64).split([tokens, tokens, *[requests] * 4])
    short = memory[lens:].view(torch.int32).split(requests)
    return [*long, *short, memory[drawn:lens]]


def captures_extends(backend: AttentionBackend) -> bool:
    """Return True if extends can be captured: any batch can be, or one child runs captured extends."""
    if backend.claims.cuda_graph is GraphLevel.ALWAYS:
        return True
    if isinstance(backend, HybridLinearBackend):
        return all(map(captures_extends, backend.children.values()))
    return isinstance(backend, ForwardingBackend) and backend.captured_extends is not None


def prefilling_child(backend: AttentionBackend) -> str | None:
    """Return the label of the child that runs captured extends, if not all children can be captured."""
    if isinstance(backend, HybridLinearBackend):
        return next(filter(None, map(prefilling_child, backend.children.values())), None)
    return backend.captured_extends if isinstance(backend, ForwardingBackend) else None
