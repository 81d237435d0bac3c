"""What is captured more than once for a batch size: once for each backend that is the fastest at some lengths."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from attnplug.host import Turn
from attnplug_engine.request import StepEntry

Captured = TypeVar("Captured")


class ByLength(Generic[Captured]):
    """What was captured for one batch size, by the mean length of a batch's requests.

    ``capture(typical_len)`` is asked once for the backends of each turn that begins within the context. With one turn
    there is nothing to choose, and no typical length.
    """

    def __init__(self, turns: Sequence[Turn], context: int, capture: Callable[[int | None], Captured]) -> None:
        ends = [turn.upto for turn in turns if turn.upto < context]
        made: dict[tuple[str, ...], Captured] = {}
        self._each: list[Captured] = []
        for least, turn in zip((1, *(end + 1 for end in ends)), turns, strict=False):
            if turn.backends not in made:
                middle = math.isqrt(least * min(turn.upto, context)) if ends else None
                made[turn.backends] = capture(middle)
            self._each.append(made[turn.backends])
        self._ends = ends
        self.captured = made
        """By the names of the backends that plan it."""

    def fitting(self, entries: Sequence[StepEntry]) -> Captured:
        """What to replay for these requests."""
        ends = self._ends
        if not ends or not entries:
            return self._each[0]
        return self._each[bisect_left(ends, mean_length(entries))]


def mean_length(entries: Sequence[StepEntry]) -> int:
    """About how many cache rows a request has, of those that run one token each."""
    return sum([position for _, position, _, _ in entries]) // len(entries) + 1
