"""Captured rounds: graphs of verify, of the draft's extend and of its further steps, for some batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnplug import ForwardBatch, ForwardMode, Geometry
from attnplug.host import ModelAttention, PageAllocator, SlotTable, Turn, TypicalLens, merged_turns, turns
from attnplug_engine.by_length import ByLength
from attnplug_engine.capture import Capture
from attnplug_engine.graphs import sizes_by_backend
from attnplug_engine.padding import reserve_padding
from attnplug_engine.request import StepEntry
from attnplug_engine.sampling_batch import SeedOf
from attnplug_engine.speculation.batches import Shape
from attnplug_engine.speculation.round_inputs import RoundInputs
from attnplug_engine.speculation.state import Members

Replay = Callable[[], None]


class CapturedBatches:
    """Batches of one model in the graphs of one size: planned and marked where they are first made, during the
    warm-up before a capture (B2), and refilled inside the graph."""

    def __init__(self, attention: ModelAttention, members: Members, page_size: int, live: Tensor) -> None:
        """``live [requests]`` says which requests are not padded."""
        self._attention, self.members, self._page_size, self._live = attention, members, page_size, live
        self._fill = attention.padding_length()
        self._made: dict[tuple[ForwardMode, int, int], ForwardBatch] = {}

    @property
    def made(self) -> tuple[ForwardBatch, ...]:
        return tuple(self._made.values())

    def make(
        self,
        mode: ForwardMode,
        seq_lens: Tensor,
        positions: Tensor,
        *,
        tree: Tensor | None = None,
        step: int = 0,
    ) -> ForwardBatch:
        requests, new = positions.shape
        key = (mode, new, step)
        if key not in self._made:
            self._made[key] = self._first(mode, new, requests, positions.device, step, trees=tree is not None)
        batch = self._made[key]
        geometry = batch.geometry
        if self._fill:  # with a length, a padded request has all its rows
            geometry.seq_lens.copy_(torch.where(self._live, seq_lens, max(self._fill, new)))
        else:  # nothing is read or written for it
            torch.mul(seq_lens, self._live, out=geometry.seq_lens)
        if tree is not None and geometry.tree is not None:
            geometry.tree.copy_(tree)
        batch.positions = positions.flatten()
        return batch

    def _first(
        self, mode: ForwardMode, new: int, requests: int, device: torch.device, step: int, *, trees: bool
    ) -> ForwardBatch:
        members = self.members
        lens = torch.zeros(requests, dtype=torch.int32, device=device)
        bits = torch.ones(requests, new, dtype=torch.int64, device=device) if trees else None
        geometry = Geometry(
            mode,
            members.page_table,
            lens,
            self._page_size,
            rows=requests * new,
            max_seq_len=members.longest,
            max_new=new,
            state_slots=members.state_slots,
            table_rows=members.rows,
            captured=True,
            tree=bits,
            step=step,
            typical=members.typical,
        )
        batch = ForwardBatch(geometry)
        self._attention.capture(batch, in_capture=True)
        return batch

    def begin(self, batch: ForwardBatch) -> None:
        self._attention.refill(batch)

    def plan(self) -> None:
        """The host's part of planning, before a replay."""
        for batch in self._made.values():
            self._attention.capture(batch)


@dataclass(frozen=True, slots=True, eq=False)
class CapturedRound:
    """The graphs of rounds of ``size`` requests. What they leave is valid until the next replay of any size."""

    size: int
    members: Members
    target: CapturedBatches
    draft: CapturedBatches
    parts: list[Replay] = field(default_factory=list)


