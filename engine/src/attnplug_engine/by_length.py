"""What is captured more than once for a batch size: once for each backend that is the fastest at some lengths."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Generic, TypeVar

from attnplug.host import LengthRange, TypicalLens, is_ragged
from attnplug_engine.request import StepEntry

Captured = TypeVar("Captured")
_POSITION = itemgetter(1)
_FEW = 16
"""Of fewer requests the lengths are added up at every step, of more the more seldom: choosing costs all the same."""


class ByLength(Generic[Captured]):
    """What was captured for one batch size, by the lengths of a batch's requests: their mean, and whether they differ.

    ``length_ranges(ragged)`` gives the backends by length. ``capture(typical)`` is called once for the backends of each
    range that begins within the context. If all are the same, there is nothing to choose, and ``typical`` is None.
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
        self._lines: list[tuple[list[int], list[Captured]]] = []
        """Of equal and of ragged requests: where each range but the last ends, and what was captured for each."""
        for ragged, parts in found.items():
            for least, most, backends in parts:
                if backends not in made:
                    middle = TypicalLens.around(math.isqrt(least * most), ragged=ragged)
                    made[backends] = capture(middle if self._chooses else None)
            self._lines.append(([most for _, most, _ in parts[:-1]], [made[backends] for _, _, backends in parts]))
        self._count = self._steps = self._mean = self._longest = 0
        self.captured = made
        """By the names of the backends that plan it."""

    def fitting(self, entries: Sequence[StepEntry]) -> Captured:
        """What to replay for these requests."""
        if not self._chooses or not entries:
            return self._lines[0][1][0]
        self._look_at(entries)
        ends, captured = self._lines[is_ragged(self._mean, self._longest)]
        return captured[bisect_left(ends, self._mean)]

    def _look_at(self, entries: Sequence[StepEntry]) -> None:
        """Find the cache rows of requests. Of many it is done anew every few steps, in each of which they grow by a
        row."""
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
    """Ranges that begin within a context: first and last length of each, and its backends."""
    least = 1
    for each in ranges:
        yield least, min(each.max_length, context), each.backends
        least = each.max_length + 1
        if least > context:
            return
