"""Captured decode steps: one CUDA graph per batch size, replayed for every batch that fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnplug import ForwardBatch, ForwardMode, Geometry, GraphLevel
from attnplug.host import ModelAttention, TypicalLens
from attnplug.kernels import to_device
from attnplug_engine.execution.sampler import Sampler, sample
from attnplug_engine.execution.step_output import StepOutput
from attnplug_engine.graphs.capture import CaptureFunction
from attnplug_engine.graphs.dispatcher import GraphDispatcher
from attnplug_engine.graphs.length_ranges import length_ranges
from attnplug_engine.graphs.padding import reserve_padding
from attnplug_engine.graphs.step_inputs import StepInputs
from attnplug_engine.memory.capacity import Capacity
from attnplug_engine.scheduling.page_allocator import PageAllocator
from attnplug_engine.scheduling.slot_table import SlotTable
from attnplug_engine.scheduling.step import PENDING, Step, StepEntry

_UNKNOWN = (PENDING,)


@dataclass(frozen=True, slots=True, eq=False)
class CapturedStep:
    """A decode step of ``size`` requests, or a prefill of ``size`` tokens. Its logits are valid until the next replay
    of any size."""

    size: int
    batch: ForwardBatch
    replay: Callable[[], None]
    logits: list[Tensor]
    """Logits ``[requests, vocab]``; filled by the capture."""


class DecodeGraphs:
    """Decode steps of one model, captured for several batch sizes over one set of inputs.

    If the fastest backend depends on the KV length, a batch size is captured once for each of these backends.

    A captured step reads the requests' last tokens from ``tokens [requests + 1]`` and their pages from the table's
    mirror, runs the model up to its logits (``run_model``), samples, and writes the new tokens back. The host sends a
    few numbers per request. Padded requests have a table row of their own, and a length for which the backend reads and
    writes nothing.
    """

    def __init__(
        self,
        run_model: Callable[[ForwardBatch], Tensor],
        attention: ModelAttention,
        table: SlotTable,
        tokens: Tensor,
        capacity: Capacity,
        *,
        largest: int,
        has_states: bool,
    ) -> None:
        self._run_model, self._attention, self._table, self._tokens = run_model, attention, table, tokens
        self._page_size = capacity.page_size
        self._context = min(capacity.context_length, table.max_pages * capacity.page_size)
        self._has_states = has_states
        fill, device = attention.padding_length(), tokens.device
        self.inputs = StepInputs(largest, table.max_requests, fill, device)
        self.sampled = torch.zeros(largest, dtype=torch.int64, device=device)
        """Sampled tokens of the last replay; -1 where the logits were not finite."""
        self._page_table = torch.zeros(largest, table.max_pages, dtype=torch.int32, device=device)
        self._steps: dict[int, GraphDispatcher[CapturedStep]] = {}
        self.largest = largest

    @property
    def sizes(self) -> tuple[int, ...]:
        """Captured batch sizes in ascending order."""
        return tuple(sorted(self._steps))

    @property
    def backends(self) -> dict[tuple[str, ...], tuple[int, ...]]:
        """Captured batch sizes by the names of the backends that plan them together."""
        return sizes_by_backend(self._steps)

    def reserve(self, allocator: PageAllocator, requests: int = 0, rows: int = 0) -> None:
        """Reserve pages for padded requests and the backend's graph buffers, which also serve other captured steps of
        up to ``requests`` requests and ``rows`` rows."""
        name, length = self._attention.backend.backend_id.name, self._attention.padding_length()
        reserve_padding(name, length, self._table, allocator, self._context)
        self._attention.reserve(max(self.largest, requests), max(self.largest, rows))

    def capture(self, size: int, capture: CaptureFunction) -> Sequence[CapturedStep]:
        """Capture the step of ``size`` requests, once for each backend that plans it at some KV length."""
        self._steps[size] = GraphDispatcher(
            lambda ragged: length_ranges(self._attention.backend, ForwardMode.DECODE, size, 1, ragged),
            self._context,
            lambda typical: self._capture(size, capture, typical),
        )
        return list(self._steps[size].captured.values())

    def _capture(self, size: int, capture: CaptureFunction, typical: TypicalLens | None) -> CapturedStep:
        """Capture a step of padded requests; plan and mark its batch (B2)."""
        inputs, states = self.inputs, self.inputs.state_slots[:size] if self._has_states else None
        geometry = Geometry(
            ForwardMode.DECODE,
            self._page_table[:size],
            inputs.seq_lens[:size],
            self._page_size,
            rows=size,
            max_seq_len=self._context,
            max_new=1,
            state_slots=states,
            captured=True,
            table_rows=inputs.rows[:size],
            typical=typical,
        )
        batch = ForwardBatch(geometry)
        logits: list[Tensor] = []
        mirror, rows, sampling = self._table.mirror(), inputs.rows[:size], inputs.sampling(size)
        self._attention.capture(batch, in_capture=True)

        ids, positions = torch.zeros_like(rows), torch.zeros_like(geometry.seq_lens)
        batch.input_ids, batch.positions = ids, positions
        begin, end = _step_io(inputs)

        def run() -> None:
            begin(geometry.page_table, ids, positions, rows, geometry.seq_lens, mirror, self._tokens)
            self._attention.refill(batch)
            logits[:] = [self._run_model(batch)]
            end(self.sampled, self._tokens, rows, sample(logits[0], sampling))

        replay = capture(run)
        if inputs.mailbox is not None:
            inputs.mailbox.reset()
        return CapturedStep(size, batch, replay, logits)

    def fitting(self, requests: int, entries: Sequence[StepEntry] = ()) -> CapturedStep | None:
        """Return the smallest captured step that holds ``requests`` requests, for the KV lengths of ``entries``; None
        if none does."""
        size = min((size for size in self._steps if size >= requests), default=None)
        return None if size is None else self._steps[size].fitting(entries)

    def run(self, captured: CapturedStep, step: Step, sampler: Sampler) -> tuple[Tensor, StepOutput | None]:
        """Replay a captured step. Return the sampled tokens ``[requests]``, valid until the next replay, and the step
        output if the graph writes it to the host."""
        self._table.mirror()
        self._send_known_tokens(step)
        self.inputs.fill(step, captured.size, sampler)
        self._attention.capture(captured.batch)
        captured.replay()
        count, mailbox = len(step.entries), self.inputs.mailbox
        return self.sampled[:count], None if mailbox is None else mailbox.step_output(count)

    def _send_known_tokens(self, step: Step) -> None:
        """Send the tokens that the host knows. With another step in flight there are few.

        The device may hold an outdated token for a row: that of a dropped step, or of the row's previous request if the
        new one was preempted and found all but its newest token in the prefix cache.
        """
        known = [(row, entry[2][0]) for row, entry in zip(step.rows, step.entries, strict=True) if entry[2] != _UNKNOWN]
        if known:
            rows, tokens = to_device([*zip(*known, strict=True)], self._tokens.device).unbind()
            self._tokens.index_copy_(0, rows, tokens)


def _step_io(inputs: StepInputs) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return what runs before the model and after the sampler: kernels on the mailbox, or torch operations."""
    if inputs.mailbox is None:
        return _begin, store_tokens
    from attnplug_engine.kernels.step_io import begin, end

    return partial(begin, inputs.mailbox), partial(end, inputs.mailbox)


