"""Verify of the next round, planned while the draft proposes for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from attnplug import ForwardMode
from attnplug_engine.request import Request
from attnplug_engine.scheduling.slot_table import SlotTable
from attnplug_engine.scheduling.step import PENDING, StepEntry
from attnplug_engine.settings.speculation import Speculation
from attnplug_engine.speculation.batches import EagerBatches, PlannedAhead, RoundShape, RoundShapes
from attnplug_engine.speculation.in_flight import RoundOutput


@dataclass(frozen=True, slots=True, eq=False)
class _PlannedVerify:
    """A planned verify and its requests."""

    planned: Sequence[PlannedAhead]
    longest: int
    requests: Sequence[Request]
    rows: Sequence[int]
    slots: Sequence[int]
    changes: Sequence[int]
    """Change counters of the pages of these rows."""
    output: RoundOutput
    """Output of the preceding round, which has the lengths that it was planned for."""


class NextVerify:
    """Keeps one planned verify from one round to the next.

    It is planned for the lengths that a round leaves on the device, and only if the next round is expected to have the
    same requests and pages. That round uses it if it has these requests in the same order, and starts from these
    lengths; otherwise it is dropped and the round plans its own.
    """

    def __init__(self, speculation: Speculation, table: SlotTable) -> None:
        self._table, self._nodes = table, speculation.nodes
        self._most = speculation.nodes + speculation.room
        """Most rows, behind those that a round finds, for which the next one needs room."""
        shape = RoundShape(ForwardMode.TARGET_VERIFY, self._nodes, self._nodes, trees=speculation.topk > 1)
        self._shapes = RoundShapes([shape], table.device)
        self._waiting: _PlannedVerify | None = None

    def plan(
        self,
        batches: EagerBatches,
        entries: Sequence[StepEntry],
        rows: Sequence[int],
        slots: Sequence[int],
        lengths: Tensor,
        output: RoundOutput,
    ) -> None:
        """Plan it, following a round of these requests that leaves ``lengths [requests]`` committed rows."""
        if not self._same_expected(entries, rows):
            return
        longest = max(batches.members.longest, max(entry.position for entry in entries) + self._most)
        planned = batches.plan_ahead(self._shapes, lengths, longest)
        requests = [entry.request for entry in entries]
        self._waiting = _PlannedVerify(planned, longest, requests, rows, slots, self._table.changes(rows), output)

    def _same_expected(self, entries: Sequence[StepEntry], rows: Sequence[int]) -> bool:
        """Return True if no request is known to end by then, and all have pages for another round."""
        size, length = self._table.page_size, self._table.length
        return all(
            request.length + request.steps_in_flight < request.max_length
            and position + self._most <= -(-length(row) // size) * size
            for (request, position, _, _), row in zip(entries, rows, strict=True)
        )

    def take(
        self, entries: Sequence[StepEntry], rows: Sequence[int], slots: Sequence[int], longest: int
    ) -> Sequence[PlannedAhead]:
        """Return the batches planned for a round of these requests, once; empty if they were planned for others."""
        waiting = self._waiting
        self._waiting = None
        if (
            waiting is None
            or waiting.requests != [entry.request for entry in entries]  # requests compare by identity
            or waiting.rows != rows
            or waiting.slots != slots
            or waiting.changes != self._table.changes(rows)
            or waiting.longest < longest
        ):
            return ()
        # If the host has the newest token, it knows where a round starts. That differs from the device's length if the
        # last round was rolled back: then its output was never read.
        known = [(place, entry) for place, entry in enumerate(entries) if entry.token_ids[-1] != PENDING]
        committed = waiting.output.committed
        if known and (committed is None or any(entry.position != committed[place] for place, entry in known)):
            return ()
        return waiting.planned

    def drop(self) -> None:
        """Drop the plan. Call it if lengths on the device change other than by an eager round."""
        self._waiting = None
