"""Order in which ``auto`` prefers usable backends: by measured times, per role or per batch, or by preference."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple

from attnplug.auto.schedule import BackendSchedule, BatchPoint, ExtendSchedule, filled
from attnplug.auto.table_store import FoundTable, MeasuredShape, Plugins, load_tables
from attnplug.declare.errors import Refusal, RefusalCode, TableWarning, UsageError
from attnplug.declare.problem import DEFAULT_PAGE_SIZE, Problem, Role, model_dtype
from attnplug.declare.spec import Registered


class Ranked(NamedTuple):
    """Usable backends, the best first, with the reason in a few words.

    ``schedule`` gives the fastest of them per batch, if any. Its first candidate serves everything else.
    """

    backends: tuple[Registered, ...]
    why: str
    schedule: BackendSchedule | None = None


def by_preference(backend: Registered) -> tuple[bool, int, str]:
    """Sort key: plugins before embedded backends, then descending preference, then name."""
    return backend.source.embedded, -backend.spec.preference, backend.spec.name


def _why_preferred(chosen: Registered, *others: Registered) -> str:
    preference = chosen.spec.preference
    equal = [b for b in others if b.spec.preference == preference and b.source.embedded == chosen.source.embedded]
    passed_over = [b for b in others if b not in equal and b.spec.preference >= preference]  # embedded ones
    last = f"; the embedded default {_names(passed_over)} comes last" if passed_over else ""
    rivals = [b for b in others if b not in passed_over]
    if not rivals:
        return f"the only usable one{last}"
    if equal:
        return f"preference {preference}, equal with {_names(equal)}, first by name{last}"
    return f"preference {preference}, the highest of {1 + len(rivals)} usable, before {_names(rivals)}{last}"


def _names(backends: Iterable[Registered]) -> str:
    return ", ".join(backend.spec.name for backend in backends)


MOST_OCTAVES = 3.0
"""Largest distance of a layer's shape from a measured one: factors of two, summed over heads, widths, window, top-k."""
HOSTED_OCTAVES = 0.5
"""Distance between MLA absorbed by its host and the same layers in our engine. Most of a call is the same."""
TOLERANCE = 1.01
"""A backend joins a schedule only if some batch would take longer than the best time by this factor without it."""
NOT_MEASURED = 2.0
"""Slowness of a backend at a point where it was not measured."""
_SHOWN = {Role.PREFILL: BatchPoint(1, 4096, 4096), Role.DECODE: BatchPoint(1, 4096, 1)}
"""Batches whose times are shown, or the nearest measured ones."""
_MEASURED_AS = {Role.DRAFT: Role.DECODE}
_AGAIN = "measure it again by 'attnplug tune', or request it by name"

_warned: set[str] = set()
"""Faults that this process has reported. A host requests a ranking at several places."""

Times = Mapping[str, Mapping[BatchPoint, float]]


def default_ranking(registry: Plugins, problem: Problem, *, per_batch: bool = False) -> Ranking:
    """Ranking of ``auto``, ``default_ranking(registry, problem)``: by tables for this machine, or by preference.

    ``per_batch``: the host plans each batch with the backend that its role's schedule names. Otherwise roles get no
    schedule, and one backend serves all batches. The prefill of MLA that a host chunks and merges itself never gets a
    schedule. Each table that cannot be used is reported by a :class:`TableWarning`, once per process.
    """
    processor = next(iter(registry.processors(problem.device)), None)
    if processor is None or problem.sm not in (None, processor.sm):
        return BY_PREFERENCE
    tables = load_tables(registry, processor)
    for fault in tables.faults:
        if fault not in _warned:
            _warned.add(fault)
            warnings.warn(fault, TableWarning, stacklevel=2)
    return Ranking(tables.found, per_batch=per_batch)


@dataclass(frozen=True, slots=True)
class _Fit:
    """Tables by backend for one shape of a model's layers, and the number of layers with that shape."""

    count: int
    tables: Mapping[str, FoundTable]
    nearest: MeasuredShape | None
    """Measured shape, if it differs from the layers'."""


