"""Tuning: all usable backends within one budget, and the tables that come of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from attnplug.auto.measurement import MeasuredShape, MeasuredTable, Measurement
from attnplug.declare.problem import Role
from attnplug.machine.hardware import Processor
from attnplug.tune.measure import Failed, Job, Outcome, Skipped, Timed
from attnplug.tune.points import Point
from attnplug.tune.process import RunJob
from attnplug.tune.shapes import Task

_LONGEST_REASON = 300
Sort = tuple[Role, MeasuredShape]
"""What one table of a backend is about."""


@dataclass(slots=True)
class Tuned:
    """What came of one backend."""

    backend: str
    asked: int
    """Tasks that it was to be measured at."""
    timed: list[Timed] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)

    @property
    def compile_s(self) -> float:
        return sum(each.compile_s for each in self.timed)

    @property
    def left(self) -> int:
        """Tasks for which there was no time."""
        if self.failed:
            return 0  # those of the failing sorts were not tried, and which ones they are is told
        return self.asked - len(self.timed) - len(self.skipped)

    @property
    def broken(self) -> dict[Sort, str]:
        """What it failed at, and in one line why. It is left out for it as a whole."""
        return {
            (each.task.point.role, each.task.shape): f"at {each.task.point}, {_one_line(each.reason)}"
            for each in reversed(self.failed)
        }

    def rows(self) -> dict[Sort, list[Measurement]]:
        """What was measured, by table."""
        found: dict[Sort, list[Measurement]] = {}
        for each in self.timed:
            sort = each.task.point.role, each.task.shape
            if sort not in self.broken:
                found.setdefault(sort, []).append(each.measured)
        return found


def tune(
    jobs: Sequence[Job],
    seconds: float,
    run: RunJob,
    *,
    told: Callable[[Outcome], None] = lambda outcome: None,
    finished: Callable[[Tuned], None] = lambda tuned: None,
) -> list[Tuned]:
    """Run jobs one after the other. What is left of the budget is shared evenly by those that are left.

    Compiling, and starting a process, is outside of the budget. ``finished`` is called after every backend with all
    that there is of it: if its process ended or the user interrupted, too.
    """
    results, left = [], seconds
    for number, job in enumerate(jobs):
        tuned = Tuned(job.backend, len(job.tasks))
        results.append(tuned)
        if not job.tasks:
            continue
        try:
            for outcome in run(replace(job, seconds=left / (len(jobs) - number))):
                told(outcome)
                if isinstance(outcome, Timed):
                    tuned.timed.append(outcome)
                    left -= outcome.seconds
                elif isinstance(outcome, Skipped):
                    tuned.skipped.append(outcome)
                else:
                    tuned.failed.append(outcome)
        finally:
            finished(tuned)
    return results


def tables_of(tuned: Tuned, processor: Processor, versions: Mapping[str, str], day: str) -> list[MeasuredTable]:
    """A table for each role and sort of layer: of its times, or of its failure there."""
    rows, broken = tuned.rows(), tuned.broken
    return [
        MeasuredTable(
            processor.name,
            processor.sm,
            tuned.backend,
            *sort,
            tuple(rows.get(sort, ())),
            versions,
            day,
            broken.get(sort, ""),
        )
        for sort in (*rows, *broken)
    ]


def _one_line(text: str) -> str:
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    return " ".join(line.split())[:_LONGEST_REASON]


def not_yet(tasks: Iterable[Task], backend: str, tables: Iterable[MeasuredTable]) -> tuple[Task, ...]:
    """The tasks that a backend's tables do not have yet."""
    have = {
        (table.shape, Point(table.role, *row[:4])) for table in tables if table.backend == backend for row in table.rows
    }
    return tuple(task for task in tasks if (task.shape, task.point) not in have)
