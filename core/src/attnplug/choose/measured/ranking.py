"""Which backends ``auto`` takes by measured times: the best one for a role, or the fastest one for each batch."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from attnplug.choose.loading import Registered
from attnplug.choose.measured.store import FoundTable, load_tables
from attnplug.choose.ranking import BY_PREFERENCE, Ranked, Ranking, by_preference
from attnplug.choose.registry import Registry
from attnplug.choose.select import DEFAULT_PAGE_SIZE
from attnplug.declare.errors import TableWarning, UsageError
from attnplug.declare.measured import LayerShape
from attnplug.declare.problem import Problem, Role, model_dtype
from attnplug.declare.refusal import Refusal, RefusalCode
from attnplug.declare.schedule import Point, Schedule, filled
from attnplug.machine.hardware import this_processor

MOST_OCTAVES = 3.0
"""How far a shape may be from the one that was measured: factors of two, added over heads, widths, window and rows
chosen."""
OF_HOSTS = 0.5
"""How far MLA that a host absorbs is from the same layers in an engine of ours: most of a call is the same."""
TOLERANCE = 1.01
"""A backend takes part in a schedule only if without it some batch would take longer than the best by this factor."""
NOT_MEASURED = 2.0
"""A point at which a backend was not measured counts as if it took twice the best time."""
_SHOWN = Point(1, 4096, 1)
"""The batch whose times are told, or the measured one that is nearest to it."""
_MEASURED_AS = {Role.DRAFT: Role.DECODE}
_AGAIN = "measure it again by 'attnplug tune', or ask for it by name"
_BY_BATCH = (Role.PREFILL, Role.DECODE)

_told: set[str] = set()
"""Faults that this process was warned of: a host asks for a ranking at several places."""

Times = Mapping[str, Mapping[Point, float]]


def default_ranking(registry: Registry, problem: Problem, *, per_batch: bool = False) -> Ranking:
    """How ``auto`` ranks: by measured tables that hold for this machine, or by preference if there are none.

    ``per_batch``: the host plans each batch with the backend that its role's schedule names. Otherwise a role gets no
    schedule, and one backend for all batches. The prefill of MLA that a host chunks and merges itself never gets one.
    Tables that cannot be used are told by a :class:`TableWarning` each, once in a process.
    """
    processor = this_processor(problem.device, problem.sm)
    if processor is None:
        return BY_PREFERENCE
    tables = load_tables(registry, processor)
    for fault in tables.faults:
        if fault not in _told:
            _told.add(fault)
            warnings.warn(fault, TableWarning, stacklevel=2)
    return MeasuredRanking(tables.found, per_batch=per_batch) if tables.found else BY_PREFERENCE


@dataclass(frozen=True, slots=True)
class _Fit:
    """The tables that stand for one shape of a model's layers, by backend, and how many layers have that shape."""

    count: int
    tables: Mapping[str, FoundTable]
    nearest: LayerShape | None
    """The shape that was measured, where it is not the same."""


