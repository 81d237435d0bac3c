"""Captured decode steps: one graph for each of some batch sizes, replayed for every batch that fits one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnplug import ForwardBatch, ForwardMode, Geometry, GraphLevel, to_device
from attnplug.host import ModelAttention, PageAllocator, SlotTable, TypicalLens, turns
from attnplug_engine.by_length import ByLength
from attnplug_engine.capture import Capture
from attnplug_engine.inputs import StepInputs
from attnplug_engine.letters import Delivery
from attnplug_engine.padding import reserve_padding
from attnplug_engine.pools import Capacity
from attnplug_engine.request import PENDING, Step, StepEntry
from attnplug_engine.sampler import Sampler, sample

_UNKNOWN = (PENDING,)


@dataclass(frozen=True, slots=True, eq=False)
class CapturedStep:
    """A decode step of ``size`` requests, or a prefill of so many tokens. Its logits are valid until the next replay of
    any size."""

    size: int
    batch: ForwardBatch
    replay: Callable[[], None]
    logits: list[Tensor]
    """``[requests, vocab]``, after the capture."""


class DecodeGraphs:
    """The decode steps of one model, captured for some batch sizes over one set of inputs; where backends take turns by
    length, once for each of them.

    A captured step takes the requests' last tokens from ``tokens`` ``[requests + 1]`` and their pages from the table's
    mirror, runs the model up to its logits (``run_model``), samples, and writes the new tokens back. The host sends a
    few numbers per request. Padded requests have a row of the table to themselves, and a length for which the backend
    reads and writes nothing.
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
        """The tokens of the last replay; -1 where logits were not finite."""
        self._page_table = torch.zeros(largest, table.max_pages, dtype=torch.int32, device=device)
        self._steps: dict[int, ByLength[CapturedStep]] = {}
        self.largest = largest

    @property
    def sizes(self) -> tuple[int, ...]:
        """Captured batch sizes, the smallest first."""
        return tuple(sorted(self._steps))

    @property
    def backends(self) -> dict[tuple[str, ...], tuple[int, ...]]:
        """The batch sizes that were captured for each backend, or for those that plan together."""
        return sizes_by_backend(self._steps)

    def reserve(self, allocator: PageAllocator, requests: int = 0, rows: int = 0) -> None:
        """Give padded requests their pages, and have the backend make its memory; for steps of others with so many
        requests and rows, too."""
        name, length = self._attention.backend.backend_id.name, self._attention.padding_length()
        reserve_padding(name, length, self._table, allocator, self._context)
        self._attention.reserve(max(self.largest, requests), max(self.largest, rows))

    def capture(self, size: int, capture: Capture) -> Sequence[CapturedStep]:
        """Capture the step of ``size`` requests, for each backend that plans such a step at some length."""
        self._steps[size] = ByLength(
            lambda ragged: turns(self._attention.backend, ForwardMode.DECODE, size, 1, ragged),
            self._context,
            lambda typical: self._capture(size, capture, typical),
        )
        return list(self._steps[size].captured.values())

    def _capture(self, size: int, capture: Capture, typical: TypicalLens | None) -> CapturedStep:
        """Capture a step whose requests are all padded; its batch is planned and marked here (B2)."""
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
        begin, end = _ends_of_a_step(inputs)

        def run() -> None:
            begin(geometry.page_table, ids, positions, rows, geometry.seq_lens, mirror, self._tokens)
            self._attention.refill(batch)
            logits[:] = [self._run_model(batch)]
            end(self.sampled, self._tokens, rows, sample(logits[0], sampling))

        replay = capture(run)
        if inputs.letters is not None:
            inputs.letters.restart()
        return CapturedStep(size, batch, replay, logits)

    def fitting(self, requests: int, entries: Sequence[StepEntry] = ()) -> CapturedStep | None:
        """The captured step for a batch of so many requests: the smallest that holds them, for the lengths that its
        ``entries`` have."""
        size = min((size for size in self._steps if size >= requests), default=None)
        return None if size is None else self._steps[size].fitting(entries)

    def run(self, captured: CapturedStep, step: Step, sampler: Sampler) -> tuple[Tensor, Delivery | None]:
        """Replay a captured step for these requests; returns their tokens ``[requests]``, valid until the next one,
        and what brings them to the host if the step itself does."""
        self._table.mirror()
        self._tell_known(step)
        self.inputs.fill(step, captured.size, sampler)
        self._attention.capture(captured.batch)
        captured.replay()
        count, letters = len(step.entries), self.inputs.letters
        return self.sampled[:count], None if letters is None else letters.answered(count)

    def _tell_known(self, step: Step) -> None:
        """Send the tokens that the host knows; with another step in flight there are hardly any.

        A row may have another one: that of a step which was dropped, or of the request that had the row before one
        that was preempted and found all but its newest token in the prefix cache.
        """
        known = [(row, entry[2][0]) for row, entry in zip(step.rows, step.entries, strict=True) if entry[2] != _UNKNOWN]
        if known:
            rows, tokens = to_device([*zip(*known, strict=True)], self._tokens.device).unbind()
            self._tokens.index_copy_(0, rows, tokens)


