"""Per-batch backend schedule: measured times, interpolated between grid points."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

_LEADING_BITS = 4
"""Significant bits of a batch size that was not measured. It bounds the number of cached ranges."""
_MOST_CACHED = 4096
"""Entries of each cache of a schedule."""
_FAR = 24
"""Distance in eighths of an octave, beyond that of the nearest point, at which a backend's own points are far."""


class BatchPoint(NamedTuple):
    """Shape of a batch: number of requests, KV length and new tokens of each.

    ``ragged``: KV lengths are spread evenly from 0.5 to 1.5 times ``length``. A single request is not ragged.
    """

    requests: int
    length: int
    tokens: int
    ragged: bool = False


class Grid:
    """Measured points. The grid may be sparse: each (tokens, requests) pair has its own lengths.

    Uniform and ragged batches form two grids that share the points with one request. If only one of them was measured,
    it stands for both when points are clamped.
    """

    def __init__(self, points: Iterable[BatchPoint]) -> None:
        given = sorted(points, key=lambda point: (point.tokens, point.requests, point.length))
        kinds = sorted({point.ragged for point in given if point.requests > 1}) or [False]
        self._lengths: dict[bool, dict[int, dict[int, list[int]]]] = {kind: {} for kind in kinds}
        """Lengths by kind, tokens and requests, all in ascending order."""
        for kind, by_tokens in self._lengths.items():
            for point in given:
                if point.requests == 1 or point.ragged is kind:
                    by_tokens.setdefault(point.tokens, {}).setdefault(point.requests, []).append(point.length)

    def near(self, point: BatchPoint, *, clamped: bool) -> list[tuple[BatchPoint, float]]:
        """Measured points around ``point`` with their weights, linear in the logarithms.

        A point outside the grid is moved to its border if ``clamped``. Otherwise the result is empty.
        """
        own = point.ragged in self._lengths
        if not own and not clamped and point.requests > 1:
            return []
        ragged = point.ragged if own else not point.ragged
        found: list[tuple[BatchPoint, float]] = []
        for tokens, of_tokens in _between([*self._lengths[ragged]], point.tokens, clamped):
            by_requests = self._lengths[ragged][tokens]
            for requests, of_requests in _between([*by_requests], point.requests, clamped):
                lengths = _between(by_requests[requests], point.length, clamped)
                if not lengths:
                    return []
                weight, kind = of_tokens * of_requests, ragged and requests > 1
                found += [(BatchPoint(requests, length, tokens, kind), weight * part) for length, part in lengths]
        return found if math.isclose(sum(part for _, part in found), 1) else []

    def lengths(self, requests: int, tokens: int, *, ragged: bool) -> list[int]:
        """Measured lengths of batches like this one. Interpolated times are log-linear between them."""
        by_tokens = self._lengths.get(ragged) or self._lengths[not ragged]
        near = self.near(BatchPoint(requests, 1, tokens, ragged), clamped=True)
        return sorted({length for point, _ in near for length in by_tokens[point.tokens][point.requests]})


def time_at(times: Mapping[BatchPoint, float], near: Sequence[tuple[BatchPoint, float]]) -> float:
    """Interpolate the time between measured points; infinite if ``near`` is empty."""
    if not near:
        return math.inf
    if len(near) == 1:
        return times[near[0][0]]
    return math.exp(sum(part * math.log(times[point]) for point, part in near))