class MeasuredRanking:
    """By measured times: the geometric mean, over all points, of a backend's time by the best time there.

    A model's time is the sum over its layers. All backends are compared at one shape, which is the model's own or the
    nearest that two of them were measured at. It has the same kind of attention and types. Page sizes may differ.
    Backends without a table come after those that have one, by preference. One backend's times say nothing of others':
    where a single one was measured, or embedded ones alone, preference decides. A backend that failed on this machine
    comes after all others.
    """

    def __init__(self, tables: Sequence[FoundTable], *, per_batch: bool = False) -> None:
        self._tables = tuple(found for found in tables if not found.table.failed)
        self._failed = tuple(found.table for found in tables if found.table.failed)
        self._per_batch = per_batch

    def rank(self, usable: Sequence[Registered], role: Role, problem: Problem) -> Ranked:
        preferred = BY_PREFERENCE.rank(usable, role, problem)
        fits = self._fits(usable, role, problem)
        present = [b.spec.name for b in usable if fits and all(b.spec.name in fit.tables for fit in fits)]
        times = {name: found for name in present if (found := _model_times(name, fits))}
        names = list(times)
        others = [b for b in preferred.backends if b.spec.name not in names]
        beside_others = len(names) > 1 and not all(b.source.embedded for b in usable if b.spec.name in names)
        if not names or len(usable) == 1 or (others and not beside_others):
            return preferred
        points = _served({point for of_backend in times.values() for point in of_backend}, role, problem)
        slowness = _slowness({name: filled(of_backend, points) for name, of_backend in times.items()}, points)
        score = {name: math.fsum(map(math.log, slow)) / len(points) for name, slow in slowness.items()}
        by_name = {backend.spec.name: backend for backend in usable}
        order = sorted(names, key=lambda name: (score[name], name))
        backends = (*(by_name[name] for name in order), *others)
        schedule = None
        by_batch = self._per_batch and role in _BY_BATCH and not (role is Role.PREFILL and problem.prefilled_by_host)
        if by_batch and len(sharing := _sharing(slowness, order)) > 1:
            schedule = Schedule({name: times[name] for name in sharing})
        return Ranked(backends, _why(order, points, times, fits, others, schedule), schedule)

    def failures(self, usable: Sequence[Registered], role: Role, problem: Problem) -> Mapping[str, Refusal]:
        """The backends that failed at a shape of the model's layers, on this machine and with what is installed now.

        Failures at other shapes, or at other pages than those asked for, say nothing.
        """
        names, shapes = {backend.spec.name for backend in usable}, set(_shapes(role, problem))
        found: dict[str, Refusal] = {}
        for table in self._failed:
            pages = problem.page_size or table.shape.page_size
            if (
                table.backend in names
                and table.role is _MEASURED_AS.get(role, role)
                and table.shape in {replace(shape, page_size=pages) for shape in shapes}
            ):
                message = f"it failed when it was measured on this machine, on {table.measured}: {table.failed}"
                found[table.backend] = Refusal(RefusalCode.MEASURED, message, value=table.backend, advice=_AGAIN)
        return found

    def _fits(self, usable: Sequence[Registered], role: Role, problem: Problem) -> list[_Fit]:
        """The tables for each shape of the model's layers; nothing if some shape has none."""
        names = {backend.spec.name for backend in usable}
        tables = [
            found
            for found in self._tables
            if found.table.backend in names and found.table.role is _MEASURED_AS.get(role, role)
        ]
        fits = [_fit(shape, count, tables, len(usable)) for shape, count in _shapes(role, problem).items()]
        found = [fit for fit in fits if fit is not None]
        return found if len(found) == len(fits) else []


def _served(points: Iterable[Point], role: Role, problem: Problem) -> list[Point]:
    """The points that the problem has batches like, or all if there are none: lengths within the model's context, and
    one new token for each request unless these are prefilled or verified."""
    found = sorted(points)
    longest = math.inf if problem.model is None else problem.model.context_length
    one = role is Role.DRAFT or (role is Role.DECODE and not problem.speculative_tokens)
    return [p for p in found if p.length <= longest and (p.tokens == 1 or not one)] or found


def _shapes(role: Role, problem: Problem) -> Counter[LayerShape]:
    """The shapes of the layers that a role serves, as one rank has them, and how many have each."""
    model = problem.model
    if model is None or (dtype := problem.dtype or model_dtype(model)) is None:
        return Counter()
    try:
        model = model.for_rank(problem.tensor_parallel) if problem.tensor_parallel > 1 else model
    except UsageError:  # the heads cannot be divided, which is for others to say
        return Counter()
    layers = model.linear_layers if role is Role.LINEAR else model.full_layers
    page_size = problem.page_size or math.lcm(DEFAULT_PAGE_SIZE, model.page_multiple)
    kv_dtype, by_host = problem.kv_dtype or dtype, problem.mla_by_host
    return Counter(LayerShape.of(layer, dtype, kv_dtype, page_size, mla_by_host=by_host) for layer in layers)


def _fit(shape: LayerShape, count: int, tables: Sequence[FoundTable], usable: int) -> _Fit | None:
    """The tables of the measured shape that is nearest to a layer's, among those at which backends can be compared."""
    groups: dict[LayerShape, dict[str, FoundTable]] = {}
    for found in sorted(
        tables, key=lambda each: (_octaves(each.table.shape.page_size, shape.page_size), each.table.title)
    ):
        if _distance(found.table.shape, shape) <= MOST_OCTAVES:
            group = groups.setdefault(replace(found.table.shape, page_size=shape.page_size), {})
            group.setdefault(found.table.backend, found)
    if not groups:
        return None
    compared = min(usable, 2)
    best = min(groups, key=lambda near: (len(groups[near]) < compared, _distance(near, shape), str(near)))
    return _Fit(count, groups[best], None if best == shape else best)