class Ranking:
    """Order of the backends that can serve a role, by measured tables or, without tables, by preference.

    Backends are ordered by the geometric mean, over all points, of their time divided by the best time.
    A model's time is the sum over its layers. Backends are compared at one shape: the model's own, or the nearest one
    at which two of them were measured. It has the same attention kind and dtypes; page sizes may differ. Backends
    without a table follow those with one, by preference. If only one backend, or only embedded ones, were measured,
    there is nothing to compare and preference decides. A backend that failed on this machine comes last.
    """

    def __init__(self, tables: Sequence[FoundTable] = (), *, per_batch: bool = False) -> None:
        self._tables = tuple(found for found in tables if not found.table.failed)
        self._failed = tuple(found.table for found in tables if found.table.failed)
        self._per_batch = per_batch

    def rank(self, usable: Sequence[Registered], role: Role, problem: Problem) -> Ranked:
        """Order all of ``usable``, which is not empty."""
        preferred = tuple(sorted(usable, key=by_preference))
        fits, times = self.measured(usable, role, problem)
        names = list(times)
        others = [b for b in preferred if b.spec.name not in names]
        beside_others = len(names) > 1 and not all(b.source.embedded for b in usable if b.spec.name in names)
        if not names or len(usable) == 1 or (others and not beside_others):
            return Ranked(preferred, _why_preferred(*preferred))
        # Points like the problem's batches, or all if there are none. A decode has one new token per request.
        found = sorted({point for of_backend in times.values() for point in of_backend})
        longest = math.inf if problem.model is None else problem.model.context_length
        one = role is Role.DRAFT or (role is Role.DECODE and not problem.speculative_tokens)
        points = [p for p in found if p.length <= longest and (p.tokens == 1 or not one)] or found
        at_points = {name: filled(of_backend, points) for name, of_backend in times.items()}
        best = {point: min(of_backend[point] for of_backend in at_points.values()) for point in points}
        slowness = {
            name: [of_backend[p] / best[p] if math.isfinite(of_backend[p]) else NOT_MEASURED for p in points]
            for name, of_backend in at_points.items()
        }
        score = {name: math.fsum(map(math.log, slow)) / len(points) for name, slow in slowness.items()}
        by_name = {backend.spec.name: backend for backend in usable}
        order = sorted(names, key=lambda name: (score[name], name))
        backends = (*(by_name[name] for name in order), *others)
        schedule = None
        by_host = problem.prefilled_by_host and role is Role.PREFILL
        by_batch = self._per_batch and role in (Role.PREFILL, Role.DECODE) and not by_host and not problem.invariant
        if by_batch and len(sharing := _sharing(slowness, order)) > 1:
            kind = ExtendSchedule if role is Role.PREFILL else BackendSchedule
            schedule = kind({name: times[name] for name in sharing})
        # One line: times at one point, the origin of the tables, and backends that were not measured.
        about = _SHOWN[_MEASURED_AS.get(role, role)]
        common = [point for point in points if all(point in of_backend for of_backend in times.values())]
        shown = min(common or points, key=lambda point: (sum(map(_octaves, point, about)), point))
        figures = [f"{name} {times[name][shown]:.1f}" for name in order if shown in times[name]]
        figures[0] += " µs"
        new = f" ({shown.tokens} new)" if shown.tokens > 1 else ""
        used = [fit.tables[name] for fit in fits for name in order]
        origins = sorted({f"{each.table.measured}, {each.origin.words}" for each in used}, reverse=True)
        first = "the fastest" if schedule is None else f"{' and '.join(schedule.candidates)} by batch, the fastest"
        parts = [
            f"{first} of {len(order)} at {len(points)} point{'s' * (len(points) > 1)}",
            f"{', '.join(figures)} at {shown.requests} × {shown.length}{new}",
            f"table of {' and of '.join(origins)}",
            *sorted({f"nearest shape: {fit.nearest}" for fit in fits if fit.nearest is not None}),
        ]
        if others:
            parts.append(f"not measured: {_names(sorted(others, key=by_preference))} ('attnplug tune' measures)")
        return Ranked(backends, "; ".join(parts), schedule)

    def failures(self, usable: Sequence[Registered], role: Role, problem: Problem) -> Mapping[str, Refusal]:
        """Refusals, by name, of backends that failed at a shape of the model's layers, on this machine and with the
        installed versions. These are ranked only if there are no others. Failures at other shapes or page sizes do not
        count."""
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

    def measured(self, usable: Sequence[Registered], role: Role, problem: Problem) -> tuple[list[_Fit], Times]:
        """Tables for each shape of the model's layers, and mean microseconds of a layer; empty if a shape has none."""
        names = [backend.spec.name for backend in usable]
        measured_as = _MEASURED_AS.get(role, role)
        tables = [each for each in self._tables if each.table.backend in names and each.table.role is measured_as]
        found = [_fit(shape, count, tables, len(usable)) for shape, count in _shapes(role, problem).items()]
        fits = [fit for fit in found if fit is not None]
        if not fits or len(fits) < len(found):
            return [], {}
        times: dict[str, dict[BatchPoint, float]] = {}
        for name in (name for name in names if all(name in fit.tables for fit in fits)):
            rows = [{BatchPoint(*row[:4]): row.microseconds for row in fit.tables[name].table.rows} for fit in fits]
            points = sorted({point for measured in rows for point in measured})
            parts = [(fit.count, filled(measured, points)) for fit, measured in zip(fits, rows, strict=True)]
            layers = sum(count for count, _ in parts)
            sums = {point: sum(count * part[point] for count, part in parts) / layers for point in points}
            # Points where all shapes of the model's layers were measured.
            times[name] = {point: time for point, time in sums.items() if math.isfinite(time)}
        return fits, {name: of_backend for name, of_backend in times.items() if of_backend}