class RoundGraphs:
    """The captured rounds of an engine, over one set of inputs. Padded requests have a row of the slot table to
    themselves."""

    def __init__(
        self,
        attention: ModelAttention,
        draft: ModelAttention | None,
        table: SlotTable,
        page_size: int,
        context: int,
        *,
        largest: int,
        rows: int,
        draft_rows: int,
        draft_shapes: Sequence[Shape],
        has_states: bool,
        device: torch.device,
    ) -> None:
        """``rows`` and ``draft_rows`` are the most that a request has in a batch of target and draft; ``draft_shapes``
        are those of the draft's batches."""
        self._attention, self._draft, self._table = attention, draft, table
        self._page_size, self._has_states = page_size, has_states
        self._context = min(context, table.max_pages * page_size)
        self._rows, self._draft_rows, self._draft_shapes = rows, draft_rows, draft_shapes
        fills = [(attention.padding_length(), rows)]
        fills += [] if draft is None else [(draft.padding_length(), draft_rows)]
        self._padding = max(max(fill, most) if fill else 0 for fill, most in fills)
        self.inputs = RoundInputs(largest, table.max_requests, device)
        self._page_table = torch.zeros(largest, table.max_pages, dtype=torch.int32, device=device)
        self._rounds: dict[int, ByLength[CapturedRound]] = {}
        self.largest = largest

    @property
    def sizes(self) -> tuple[int, ...]:
        """Captured batch sizes, the smallest first."""
        return tuple(sorted(self._rounds))

    @property
    def backends(self) -> dict[tuple[str, ...], tuple[int, ...]]:
        """The batch sizes that were captured for each set of backends: the target's, then the draft's."""
        return sizes_by_backend(self._rounds)

    def reserve(self, allocator: PageAllocator) -> None:
        """Give padded requests their pages, and have the backends make their memory."""
        name = self._attention.backend.backend_id.name
        reserve_padding(name, self._padding, self._table, allocator, self._context)
        self._attention.reserve(self.largest, self.largest * self._rows)
        if self._draft is not None:
            self._draft.reserve(self.largest, self.largest * self._draft_rows)

    def capture(
        self, size: int, capture: Capture, parts: Callable[[CapturedRound], Sequence[Replay]]
    ) -> Sequence[CapturedRound]:
        """Capture the ``parts`` of a round of ``size`` requests, for the backends that plan it at each length."""
        self._rounds[size] = ByLength(
            lambda ragged: self._turns(size, ragged),
            self._context,
            lambda typical: self._capture(size, capture, parts, typical),
        )
        return list(self._rounds[size].captured.values())

    def _turns(self, size: int, ragged: bool) -> tuple[Turn, ...]:
        """Who plans the batches of a round, the target's and the draft's."""
        found = [turns(self._attention.backend, ForwardMode.TARGET_VERIFY, size, self._rows, ragged)]
        if self._draft is not None:
            found += [turns(self._draft.backend, shape.mode, size, shape.rows, ragged) for shape in self._draft_shapes]
        return merged_turns(*found)

    def _capture(
        self,
        size: int,
        capture: Capture,
        parts: Callable[[CapturedRound], Sequence[Replay]],
        typical: TypicalLens | None,
    ) -> CapturedRound:
        """Capture the parts of a round whose requests are all padded, one graph each. The first of them finds the page
        table up to date."""
        table, mirror = self._page_table[:size], self._table.mirror()
        members = self.inputs.members(size, table, self._context, has_states=self._has_states, typical=typical)
        live = torch.zeros(size, dtype=torch.bool, device=table.device)
        target = CapturedBatches(self._attention, members, self._page_size, live)
        draft = CapturedBatches(self._draft or self._attention, members, self._page_size, live)
        captured = CapturedRound(size, members, target, draft)
        first, *rest = parts(captured)

        def begin() -> None:
            torch.index_select(mirror, 0, members.rows, out=table)
            torch.lt(members.rows, self._table.max_requests, out=live)
            first()

        for part in (begin, *rest):
            replay = capture(part)
            replay()  # the next part is warmed up on what this one leaves, and a capture alone leaves nothing
            captured.parts.append(replay)
        return captured

    def fitting(self, requests: int, entries: Sequence[StepEntry] = ()) -> CapturedRound | None:
        """The captured round for so many requests: the smallest that holds them, for the lengths that their
        ``entries`` have."""
        size = min((size for size in self._rounds if size >= requests), default=None)
        return None if size is None else self._rounds[size].fitting(entries)

    def begin(
        self,
        captured: CapturedRound,
        entries: Sequence[StepEntry],
        rows: Sequence[int],
        slots: Sequence[int],
        seed_of: SeedOf,
    ) -> None:
        """Send what a replay for these requests reads, and plan its batches."""
        self._table.mirror()
        self.inputs.fill(entries, rows, slots, seed_of)
        captured.target.plan()
        if self._draft is not None:
            captured.draft.plan()
