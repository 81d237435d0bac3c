"""The next round's verify, planned while the draft proposes for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from attnplug import ForwardMode
from attnplug_engine.request import Request
from attnplug_engine.scheduling.slot_table import SlotTable
from attnplug_engine.scheduling.step import PENDING, StepEntry
from attnplug_engine.speculation.batches import BatchShape, BatchShapes, EagerBatches, PlannedBatch
from attnplug_engine.speculation.in_flight import RoundOutput
from attnplug_engine.speculation.options import Speculation


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A verify that was planned, and for whom."""

    planned: Sequence[PlannedBatch]
    longest: int
    requests: Sequence[Request]
    rows: Sequence[int]
    slots: Sequence[int]
    changes: Sequence[int]
    """Of the pages of these rows."""
    brought: RoundOutput
    """What the round before it brought, and so which lengths it was planned for."""


class NextVerify:
    """Keeps one planned verify from a round to the next.

    It is planned for the lengths that a round leaves on the device, and only if the next round is expected to have the
    same requests and pages. That round takes it if it has these, in the same order, and starts from these lengths;
    otherwise it is dropped and the round plans its own.
    """

    def __init__(self, speculation: Speculation, table: SlotTable) -> None:
        self._table, self._nodes = table, speculation.nodes
        self._most = speculation.nodes + speculation.room
        """Rows after those that a round finds, at most, which the next one has room for."""
        shape = BatchShape(ForwardMode.TARGET_VERIFY, self._nodes, self._nodes, trees=speculation.topk > 1)
        self._shapes = BatchShapes([shape], table.device)
        self._waiting: _Waiting | None = None

    def plan(
        self,
        batches: EagerBatches,
        entries: Sequence[StepEntry],
        rows: Sequence[int],
        slots: Sequence[int],
        lengths: Tensor,
        brought: RoundOutput,
    ) -> None:
        """Plan it, after a round of these requests that leaves ``lengths [requests]`` committed rows."""
        if not self._same_expected(entries, rows):
            return
        longest = max(batches.members.longest, max(entry.position for entry in entries) + self._most)
        planned = batches.plan_ahead(self._shapes, lengths, longest)
        requests = [entry.request for entry in entries]
        self._waiting = _Waiting(planned, longest, requests, rows, slots, self._table.changes(rows), brought)

    def _same_expected(self, entries: Sequence[StepEntry], rows: Sequence[int]) -> bool:
        """Whether none of the requests is known to end by then, and all have pages for another round."""
        size, length = self._table.page_size, self._table.length
        return all(
            request.length + request.flying < request.max_length
            and position + self._most <= -(-length(row) // size) * size
            for (request, position, _, _), row in zip(entries, rows, strict=True)
        )

    def take(
        self, entries: Sequence[StepEntry], rows: Sequence[int], slots: Sequence[int], longest: int
    ) -> Sequence[PlannedBatch]:
        """What was planned for a round of these requests; nothing if that was for others. It is given once."""
        waiting = self._waiting
        self._waiting = None
        if (
            waiting is None
            or waiting.requests != [entry.request for entry in entries]  # each compares by identity
            or waiting.rows != rows
            or waiting.slots != slots
            or waiting.changes != self._table.changes(rows)
            or waiting.longest < longest
        ):
            return ()
        # Where the host has the newest token, it says where a round starts. That is another place than the device's if
        # the last round was taken back: nobody has read then what it brought.
        told = [(place, entry) for place, entry in enumerate(entries) if entry.token_ids[-1] != PENDING]
        committed = waiting.brought.committed
        if told and (committed is None or any(entry.position != committed[place] for place, entry in told)):
            return ()
        return waiting.planned

    def drop(self) -> None:
        """Lengths on the device change otherwise than by an eager round."""
        self._waiting = None