BY_PREFERENCE = Ranking()


def _shapes(role: Role, problem: Problem) -> Counter[MeasuredShape]:
    """Number of layers of each shape that a role serves, per tensor-parallel rank."""
    model = problem.model
    if model is None or (dtype := problem.dtype or model_dtype(model)) is None:
        return Counter()
    try:
        model = model.for_rank(problem.tensor_parallel) if problem.tensor_parallel > 1 else model
    except UsageError:  # heads that cannot be divided are reported elsewhere
        return Counter()
    layers = model.linear_layers if role is Role.LINEAR else model.full_layers
    page_size = problem.page_size or math.lcm(DEFAULT_PAGE_SIZE, model.page_multiple)
    types, path = (dtype, problem.kv_dtype or dtype), problem.extend_path if role is Role.PREFILL else None
    return Counter(MeasuredShape.of(layer, types, page_size, problem.absorbed_by_host, path) for layer in layers)


def _fit(shape: MeasuredShape, count: int, tables: Sequence[FoundTable], usable: int) -> _Fit | None:
    """Tables of the nearest measured shape, preferably one at which two backends were measured."""
    groups: dict[MeasuredShape, dict[str, FoundTable]] = {}
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


def _distance(measured: MeasuredShape, shape: MeasuredShape) -> float:
    """Distance of two shapes in factors of two, page sizes aside; infinite if their times are not comparable."""
    for name in ("kind", "dtype", "kv_dtype", "path"):
        if getattr(measured, name) != getattr(shape, name):
            return math.inf
    if bool(measured.window) != bool(shape.window) or bool(measured.topk) != bool(shape.topk):
        return math.inf
    widths = ("num_heads", "num_kv_heads", "head_dim", "value_dim", "window", "topk")
    apart = HOSTED_OCTAVES * (measured.hosted is not shape.hosted)
    return apart + sum(_octaves(getattr(measured, name), getattr(shape, name)) for name in widths)


def _octaves(one: int, other: int) -> float:
    return abs(math.log2(max(one, 1) / max(other, 1)))


def _sharing(slowness: Mapping[str, Sequence[float]], order: Sequence[str]) -> tuple[str, ...]:
    """Smallest set of backends that serves every point within ``TOLERANCE`` of the best; of several, the fastest."""
    for size in range(1, len(order) + 1):
        found = []
        for names in combinations(order, size):
            least = [min(at_point) for at_point in zip(*(slowness[name] for name in names), strict=True)]
            if max(least) <= TOLERANCE:
                found.append((math.fsum(map(math.log, least)), names))
        if found:
            return min(found)[1]
    raise AssertionError("all backends together are as fast as the best")