def _begin(
    page_table: Tensor, ids: Tensor, positions: Tensor, rows: Tensor, seq_lens: Tensor, mirror: Tensor, tokens: Tensor
) -> None:
    torch.index_select(mirror, 0, rows, out=page_table)
    torch.index_select(tokens, 0, rows, out=ids)
    torch.sub(seq_lens, 1, out=positions).clamp_(min=0)


def store_tokens(sampled: Tensor, tokens: Tensor, rows: Tensor, chosen: Tensor) -> None:
    """Write the chosen tokens to ``sampled`` for the host, and to ``tokens`` for the next step."""
    sampled[: len(chosen)] = chosen
    # The token of a request that ends by an error is ignored, but the next step still looks up its embedding.
    tokens.index_copy_(0, rows, chosen.clamp(min=0))


def sizes_by_backend(graphs: Mapping[int, GraphDispatcher[Any]]) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Return the captured batch sizes by the names of the backends that plan them together."""
    found: dict[tuple[str, ...], tuple[int, ...]] = {}
    for size in sorted(graphs):
        for names in graphs[size].captured:
            found[names] = (*found.get(names, ()), size)
    return found


@dataclass(frozen=True, slots=True)
class GraphReport:
    """Captured graphs of an engine, or the reason why there are none."""

    level: GraphLevel
    """The backend's claim."""
    limited_by: tuple[str, ...] = ()
    """Backends that limit the level below that of the others."""
    sizes: tuple[int, ...] = ()
    """Numbers of requests of decode steps, or of speculative rounds."""
    nbytes: int = 0
    """Device memory of the graphs and of the backends' buffers for them."""
    why_none: str = ""
    backends: Mapping[tuple[str, ...], tuple[int, ...]] = field(default_factory=dict)
    """Captured sizes by the names of the backends that plan them together."""
    prefill_sizes: tuple[int, ...] = ()
    """Numbers of tokens of prefills."""
    why_no_prefill: str = ""
    why_no_draft_prefill: str = ""
    """Reason why the target's prefills are captured and those of its draft are not."""
    prefill_by: str | None = None
    """The backend of captured prefills, if another one runs eager prefills."""

    def __str__(self) -> str:
        if not self.sizes:
            return f"none: {self.why_none}"
        by = f", by {' and '.join(self.limited_by)}" if self.limited_by else ""
        sizes = ", ".join(map(str, self.sizes))
        text = f"decode with {sizes} requests"
        if self.prefill_sizes:
            text += f", prefill of up to {', '.join(map(str, self.prefill_sizes))} tokens"
            text += f" by {self.prefill_by}" if self.prefill_by else ""
        text += f", {self.nbytes / 2**20:.0f} MiB (level {self.level.name}{by})"
        if self.why_no_prefill:
            text += f"; no prefill: {self.why_no_prefill}"
        elif self.why_no_draft_prefill:
            text += f"; no prefill of the draft: {self.why_no_draft_prefill}"
        if len(self.backends) > 1:
            each = (f"{' and '.join(names)} with {', '.join(map(str, of))}" for names, of in self.backends.items())
            text += f"; {sum(map(len, self.backends.values()))} graphs: {'; '.join(each)}"
        return text