class BackendSchedule:
    """Fastest backend of one role for each batch shape. Immutable.

    ``times`` maps each backend to its microseconds by point; the first backend is the best overall. Interpolation is
    linear in the logarithms of time, requests, length and tokens. Outside the grid, times are those at its border. A
    backend is not chosen at points where others were measured and it was not.

    >>> times = {"a": {(1, 64, 1): 1.0, (1, 4096, 1): 9.0}, "b": {(1, 64, 1): 2.0, (1, 4096, 1): 4.0}}
    >>> [BackendSchedule(times).fastest(requests=1, length=length, tokens=1) for length in (64, 4096)]
    ['a', 'b']
    """

    def __init__(self, times: Mapping[str, Mapping[Any, float]]) -> None:
        assert times and all(times.values()), "a schedule needs measured backends"
        self.times: Mapping[str, Mapping[BatchPoint, float]] = {
            name: {BatchPoint(*point): time for point, time in of_backend.items()} for name, of_backend in times.items()
        }
        points = sorted({point for of_backend in self.times.values() for point in of_backend})
        self._points = Grid(points)
        self._counts = frozenset(count for point in points for count in (point.requests, point.tokens))
        self._filled = {name: filled(of_backend, points) for name, of_backend in self.times.items()}
        self._ranges = lru_cache(_MOST_CACHED)(self._find_ranges)
        self._overall = lru_cache(_MOST_CACHED)(self._best_within)

    @property
    def candidates(self) -> tuple[str, ...]:
        """Names of the backends, the best overall first."""
        return tuple(self.times)

    def only(self, names: Iterable[str]) -> BackendSchedule | None:
        """Restrict the schedule to ``names``. Return None if fewer than two backends remain."""
        kept = set(names)
        times = {name: times for name, times in self.times.items() if name in kept}
        return type(self)(times) if len(times) > 1 else None

    def fastest(self, requests: int, length: int, tokens: int, ragged: bool = False) -> str:
        """Name of the fastest backend. ``length`` is every request's KV length, or their mean if ``ragged``."""
        ends, names = self.length_ranges(requests, tokens, ragged)
        return names[bisect_left(ends, length)]

    def overall(self, requests: int, tokens: int, longest: int) -> str:
        """Name of the best backend for batches of every length up to ``longest``, uniform and ragged.

        It has the smallest geometric mean of its time divided by the best time, over the measured lengths. A backend
        that was not measured at all of them ranks after those that were.
        """
        return self._overall(self._rounded(requests), self._rounded(tokens), longest)

    def describe(self, requests: int, tokens: int) -> str:
        """Format the length ranges for uniform requests and, if they differ, for ragged ones."""
        texts = []
        for kind in (False, True):
            ends, names = self.length_ranges(requests, tokens, kind)
            words = [f"{name} up to {end} rows" for end, name in zip(ends, names[:-1], strict=False)]
            texts.append(", ".join([*words, f"then {names[-1]}" if words else names[-1]]))
        uniform, ragged = texts
        return uniform if uniform == ragged else f"{uniform}; of different lengths {ragged}"

    def expected(self, requests: int, length: int, tokens: int, ragged: bool = False) -> dict[str, float]:
        """Interpolated microseconds of each candidate; infinite if it was not measured there."""
        point = BatchPoint(self._rounded(requests), length, self._rounded(tokens), ragged)
        near = self._points.near(point, clamped=True)
        return {name: time_at(times, near) for name, times in self._filled.items()}

    def _rounded(self, count: int) -> int:
        """``count`` itself if it was measured, or else its leading bits."""
        drop = count.bit_length() - _LEADING_BITS
        return count if drop <= 0 or count in self._counts else (count >> drop) << drop

    def length_ranges(self, requests: int, tokens: int, ragged: bool) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Last KV length, in the end ``sys.maxsize``, and name of each fastest backend, by ascending length. Cached."""
        return self._ranges(self._rounded(requests), self._rounded(tokens), ragged)

    def _find_ranges(self, requests: int, tokens: int, ragged: bool) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Find the last length of each backend by bisection between measured lengths."""
        lengths = self._points.lengths(requests, tokens, ragged=ragged)
        before, ends, names = lengths[0], list[int](), [self._best(requests, lengths[0], tokens, ragged)]
        for end in lengths[1:]:
            at_end = self._best(requests, end, tokens, ragged)
            # Log-log times are straight between two measured lengths: the fastest at both ends is fastest in between.
            while names[-1] != at_end:
                low, high, following = before, end, at_end
                while high - low > 1:
                    middle = (low + high) // 2
                    best = self._best(requests, middle, tokens, ragged)
                    if best == names[-1]:
                        low = middle
                    else:
                        high, following = middle, best
                ends.append(low)
                names.append(following)
                before = high
            before = end
        return (*ends, sys.maxsize), tuple(names)

    def _best_within(self, requests: int, tokens: int, longest: int) -> str:
        rows = []
        for ragged in (False, True):
            lengths = self._points.lengths(requests, tokens, ragged=ragged)
            within = [length for length in lengths if length <= longest] or lengths[:1]
            rows += [self.expected(requests, length, tokens, ragged) for length in within]
        unknown = {name: sum(math.isinf(times[name]) for times in rows) for name in self.times}
        slowness = {
            name: [times[name] / min(times.values()) for times in rows if math.isfinite(times[name])]
            for name in self.times
        }
        score = {name: math.fsum(map(math.log, slow)) for name, slow in slowness.items()}
        return min(self.times, key=lambda name: (unknown[name], score[name], name))

    def _best(self, requests: int, length: int, tokens: int, ragged: bool = False) -> str:
        expected = self.expected(requests, length, tokens, ragged)
        return min(expected, key=lambda name: (expected[name], name))


