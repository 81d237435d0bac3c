"""Captured prefills: one graph for each of some numbers of tokens, replayed for every short prefill that fits one.

A prefill of few tokens is bound by the host: its launches take longer than its kernels. On one host of an H200 16
tokens of a model of 16 layers took 8.5 ms, on another 15.7, and the device was busy for 0.9 of them
(``benchmarks/decode_h200.py``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from attnplug import ForwardBatch, ForwardMode, Geometry, ModelSpec
from attnplug.host import ModelAttention, SlotTable
from attnplug_engine.capture import Capture
from attnplug_engine.graphs import CapturedStep, keep_tokens
from attnplug_engine.inputs import put_newest
from attnplug_engine.pools import Capacity
from attnplug_engine.request import Step
from attnplug_engine.sampler import Sampler, sample
from attnplug_engine.sampling_batch import SamplingArrays, SamplingBatch
from attnplug_engine.staging import Staging

_TIMED = 4
"""The first compiles."""
_PACE = 9e13
"""Multiplications and additions a second of extends by ``triton_mla`` on an H200."""
_SAVED_A_LAYER = 4e-4
"""Seconds that a graph is taken to save at most: to launch a layer takes the host 0.5 to 0.9 ms."""


class PrefillGraphs:
    """The prefills of one model, captured for some numbers of tokens over one set of inputs.

    A step of any requests fits, those that decode beside a prefill included, as long as its tokens do. Its last tokens
    are padding, which belongs to no request. Where the host knows no token yet, it is taken from ``tokens``
    ``[requests + 1]``, as in :class:`DecodeGraphs`, and new ones are written there.
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
        slower: ModelSpec | None = None,
        least: Callable[[float], float] | None = None,
    ) -> None:
        """``run_model`` makes the logits of a batch's rows of some numbers. ``slower`` is the model, if another backend
        than the captured one is the fastest for its prefills: then steps with much attention run eagerly. With
        ``least``, which gives the least that any rank has, graphs are kept only where they save time."""
        self._run_model, self._attention, self._table, self._tokens = run_model, attention, table, tokens
        self._page_size = capacity.page_size
        self._context = min(capacity.context_length, table.max_pages * capacity.page_size)
        self._slower, self._least = slower, least
        self.requests, self.largest = min(capacity.max_batch, largest), largest
        """The most requests and tokens of a captured step."""
        fill = attention.padding_length()
        self.inputs = PrefillInputs(largest, self.requests, table.max_requests, fill, tokens.device)
        self._page_table = torch.zeros(self.requests, table.max_pages, dtype=torch.int32, device=tokens.device)
        self._steps: dict[int, CapturedStep] = {}
        self._most_pairs: dict[int, float] = {}
        """By size, how much a step may attend to where the captured backend is the slower one."""
        self._sampled = torch.zeros(self.requests, dtype=torch.int64, device=tokens.device)
        self._logits: Tensor | None = None
        """``[requests, vocab]``, of all sizes: each would else keep its own, of hundreds of megabytes together."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Captured numbers of tokens, the smallest first."""
        return tuple(sorted(self._steps))

    def capture(self, size: int, capture: Capture) -> Sequence[CapturedStep]:
        """Capture a step of ``size`` tokens, all of which are padding; its batch is planned and marked here (B2).

        It is kept if the host takes longer to launch the step than the device to run it. Else the host is ahead without
        a graph, and padding costs what nothing gains.
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
            captured=True,
        )
        batch = ForwardBatch(geometry, inputs.ids[:size], inputs.positions[:size])
        mirror, sampling = self._table.mirror(), inputs.sampling(requests)
        rows, lasts, targets = inputs.rows[:requests], inputs.lasts[:requests], inputs.targets[:requests]
        self._attention.capture(batch, in_capture=True)

        def run() -> None:
            torch.index_select(mirror, 0, rows, out=geometry.page_table)
            self._attention.refill(batch)
            logits = self._kept(self._run_model(batch, lasts), requests)
            keep_tokens(self._sampled, tokens, targets, sample(logits, sampling))

        launching = 0.0 if self._least is None else _seconds(run, tokens.device, waits=False)
        replay = capture(run)
        saved = math.inf
        if self._least is not None:
            saved = self._least(launching - _seconds(replay, tokens.device, waits=True))
        if saved < 0:
            return []
        assert self._logits is not None
        self._steps[size] = CapturedStep(size, batch, replay, [self._logits[:requests]])
        if self._slower is not None:
            seconds = min(saved, _SAVED_A_LAYER * len(self._slower.layers))
            self._most_pairs[size] = seconds * _PACE / _work(self._slower)
        return [self._steps[size]]

    def _kept(self, logits: Tensor, requests: int) -> Tensor:
        """The logits in the memory that all sizes have together; the first to come are of the largest."""
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        return self._logits[:requests].copy_(logits)

    def drop(self, size: int) -> None:
        """Do without a size."""
        self._steps.pop(size, None)
        self._most_pairs.pop(size, None)

    def fitting(self, step: Step) -> CapturedStep | None:
        """The captured step for these requests: the smallest that holds their tokens."""
        tokens = step.num_tokens
        size = min((size for size in self._steps if size >= tokens), default=None)
        if size is None or (size in self._most_pairs and _pairs(step) > self._most_pairs[size]):
            return None
        return self._steps[size]

    def run(self, captured: CapturedStep, step: Step, sampler: Sampler) -> Tensor:
        """Replay a captured step; returns the tokens of its ``sampled_requests``, valid until the next replay."""
        self._table.mirror()
        self.inputs.fill(step, captured.size, sampler)
        put_newest(self.inputs.ids, step, self._tokens)
        self._attention.capture(captured.batch)
        captured.replay()
        return self._sampled[: len(step.sampled_requests)]


def _seconds(run: Callable[[], None], device: torch.device, *, waits: bool) -> float:
    """The shortest of some runs, on the host alone or until the device is done."""
    shortest = math.inf
    for _ in range(_TIMED):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        run()
        if waits:
            torch.cuda.synchronize(device)
        shortest = min(shortest, time.perf_counter() - started)
    return shortest


def _work(model: ModelSpec) -> int:
    """Multiplications and additions for a pair of rows of which one attends to the other, in all layers."""
    return sum(
        2 * layer.num_heads * (layer.mla.row_dim + layer.mla.kv_lora_rank if layer.mla else 2 * layer.head_dim)
        for layer in model.full_layers
    )


def _pairs(step: Step) -> int:
    """Of a new row and one that it may attend to; an upper bound."""
    return sum([len(ids) * (position + len(ids)) for _, position, ids, _ in step.entries])


class PrefillInputs:
    """What captured prefills of up to ``tokens`` tokens of ``requests`` requests read: one copy a step sends it.

    ``rows`` are the requests' rows of the slot table. A padded request has ``padding_row``, no new tokens, and ``fill``
    as its length. Of the requests that get a token, ``lasts`` are the rows of the batch that choose it, and ``targets``
    the rows of the slot table that it goes to.
    """

    def __init__(self, tokens: int, requests: int, padding_row: int, fill: int, device: torch.device) -> None:
        self._padding_row, self._fill = padding_row, fill
        nbytes = 16 * tokens + (24 + SamplingArrays.ROW_BYTES + 8) * requests
        self._staging = Staging(nbytes, device, lambda memory: _Host(memory, tokens, requests))
        fields = _fields(self._staging.memory, tokens, requests)
        self.ids, self.positions, self.rows, self.lasts, self.targets, self.seq_lens, self.new_lens, drawn = fields
        self._sampling = SamplingBatch.over(drawn, requests)
        with self._staging.sent() as host:
            self._pad(host, 0, 0, 0)

    def sampling(self, requests: int) -> SamplingBatch:
        """How the first tokens are chosen."""
        return self._sampling.rows(slice(0, requests))

    def fill(self, step: Step, size: int, sampler: Sampler) -> None:
        """Send a step's requests, padded to ``size`` tokens. Waits for nothing but an older step."""
        entries, requests = step.entries, step.sampled_requests
        counts = [len(entry.token_ids) for entry in entries]
        ends = np.cumsum(counts)
        starts = np.array([entry.position for entry in entries])
        sampled = np.array([entry.sampled for entry in entries])
        count, tokens = len(entries), int(ends[-1])
        with self._staging.sent() as host:
            self._pad(host, tokens, count, len(requests))
            host.ids[:tokens] = [token for entry in entries for token in entry.token_ids]
            host.positions[:tokens] = np.arange(tokens) + np.repeat(starts - ends + counts, counts)
            host.rows[:count] = step.rows
            host.new_lens[:count] = counts
            host.seq_lens[:count] = starts + counts
            host.lasts[: len(requests)] = ends[sampled] - 1
            host.targets[: len(requests)] = np.array(step.rows)[sampled]
            before = [len(request.prompt) for request in requests]
            host.sampling.fill(requests, sampler.seed_of, ((starts + counts)[sampled] - before).tolist())

    def _pad(self, host: _Host, tokens: int, requests: int, sampled: int) -> None:
        """What comes after so many tokens, requests, and requests that get a token."""
        host.ids[tokens:] = 0
        host.positions[tokens:] = 0
        host.rows[requests:] = self._padding_row
        host.new_lens[requests:] = 0
        host.seq_lens[requests:] = self._fill
        host.lasts[sampled:] = 0
        host.targets[sampled:] = self._padding_row


class _Host:
    """The host's side of the inputs."""

    def __init__(self, memory: Tensor, tokens: int, requests: int) -> None:
        *fields, sampling = (field.numpy() for field in _fields(memory, tokens, requests))
        self.ids, self.positions, self.rows, self.lasts, self.targets, self.seq_lens, self.new_lens = fields
        self.sampling = SamplingArrays.over(sampling, requests)


def _fields(memory: Tensor, tokens: int, requests: int) -> list[Tensor]:
    """Ids and positions, rows, lasts and targets in int64; lengths and new lengths in int32; and the memory of sampling
    parameters, which lies before the lengths: it is aligned to 8 bytes."""
    drawn = 16 * tokens + 24 * requests
    lens = drawn + SamplingArrays.ROW_BYTES * requests
    long = memory[:drawn].view(torch.int64).split([tokens, tokens, requests, requests, requests])
    short = memory[lens:].view(torch.int32).split(requests)
    return [*long, *short, memory[drawn:lens]]
