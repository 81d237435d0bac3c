"""Results of a benchmark, as files that can be compared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from attnplug.auto.table_store import MeasuredTable
from attnplug.declare.errors import UsageError
from attnplug.declare.problem import Role
from attnplug.hf.config_keys import read_json_object
from attnplug_tune.measure import Timed
from attnplug_tune.points import Point
from attnplug_tune.raw import RAW

SCHEMA = 3
_MOST = 1 << 40
SLOWER = 1.05
"""Factor beyond which a median counts as slower, if the ranges between quartiles do not overlap."""


@dataclass(frozen=True, slots=True)
class BenchRow:
    """Time of one call of one side (a backend, or its library called directly), in microseconds.

    ``limit_us`` is the time to move each byte once at the bandwidth measured in the same run. It is 0 if there is none,
    and for prefills, which are bound by compute. ``planned_by`` is the backend that ``auto`` chose.
    """

    side: str
    layer: str
    role: str
    requests: int
    length: int
    tokens: int
    ragged: bool
    us: float
    low: float
    high: float
    limit_us: float = 0.0
    planned_by: str = ""
    decodes: int = 0
    decode_length: int = 0

    @property
    def label(self) -> str:
        """Microseconds, with the backend that ``auto`` chose."""
        return f"{self.us:.1f}" + f" ({self.planned_by})" * bool(self.planned_by)

    @property
    def point(self) -> Point:
        counts = self.requests, self.length, self.tokens
        return Point(Role(self.role), *counts, self.ragged, self.decodes, self.decode_length)

    @property
    def share(self) -> float | None:
        """Share of the bandwidth limit that was reached; None without a limit."""
        return self.limit_us / self.us if self.limit_us else None

    @property
    def key(self) -> tuple[object, ...]:
        return self.side, self.layer, self.point


def row_of(timed: Timed, bandwidth: float = 0.0) -> BenchRow:
    """Row of a measured task. ``bandwidth`` is in bytes per second."""
    task, measured = timed.task, timed.measured
    bounded = bandwidth and task.point.role is not Role.PREFILL
    return BenchRow(
        timed.side,
        str(task.shape),
        str(task.point.role),
        measured.requests,
        measured.length,
        measured.tokens,
        measured.ragged,
        measured.microseconds,
        measured.low,
        measured.high,
        1e6 * task.moved_bytes() / bandwidth if bounded else 0.0,
        timed.planned_by,
        task.point.decodes,
        task.point.decode_length,
    )


def rows_of_tables(tables: Iterable[MeasuredTable]) -> Iterator[BenchRow]:
    for table in tables:
        for row in table.rows:
            yield BenchRow(table.backend, str(table.shape), str(table.role), *row)


@dataclass(frozen=True, slots=True)
class Results:
    """Results of a benchmark. ``header`` has the device, date and versions."""

    header: Mapping[str, object]
    rows: tuple[BenchRow, ...]
    failed: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        return str(self.header.get("device", "?"))

    def as_json(self) -> dict[str, object]:
        rows = [{**asdict(row), "share": row.share} for row in self.rows]
        return {"schema": SCHEMA, **self.header, "rows": rows, "failed": list(self.failed)}


def read_results(path: Path) -> Results:
    """Read a results file. Raises UsageError, whatever is wrong with it."""
    data = read_json_object(path)
    if (found := data.pop("schema", None)) != SCHEMA:
        raise UsageError(f"{path} has schema {found!r}, not {SCHEMA}; measure again with this version's attnplug bench")
    rows, failed = data.pop("rows", None), data.pop("failed", None)
    if not isinstance(rows, list) or not isinstance(failed, list):
        raise UsageError(f"{path} holds no results of attnplug bench: it lacks rows or failures")
    try:
        read = {row.key: row for row in map(_row, rows)}
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} has a row that attnplug bench did not write: {error!r}") from error
    if len(read) < len(rows):
        raise UsageError(f"{path} has two rows of one side and point; attnplug bench writes one")
    return Results(data, tuple(read.values()), tuple(map(str, failed)))


def _row(data: Mapping[str, object]) -> BenchRow:
    values = {each.name: data[each.name] for each in fields(BenchRow)}
    for name, value in values.items():
        if name in ("side", "layer", "role", "planned_by"):
            Role(str(value)) if name == "role" else None
            right = isinstance(value, str) and value.isprintable()
        elif name in ("requests", "length", "tokens", "decodes", "decode_length"):
            right = type(value) is int and (not name.startswith("decode")) <= value < _MOST
        elif name == "ragged":
            right = type(value) is bool
        else:
            least = 0 if name == "limit_us" else 1e-9
            right = type(value) in (int, float) and least <= value < _MOST  # type: ignore[operator] # a number
        if not right:
            raise ValueError(f"{name}={value!r}")
    row = BenchRow(**values)  # type: ignore[arg-type] # each was checked
    if not row.low <= row.us <= row.high:
        raise ValueError(f"us={row.us:g} is not from low={row.low:g} to high={row.high:g}")
    return row


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences of new results from old ones, beyond noise."""

    slower: tuple[str, ...]
    faster: tuple[str, ...]
    gone: tuple[str, ...]
    """Rows that are missing in the new results."""
    common: int


