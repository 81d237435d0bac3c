"""Which backend is the fastest for which batch: measured times, and what lies between the points of measurement."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

EVERY_LENGTH = sys.maxsize
"""Where the last interval of ``Schedule.crossings`` ends."""
_LEADING_BITS = 4
_MOST_KEPT = 4096


class Point(NamedTuple):
    """A batch, as far as its time depends on it: requests, and of each the cache rows and the new tokens.

    ``ragged`` says that its requests differ, from half to one and a half of that length. One alone does not.
    """

    requests: int
    length: int
    tokens: int
    ragged: bool = False


def is_ragged(mean: int, longest: int) -> bool:
    """Whether a batch is more like one whose requests differ by half than like one of equal requests."""
    return 4 * longest > 5 * mean


class TypicalLens(NamedTuple):
    """About how many cache rows the requests of a batch have: on average, and the longest."""

    mean: int
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> TypicalLens:
        return cls(sum(lengths) // (len(lengths) or 1), max(lengths, default=0))

    @classmethod
    def around(cls, mean: int, *, ragged: bool) -> TypicalLens:
        return cls(mean, (3 * mean + 1) // 2 if ragged else mean)


class Grid:
    """Points of measurement. They need not be complete: each pair of (tokens, requests) has lengths of its own.

    Batches of equal and of ragged requests are two grids that share the points of one request. Where only one of the
    two was measured, it stands for both if points may be moved.
    """

    def __init__(self, points: Iterable[Point]) -> None:
        given = list(points)
        kinds = sorted({point.ragged for point in given if point.requests > 1}) or [False]
        self._sheets = {kind: _Sheet(p for p in given if p.requests == 1 or p.ragged is kind) for kind in kinds}

    def near(self, point: Point, *, clamped: bool) -> list[tuple[Point, float]]:
        """The points between which this one lies, and the share of each, linear in the logarithms.

        A point outside of what was measured is moved to the border if ``clamped``. Otherwise nothing is near it.
        """
        own = point.ragged in self._sheets
        if not own and not clamped and point.requests > 1:
            return []
        ragged = point.ragged if own else not point.ragged
        near = self._sheets[ragged].near(point, clamped)
        return [(Point(*counts, ragged=ragged and counts[0] > 1), part) for counts, part in near]

    def lengths(self, requests: int, tokens: int, *, ragged: bool) -> list[int]:
        """Where the slopes change along a line of lengths."""
        sheet = self._sheets.get(ragged) or self._sheets[not ragged]
        return sheet.lengths(requests, tokens)


class _Sheet:
    """Points that are told apart by requests, length and tokens."""

    def __init__(self, points: Iterable[Point]) -> None:
        lines: dict[int, dict[int, list[int]]] = {}
        for point in points:
            lines.setdefault(point.tokens, {}).setdefault(point.requests, []).append(point.length)
        self._tokens = sorted(lines)
        self._requests = {tokens: sorted(by_requests) for tokens, by_requests in lines.items()}
        self._lengths = {
            (tokens, requests): sorted(lengths)
            for tokens, by_requests in lines.items()
            for requests, lengths in by_requests.items()
        }

    def near(self, point: Point, clamped: bool) -> list[tuple[tuple[int, int, int], float]]:
        """(requests, length, tokens) of the points around one, and the share of each; see :meth:`Grid.near`."""
        found: list[tuple[tuple[int, int, int], float]] = []
        for tokens, of_tokens in _between(self._tokens, point.tokens, clamped):
            for requests, of_requests in _between(self._requests[tokens], point.requests, clamped):
                lengths = _between(self._lengths[tokens, requests], point.length, clamped)
                if not lengths:
                    return []
                found += [((requests, length, tokens), of_tokens * of_requests * part) for length, part in lengths]
        return found if math.isclose(sum(part for _, part in found), 1) else []

    def lengths(self, requests: int, tokens: int) -> list[int]:
        lines = {(counts[2], counts[0]) for counts, _ in self.near(Point(requests, 1, tokens), clamped=True)}
        return sorted({length for line in lines for length in self._lengths[line]})


def time_at(times: Mapping[Point, float], near: Sequence[tuple[Point, float]]) -> float:
    """The time between measured points; infinite if there are none."""
    if not near:
        return math.inf
    if len(near) == 1:
        return times[near[0][0]]
    return math.exp(sum(part * math.log(times[point]) for point, part in near))


@dataclass(frozen=True)
class Schedule:
    """For one role, the backends that are the fastest somewhere, and where.

    ``times`` gives each of them its microseconds by point. The first is the best overall. Between points, the logarithm
    of the time is linear in the logarithm of each number. Beyond what was measured it stays as at the border. A backend
    is not used where others were measured and it was not.
    """

    times: Mapping[str, Mapping[Point, float]]
    _points: Grid = field(init=False, repr=False, compare=False)
    _counts: frozenset[int] = field(init=False, repr=False, compare=False)
    _filled: Mapping[str, Mapping[Point, float]] = field(init=False, repr=False, compare=False)
    _crossings: dict[tuple[int, int, bool], tuple[tuple[int, ...], tuple[str, ...]]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    _overall: dict[tuple[int, int, int], str] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        assert self.times and all(self.times.values()), "a schedule is made of measured backends"
        own = {name: {Point(*point): time for point, time in times.items()} for name, times in self.times.items()}
        points = sorted({point for times in own.values() for point in times})
        object.__setattr__(self, "times", own)
        object.__setattr__(self, "_points", Grid(points))
        object.__setattr__(self, "_counts", frozenset(n for point in points for n in (point.requests, point.tokens)))
        object.__setattr__(self, "_filled", {name: filled(times, points) for name, times in own.items()})

    @property
    def candidates(self) -> tuple[str, ...]:
        """The names of the backends, the best overall first."""
        return tuple(self.times)

    def only(self, names: Iterable[str]) -> Schedule | None:
        """This schedule without the others; ``None`` if fewer than two are left, so that there is nothing to choose."""
        kept = set(names)
        times = {name: times for name, times in self.times.items() if name in kept}
        return Schedule(times) if len(times) > 1 else None

    def fastest(self, requests: int, length: int, tokens: int, ragged: bool = False) -> str:
        """The backend to plan a batch with. Each request has ``length`` cache rows, or about so many (``ragged``)."""
        try:
            upto, names = self._crossings[requests, tokens, ragged]
        except KeyError:
            upto, names = self._crossed(requests, tokens, ragged)
        return names[bisect_left(upto, length)]

    def overall(self, requests: int, tokens: int, longest: int) -> str:
        """The backend for batches of any length up to the longest, equal and ragged, if one must plan all of them.

        It has the smallest geometric mean of its time by the best time, over the measured lengths. One that was not
        measured at some of these comes after those that were.
        """
        key = requests, tokens, longest
        name = self._overall.get(key)
        if name is None:
            name = self._best_upto(self._counted(requests), self._counted(tokens), longest)
            if len(self._overall) < _MOST_KEPT:
                self._overall[key] = name
        return name

    def crossings(self, requests: int, tokens: int, ragged: bool = False) -> tuple[tuple[int, str], ...]:
        """The backends along growing lengths: each is the fastest up to a length, the last up to ``EVERY_LENGTH``."""
        return tuple(zip(*self._crossed(requests, tokens, ragged), strict=True))

    def told(self, requests: int, tokens: int) -> str:
        """The crossings in words, for equal requests and, where it differs, for ragged ones."""
        even, ragged = (_told(self.crossings(requests, tokens, kind)) for kind in (False, True))
        return even if even == ragged else f"{even}; of different lengths {ragged}"

    def expected(self, requests: int, length: int, tokens: int, ragged: bool = False) -> dict[str, float]:
        """Microseconds of each candidate; infinite where it was not measured."""
        near = self._points.near(Point(self._counted(requests), length, self._counted(tokens), ragged), clamped=True)
        return {name: time_at(times, near) for name, times in self._filled.items()}

    def _counted(self, count: int) -> int:
        """A number of requests or tokens as measured, or its leading bits: so few of them have crossings of their
        own."""
        drop = count.bit_length() - _LEADING_BITS
        return count if drop <= 0 or count in self._counts else (count >> drop) << drop

    def _crossed(self, requests: int, tokens: int, ragged: bool) -> tuple[tuple[int, ...], tuple[str, ...]]:
        rounded = self._counted(requests), self._counted(tokens), ragged
        if rounded not in self._crossings:
            switches = list(self._switches(*rounded))
            self._crossings[rounded] = tuple(upto for upto, _ in switches), tuple(name for _, name in switches)
        found = self._crossings[rounded]
        if len(self._crossings) < _MOST_KEPT:
            self._crossings[requests, tokens, ragged] = found
        return found

    def _switches(self, requests: int, tokens: int, ragged: bool) -> Iterator[tuple[int, str]]:
        lengths = self._points.lengths(requests, tokens, ragged=ragged)
        before, name = lengths[0], self._best(requests, lengths[0], tokens, ragged)
        for end in lengths[1:]:
            at_end = self._best(requests, end, tokens, ragged)
            # Between two lengths all times are straight lines: who is first at both ends is first in between.
            while name != at_end:
                low, high, following = before, end, at_end
                while high - low > 1:
                    middle = (low + high) // 2
                    best = self._best(requests, middle, tokens, ragged)
                    if best == name:
                        low = middle
                    else:
                        high, following = middle, best
                yield low, name
                before, name = high, following
            before = end
        yield EVERY_LENGTH, name

    def _best_upto(self, requests: int, tokens: int, longest: int) -> str:
        rows = []
        for ragged in (False, True):
            lengths = self._points.lengths(requests, tokens, ragged=ragged)
            upto = [length for length in lengths if length <= longest] or lengths[:1]
            rows += [self.expected(requests, length, tokens, ragged) for length in upto]
        unknown = {name: sum(math.isinf(times[name]) for times in rows) for name in self.times}
        slowness = {
            name: [times[name] / min(times.values()) for times in rows if math.isfinite(times[name])]
            for name in self.times
        }
        score = {name: math.fsum(map(math.log, slow)) for name, slow in slowness.items()}
        return min(self.times, key=lambda name: (unknown[name], score[name], name))

    def _best(self, requests: int, length: int, tokens: int, ragged: bool) -> str:
        expected = self.expected(requests, length, tokens, ragged)
        return min(expected, key=lambda name: (expected[name], name))


def _told(crossings: Sequence[tuple[int, str]]) -> str:
    *parts, (_, last) = crossings
    return ", ".join([*(f"{name} up to {upto} rows" for upto, name in parts), f"then {last}" if parts else last])


def filled(times: Mapping[Point, float], points: Iterable[Point]) -> dict[Point, float]:
    """Times at these points: measured, or else between measured ones; infinite outside of them."""
    grid = Grid(times)
    return {point: times.get(point) or time_at(times, grid.near(point, clamped=False)) for point in points}


def _between(axis: Sequence[int], value: int, clamped: bool) -> list[tuple[int, float]]:
    """The one or two values of a sorted axis around this one, with their shares; none if it lies outside."""
    if not axis[0] <= value <= axis[-1]:
        return [(axis[0] if value < axis[0] else axis[-1], 1.0)] if clamped else []
    index = bisect_left(axis, value)
    if axis[index] == value:
        return [(value, 1.0)]
    low, high = axis[index - 1], axis[index]
    share = math.log(value / low) / math.log(high / low)
    return [(low, 1 - share), (high, share)]