def _distance(measured: LayerShape, shape: LayerShape) -> float:
    """How many factors of two lie between two shapes, page sizes aside; infinite if times say nothing of each other."""
    for name in ("kind", "dtype", "kv_dtype"):
        if getattr(measured, name) is not getattr(shape, name):
            return math.inf
    if bool(measured.window) != bool(shape.window) or bool(measured.topk) != bool(shape.topk):
        return math.inf
    widths = ("num_heads", "num_kv_heads", "head_dim", "value_dim", "window", "topk")
    apart = OF_HOSTS * (measured.hosted is not shape.hosted)
    return apart + sum(_octaves(getattr(measured, name), getattr(shape, name)) for name in widths)


def _octaves(one: int, other: int) -> float:
    return abs(math.log2(max(one, 1) / max(other, 1)))


def _model_times(name: str, fits: Iterable[_Fit]) -> dict[Point, float]:
    """Microseconds of a layer by point: the mean over a model's layers, where all of their shapes were measured."""
    rows = [(fit.count, {Point(*row[:4]): row.microseconds for row in fit.tables[name].table.rows}) for fit in fits]
    points = sorted({point for _, times in rows for point in times})
    layers = sum(count for count, _ in rows)
    parts = [(count, filled(times, points)) for count, times in rows]
    sums = {point: sum(count * times[point] for count, times in parts) / layers for point in points}
    return {point: time for point, time in sums.items() if math.isfinite(time)}


def _slowness(times: Times, points: Sequence[Point]) -> dict[str, list[float]]:
    """How many times as long as the best one each takes, point by point."""
    best = {point: min(of_backend[point] for of_backend in times.values()) for point in points}
    return {
        name: [of_backend[p] / best[p] if math.isfinite(of_backend[p]) else NOT_MEASURED for p in points]
        for name, of_backend in times.items()
    }


def _sharing(slowness: Mapping[str, Sequence[float]], order: Sequence[str]) -> tuple[str, ...]:
    """As few backends as serve every point within the tolerance of the best; of several such sets, the best one."""
    for size in range(1, len(order) + 1):
        found = []
        for names in combinations(order, size):
            least = [min(at_point) for at_point in zip(*(slowness[name] for name in names), strict=True)]
            if max(least) <= TOLERANCE:
                found.append((math.fsum(map(math.log, least)), names))
        if found:
            return min(found)[1]
    raise AssertionError("all of them together are as fast as the best")


def _why(
    order: Sequence[str],
    points: Sequence[Point],
    times: Times,
    fits: Sequence[_Fit],
    others: Sequence[Registered],
    schedule: Schedule | None,
) -> str:
    """In one line: times at one point, where they come from, and what was not measured."""
    common = [point for point in points if all(point in times[name] for name in order)]
    shown = min(common or points, key=lambda point: (sum(map(_octaves, point, _SHOWN)), point))
    figures = [f"{name} {times[name][shown]:.1f}" for name in order if shown in times[name]]
    figures[0] += " µs"
    new = f" ({shown.tokens} new)" if shown.tokens > 1 else ""
    used = [fit.tables[name] for fit in fits for name in order]
    origins = sorted({f"{each.table.measured}, {each.origin.words}" for each in used}, reverse=True)
    nearest = sorted({str(fit.nearest) for fit in fits if fit.nearest is not None})
    best = "the fastest" if schedule is None else f"{' and '.join(schedule.candidates)} by batch, the fastest"
    parts = [
        f"{best} of {len(order)} at {len(points)} point{'s' * (len(points) > 1)}",
        f"{', '.join(figures)} at {shown.requests} × {shown.length}{new}",
        f"table of {' and of '.join(origins)}",
        *(f"nearest shape: {each}" for each in nearest),
    ]
    if others:
        listed = ", ".join(backend.spec.name for backend in sorted(others, key=by_preference))
        parts.append(f"not measured: {listed} ('attnplug tune' measures)")
    return "; ".join(parts)
