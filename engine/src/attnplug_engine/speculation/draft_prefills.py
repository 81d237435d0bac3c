"""Captured prefills of a draft model: one CUDA graph per captured prefill of the target, replayed behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attnplug import ForwardBatch, ForwardMode, Geometry
from attnplug_engine.graphs.capture import CaptureFunction
from attnplug_engine.graphs.decode import CapturedStep
from attnplug_engine.graphs.prefill import PrefillGraphs
from attnplug_engine.graphs.staging import Staging
from attnplug_engine.scheduling.step import Step
from attnplug_engine.speculation.draft_runner import DraftRunner
from attnplug_engine.speculation.proposers import DraftRows


@dataclass(frozen=True, slots=True, eq=False)
class CapturedDraft:
    """Draft's prefill behind the target's prefill of one size."""

    batch: ForwardBatch
    replay: Callable[[], None]
    newest: list[Tensor]
    """Draft's hidden states ``[requests, width]`` of the requests that end; filled by the capture. Valid until the next
    replay."""


class DraftPrefillGraphs:
    """Draft's prefills over the page tables and sampled tokens of the target's graphs.

    ``lay_out`` returns the rows of a draft's prefill. A draft that reads no hidden states has one more row for every
    request that ends (``more_rows``).
    """

    def __init__(
        self, runner: DraftRunner, lay_out: Callable[[Step], DraftRows], target: PrefillGraphs, *, more_rows: bool
    ) -> None:
        self._runner, self._lay_out, self._target, self._more_rows = runner, lay_out, target, more_rows
        self.requests, self.rows = target.requests, target.largest + target.requests * more_rows
        """Largest number of requests and of rows of a captured prefill."""
        self._fill = runner.attention.padding_length()
        nbytes = 8 * (2 * self.rows + 2 + 2 * self.requests) + 8 * self.requests
        self._staging = Staging(nbytes, target.inputs.ids.device, self._host)
        self._inputs = self._fields(self._staging.memory)
        self._captured: dict[int, CapturedDraft] = {}
        with self._staging.write() as host:
            self._pad(host, 0, 0, 0)

    def capture(
        self, step: CapturedStep, hidden: Callable[[], Tensor | None], capture: CaptureFunction
    ) -> ForwardBatch:
        """Capture the draft's prefill behind the target's captured ``step``; return its batch. ``hidden`` returns the
        states ``[tokens, width]`` that the draft reads, which the target's graph writes."""
        runner, table, sampled = self._runner, step.batch.geometry.page_table, self._target.sampled
        requests = table.shape[0]
        rows, context = step.size + requests * self._more_rows, table.shape[1] * runner.capacity.page_size
        ids, positions, last, newest, seq_lens, new_lens = self._inputs
        geometry = Geometry(
            ForwardMode.EXTEND,
            table,
            seq_lens[:requests],
            runner.capacity.page_size,
            rows=rows,
            max_seq_len=context,
            max_new=min(rows, context),
            new_lens=new_lens[:requests],
            captured=True,
        )
        batch = ForwardBatch(geometry, ids[:rows], positions[:rows])
        runner.attention.capture(batch, in_capture=True)
        found: list[Tensor] = []

        def run() -> None:
            runner.attention.refill(batch)
            ids.index_copy_(0, last[:requests], sampled[:requests].clamp(min=0))
            found[:] = [runner.forward(batch, hidden()).index_select(0, newest[:requests])]

        self._captured[step.size] = CapturedDraft(batch, capture(run), found)
        return batch

    def run(self, size: int, step: Step) -> Tensor:
        """Replay the draft's prefill of a step behind the target's graph of ``size`` tokens; return the newest hidden
        states ``[requests that end, width]``, valid until the next replay."""
        captured, rows = self._captured[size], self._lay_out(step)
        count, tokens, ended = len(rows.counts), len(rows.tokens), len(rows.last)
        with self._staging.write() as host:
            ids, positions, last, newest, seq_lens, new_lens = host
            ids[:tokens], positions[:tokens] = rows.tokens, rows.positions
            last[:ended] = newest[:ended] = rows.last
            seq_lens[:count], new_lens[:count] = rows.lengths, rows.counts
            self._pad(host, tokens, count, ended)
        self._runner.attention.capture(captured.batch)
        captured.replay()
        return captured.newest[0][:ended]

    def _pad(self, host: list[np.ndarray], tokens: int, requests: int, ended: int) -> None:
        ids, positions, last, newest, seq_lens, new_lens = host
        ids[tokens:] = positions[tokens:] = 0
        last[ended:] = self.rows  # an element behind all rows, which no batch reads
        newest[ended:] = 0
        seq_lens[requests:], new_lens[requests:] = self._fill, 0

    def _host(self, memory: Tensor) -> list[np.ndarray]:
        return [field.numpy() for field in self._fields(memory)]

    def _fields(self, memory: Tensor) -> list[Tensor]:
        """Split the memory: ids and positions (one element more than rows), last and newest rows in int64, lengths and
        new lengths in int32."""
        long = 8 * (2 * self.rows + 2 + 2 * self.requests)
        sizes = [self.rows + 1, self.rows + 1, self.requests, self.requests]
        return [*memory[:long].view(torch.int64).split(sizes), *memory[long:].view(torch.int32).split(self.requests)]