class ExtendSchedule(BackendSchedule):
    """Fastest backend for each extend, mixed batches included. Its points need not form a grid.

    Batches are compared by the logarithms of their totals: requests, new tokens, and pairs of a new token and a row it
    attends to. The backend with the most points is the reference: its time per unit of work is the mean over the six
    nearest points, weighted by distance. Other backends are compared with it at the points that both have. A backend
    whose points are all far from a batch is not chosen for it.
    """

    def __init__(self, times: Mapping[str, Mapping[Any, float]]) -> None:
        super().__init__(times)
        self._places = [
            (_place([point.tokens] * point.requests, [point.length] * point.requests), point)
            for point in next(iter(self._filled.values()))
        ]
        self._nearby = lru_cache(_MOST_CACHED)(self._times_at)

    fastest = BackendSchedule._best

    def expected(self, requests: int, length: int, tokens: int, ragged: bool = False) -> dict[str, float]:
        return self.expected_extend([tokens] * requests, [length] * requests)

    def expected_extend(self, query_lens: Sequence[int], kv_lens: Sequence[int]) -> dict[str, float]:
        """Interpolated microseconds of each candidate for requests with these new tokens and KV lengths."""
        return self._nearby(_place(query_lens, kv_lens))

    def _times_at(self, place: tuple[int, ...]) -> dict[str, float]:
        near = sorted((max(math.dist(place, at), 0.1), point, _work(at)) for at, point in self._places)
        known = {name: [each for each in near if times[each[1]] < math.inf] for name, times in self._filled.items()}
        reference = max(known, key=lambda name: len(known[name]))
        base, farthest = self._filled[reference], known[reference][0][0] + _FAR
        time = _work(place) * _mean([(away, base[point] / work) for away, point, work in known[reference]], farthest)
        found = {}
        for name, times in self._filled.items():
            shared = [(away, times[point] / base[point]) for away, point, _ in known[name] if base[point] < math.inf]
            found[name] = time * _mean(shared, farthest)
        return found


def _mean(values: Sequence[tuple[float, float]], far: float) -> float:
    """Geometric mean, weighted by distance, of the first six of ``(distance, value)``; infinite if the first is far."""
    if not values or values[0][0] > far:
        return math.inf
    weights = [distance**-4 for distance, _ in values[:6]]
    logs = [math.log(value) for _, value in values[:6]]
    return math.exp(sum(weight * log for weight, log in zip(weights, logs, strict=True)) / sum(weights))


def _place(query_lens: Sequence[int], kv_lens: Sequence[int]) -> tuple[int, ...]:
    """Logarithms of a batch's totals in eighths of an octave, which bounds the number of cached places."""
    pairs = sum([new * (2 * kv - new + 1) for new, kv in zip(query_lens, kv_lens, strict=True)]) // 2
    return tuple(round(8 * math.log2(max(total, 1))) for total in (len(kv_lens), sum(query_lens), pairs))


def _work(place: tuple[int, ...]) -> float:
    """Work in pairs, with rough shares of each row and of the launch."""
    return 2 ** (place[2] / 8) + 512 * 2 ** (place[1] / 8) + (1 << 19)


def filled(times: Mapping[BatchPoint, float], points: Iterable[BatchPoint]) -> dict[BatchPoint, float]:
    """Times at ``points``: measured, or interpolated; infinite outside the measured grid."""
    grid = Grid(times)
    return {point: times.get(point) or time_at(times, grid.near(point, clamped=False)) for point in points}


def _between(axis: Sequence[int], value: int, clamped: bool) -> list[tuple[int, float]]:
    """One or two values of a sorted axis around ``value``, with their weights; none if it lies outside."""
    if not axis[0] <= value <= axis[-1]:
        return [(axis[0] if value < axis[0] else axis[-1], 1.0)] if clamped else []
    index = bisect_left(axis, value)
    if axis[index] == value:
        return [(value, 1.0)]
    low, high = axis[index - 1], axis[index]
    share = math.log(value / low) / math.log(high / low)
    return [(low, 1 - share), (high, share)]
