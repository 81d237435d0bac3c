"""Captured rounds: graphs of verify, the draft's extend and its further steps, for several batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnplug import ForwardBatch, ForwardMode, Geometry
from attnplug.host import ModelAttention, TypicalLens
from attnplug_engine.execution.sampling_inputs import SeedOf
from attnplug_engine.graphs.capture import CaptureFunction
from attnplug_engine.graphs.decode import sizes_by_backend
from attnplug_engine.graphs.dispatcher import GraphDispatcher
from attnplug_engine.graphs.length_ranges import LengthRange, length_ranges, merge_length_ranges
from attnplug_engine.graphs.padding import reserve_padding
from attnplug_engine.scheduling.page_allocator import PageAllocator
from attnplug_engine.scheduling.slot_table import SlotTable
from attnplug_engine.scheduling.step import StepEntry
from attnplug_engine.speculation.batches import RoundShape
from attnplug_engine.speculation.round_inputs import RoundInputs
from attnplug_engine.speculation.round_state import Members

Replay = Callable[[], None]


class CapturedBatches:
    """Batches of one model in the graphs of one size. They are planned and marked when first made, during the warm-up
    before a capture (B2), and refilled inside the graph."""

    def __init__(self, attention: ModelAttention, members: Members, page_size: int, live: Tensor) -> None:
        """``live [requests]`` marks the requests that are not padding."""
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
        if self._fill:  # a padded request with a length has all its rows
            geometry.seq_lens.copy_(torch.where(self._live, seq_lens, max(self._fill, new)))
        else:  # nothing is read or written for padding
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
        """Run the host's part of planning, before a replay."""
        for batch in self._made.values():
            self._attention.capture(batch)


@dataclass(frozen=True, slots=True, eq=False)
class CapturedRound:
    """Graphs of rounds of ``size`` requests. Their results are valid until the next replay of any size."""

    size: int
    members: Members
    target: CapturedBatches
    draft: CapturedBatches
    parts: list[Replay] = field(default_factory=list)


class RoundGraphs:
    """Captured rounds of an engine, over one set of inputs. Padded requests have a slot table row of their own."""

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
        draft_shapes: Sequence[RoundShape],
        has_states: bool,
        device: torch.device,
    ) -> None:
        """``rows`` and ``draft_rows`` are the most rows of a request in a batch of target and draft; ``draft_shapes``
        are the shapes of the draft's batches."""
        self._attention, self._draft, self._table = attention, draft, table
        self._page_size, self._has_states = page_size, has_states
        self._context = min(context, table.max_pages * page_size)
        self._rows, self._draft_rows, self._draft_shapes = rows, draft_rows, draft_shapes
        fills = [(attention.padding_length(), rows)]
        fills += [] if draft is None else [(draft.padding_length(), draft_rows)]
        self._padding = max(max(fill, most) if fill else 0 for fill, most in fills)
        self.inputs = RoundInputs(largest, table.max_requests, device)
        self._page_table = torch.zeros(largest, table.max_pages, dtype=torch.int32, device=device)
        self._rounds: dict[int, GraphDispatcher[CapturedRound]] = {}
        self.largest = largest

    @property
    def sizes(self) -> tuple[int, ...]:
        """Captured batch sizes in ascending order."""
        return tuple(sorted(self._rounds))

    @property
    def backends(self) -> dict[tuple[str, ...], tuple[int, ...]]:
        """Captured batch sizes by the names of the backends: the target's, then the draft's."""
        return sizes_by_backend(self._rounds)

    def reserve(self, allocator: PageAllocator, requests: int = 0, rows: int = 0, draft_rows: int = 0) -> None:
        """Reserve pages for padded requests and the backends' graph buffers, which also serve prefills of up to
        ``requests`` requests, ``rows`` rows of the target and ``draft_rows`` rows of the draft."""
        name = self._attention.backend.backend_id.name
        reserve_padding(name, self._padding, self._table, allocator, self._context)
        self._attention.reserve(max(self.largest, requests), max(self.largest * self._rows, rows))
        if self._draft is not None:
            self._draft.reserve(max(self.largest, requests), max(self.largest * self._draft_rows, draft_rows))

    def capture(
        self, size: int, capture: CaptureFunction, parts: Callable[[CapturedRound], Sequence[Replay]]
    ) -> Sequence[CapturedRound]:
        """Capture the ``parts`` of a round of ``size`` requests, for the backends that plan it at each KV length."""
        self._rounds[size] = GraphDispatcher(
            lambda ragged: self._turns(size, ragged),
            self._context,
            lambda typical: self._capture(size, capture, parts, typical),
        )
        return list(self._rounds[size].captured.values())

    def _turns(self, size: int, ragged: bool) -> tuple[LengthRange, ...]:
        """Return the length ranges and the backends that plan a round in them, the target's and the draft's."""
        found = [length_ranges(self._attention.backend, ForwardMode.TARGET_VERIFY, size, self._rows, ragged)]
        if self._draft is not None:
            found += [
                length_ranges(self._draft.backend, shape.mode, size, shape.rows, ragged) for shape in self._draft_shapes
            ]
        return merge_length_ranges(*found)

    def _capture(
        self,
        size: int,
        capture: CaptureFunction,
        parts: Callable[[CapturedRound], Sequence[Replay]],
        typical: TypicalLens | None,
    ) -> CapturedRound:
        """Capture the parts of a round of padded requests, one graph each. The first part updates the page table."""
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
            replay()  # the next part's warm-up reads results, which a capture alone does not compute
            captured.parts.append(replay)
        return captured

    def fitting(self, requests: int, entries: Sequence[StepEntry] = ()) -> CapturedRound | None:
        """Return the smallest captured round that holds ``requests`` requests, for the KV lengths of ``entries``; None
        if none does."""
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
        """Send the inputs of a replay for these requests, and plan its batches."""
        self._table.mirror()
        self.inputs.fill(entries, rows, slots, seed_of)
        captured.target.plan()
        if self._draft is not None:
            captured.draft.plan()
