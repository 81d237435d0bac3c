"""CUDA graph dispatch by KV length: one graph per batch size and backend that is the fastest at some length."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Generic, TypeVar

from attnplug.contract.geometry import is_ragged
from attnplug.host import TypicalLens
from attnplug_engine.graphs.length_ranges import LengthRange
from attnplug_engine.scheduling.step import StepEntry

Captured = TypeVar("Captured")
_POSITION = itemgetter(1)
_FEW = 16
"""Up to 16 requests, lengths are summed at every step; with more requests less often, so that dispatch costs the
same."""


class GraphDispatcher(Generic[Captured]):
    """Captured graphs of one batch size, chosen by the mean KV length of a batch and by how much its lengths vary.

    ``length_ranges(ragged)`` returns the length ranges and the backends that plan them. ``capture(typical)`` is called
    once for the backends of each range that begins within ``context``. If all ranges have the same backends, there is
    one graph and ``typical`` is None.
    """

    def __init__(
        self,
        length_ranges: Callable[[bool], Sequence[LengthRange]],
        context: int,
        capture: Callable[[TypicalLens | None], Captured],
    ) -> None:
        found = {ragged: [*_within(length_ranges(ragged), context)] for ragged in (False, True)}
        self._chooses = len({backends for each in found.values() for _, _, backends in each}) > 1
        made: dict[tuple[str, ...], Captured] = {}
        self._ranges: list[tuple[list[int], list[Captured]]] = []
        """For uniform and for ragged batches: upper bounds of all ranges but the last, and the graph of each range."""
        for ragged, parts in found.items():
            for least, most, backends in parts:
                if backends not in made:
                    middle = TypicalLens.around(math.isqrt(least * most), ragged=ragged)
                    made[backends] = capture(middle if self._chooses else None)
            self._ranges.append(([most for _, most, _ in parts[:-1]], [made[backends] for _, _, backends in parts]))
        self._count = self._steps = self._mean = self._longest = 0
        self.captured = made
        """Captured graphs by the names of their backends."""

    def fitting(self, entries: Sequence[StepEntry]) -> Captured:
        """Return the graph to replay for these requests."""
        if not self._chooses or not entries:
            return self._ranges[0][1][0]
        self._update_lengths(entries)
        ends, captured = self._ranges[is_ragged(self._mean, self._longest)]
        return captured[bisect_left(ends, self._mean)]

    def _update_lengths(self, entries: Sequence[StepEntry]) -> None:
        """Update mean and maximum KV length. With many requests they are recomputed every few steps only; in between,
        each request grows by one row per step."""
        count = len(entries)
        if count != self._count or self._steps == 0:
            before = list(map(_POSITION, entries))
            self._count, self._mean, self._longest = count, sum(before) // count, max(before)
            self._steps = count // _FEW
        else:
            self._steps -= 1
        self._mean += 1
        self._longest += 1


def _within(ranges: Sequence[LengthRange], context: int) -> Iterator[tuple[int, int, tuple[str, ...]]]:
    """Yield first length, last length and backends of each range that begins within ``context``."""
    least = 1
    for each in ranges:
        yield least, min(each.max_length, context), each.backends
        least = each.max_length + 1
        if least > context:
            return