def compare(old: Results, new: Results) -> Comparison:
    """Compare two results of the same device. Raises UsageError for others."""
    if old.device != new.device:
        raise UsageError(f"results of {old.device} and of {new.device} cannot be compared; measure both on one device")
    now = {row.key: row for row in new.rows}
    slower, faster, gone, common = [], [], [], 0
    for before in old.rows:
        after = now.get(before.key)
        title = f"{before.side}, {before.role} {before.point} ({before.layer})"
        if after is None:
            gone.append(title)
            continue
        common += 1
        line = (
            f"{title}: {before.us:.1f} µs ({before.low:.1f}–{before.high:.1f}) → "
            f"{after.us:.1f} ({after.low:.1f}–{after.high:.1f}), × {after.us / before.us:.2f}"
        )
        if after.low > before.high and after.us > SLOWER * before.us:
            slower.append(line)
        elif after.high < before.low and before.us > SLOWER * after.us:
            faster.append(line)
    if not common:
        raise UsageError("these results have no measurement in common; measure the same backends, layers and points")
    return Comparison(tuple(slower), tuple(faster), tuple(gone), common)


@dataclass(frozen=True, slots=True)
class Standing:
    """Time of a side relative to the fastest backend, over the points where the side was measured."""

    side: str
    points: int
    mean: float
    """Geometric mean of the factors."""
    worst: float
    where: str

    def __str__(self) -> str:
        points = f"{self.points} point{'s' * (self.points > 1)}"
        mean = f"{self.mean:.2f} × the fastest backend's time on average over {points}"
        return f"{self.side}: {mean}, at most {self.worst:.2f} × ({self.where})"


def standings(rows: Sequence[BenchRow]) -> list[Standing]:
    """Compare every side with the fastest backend of each point, the best on average first. Libraries are never it."""
    factors: dict[str, list[tuple[float, str]]] = {}
    for (layer, role), points in by_point(rows).items():
        for point, found in points.items():
            best = min((row.us for side, row in found.items() if not side.startswith(RAW)), default=0.0)
            for side, row in found.items():
                if best:
                    factors.setdefault(side, []).append((row.us / best, f"{role} {point}, {layer}"))
    made = [
        Standing(side, len(each), math.exp(math.fsum(math.log(factor) for factor, _ in each) / len(each)), *max(each))
        for side, each in factors.items()
    ]
    return sorted(made, key=lambda standing: (standing.mean, standing.side))


def by_point(rows: Sequence[BenchRow]) -> dict[tuple[str, str], dict[Point, dict[str, BenchRow]]]:
    """Rows by (layer, role), then by point, then by side."""
    found: dict[tuple[str, str], dict[Point, dict[str, BenchRow]]] = {}
    for row in sorted(rows, key=_place):
        found.setdefault((row.layer, row.role), {}).setdefault(row.point, {})[row.side] = row
    return found


def sides_of(points: Mapping[Point, Mapping[str, BenchRow]]) -> list[str]:
    """Names of all sides, sorted."""
    return sorted({side for found in points.values() for side in found})


def _place(row: BenchRow) -> tuple[object, ...]:
    return row.layer, row.role, row.ragged, row.decodes, row.tokens, row.requests, row.length, row.side