def _ends_of_a_step(inputs: StepInputs) -> tuple[Callable[..., None], Callable[..., None]]:
    """What comes before the model and after the sampler: by kernels where these take letters, else by torch."""
    if inputs.letters is None:
        return _begin, keep_tokens
    from attnplug_engine.kernels.steps import begin, end

    return partial(begin, inputs.letters), partial(end, inputs.letters)


def _begin(
    page_table: Tensor, ids: Tensor, positions: Tensor, rows: Tensor, seq_lens: Tensor, mirror: Tensor, tokens: Tensor
) -> None:
    torch.index_select(mirror, 0, rows, out=page_table)
    torch.index_select(tokens, 0, rows, out=ids)
    torch.sub(seq_lens, 1, out=positions).clamp_(min=0)


def keep_tokens(sampled: Tensor, tokens: Tensor, rows: Tensor, chosen: Tensor) -> None:
    """Put the tokens that were chosen where the host takes them from, and in ``tokens`` for the next step."""
    sampled[: len(chosen)] = chosen
    # The token of a request that ends by an error is not read again, but the row of an embedding is.
    tokens.index_copy_(0, rows, chosen.clamp(min=0))


def sizes_by_backend(graphs: Mapping[int, ByLength[Any]]) -> dict[tuple[str, ...], tuple[int, ...]]:
    """For what was captured by batch size: the sizes for each backend, or for those that plan together."""
    found: dict[tuple[str, ...], tuple[int, ...]] = {}
    for size in sorted(graphs):
        for names in graphs[size].captured:
            found[names] = (*found.get(names, ()), size)
    return found


@dataclass(frozen=True, slots=True)
class GraphReport:
    """What an engine captured, or why it captured nothing."""

    level: GraphLevel
    """What the backend claims."""
    limited_by: tuple[str, ...] = ()
    """The backends that allow no more, where others would."""
    sizes: tuple[int, ...] = ()
    """Requests of decode steps, or of rounds."""
    nbytes: int = 0
    """Memory that the graphs and the backend's own buffers for them took."""
    why_none: str = ""
    backends: Mapping[tuple[str, ...], tuple[int, ...]] = field(default_factory=dict)
    """The sizes that were captured for each backend, or for those that plan together."""
    prefill_sizes: tuple[int, ...] = ()
    """Tokens of prefills."""
    why_no_prefill: str = ""
    prefill_by: str | None = None
    """The backend that takes them, where it is not the one that prefills without a graph."""

    def __str__(self) -> str:
        if not self.sizes:
            return f"none: {self.why_none}"
        by = f", by {' and '.join(self.limited_by)}" if self.limited_by else ""
        sizes = ", ".join(map(str, self.sizes))
        told = f"decode with {sizes} requests"
        if self.prefill_sizes:
            told += f", prefill of up to {', '.join(map(str, self.prefill_sizes))} tokens"
            told += f" by {self.prefill_by}" if self.prefill_by else ""
        told += f", {self.nbytes / 2**20:.0f} MiB (level {self.level.name}{by})"
        if self.why_no_prefill:
            told += f"; no prefill: {self.why_no_prefill}"
        if len(self.backends) > 1:
            each = (f"{' and '.join(names)} with {', '.join(map(str, of))}" for names, of in self.backends.items())
            told += f"; {sum(map(len, self.backends.values()))} graphs: {'; '.join(each)}"
        return told
