"""Tuning: measure all usable backends within one budget and make tables of the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from attnplug.auto.table_store import MeasuredShape, MeasuredTable, Measurement
from attnplug.declare.device import Processor
from attnplug.declare.problem import Role
from attnplug_tune.measure import Failed, Job, Outcome, Skipped, Timed
from attnplug_tune.points import Point
from attnplug_tune.process import RunJob
from attnplug_tune.shapes import Task

_LONGEST_REASON = 300
Subject = tuple[Role, MeasuredShape]
"""Key of a backend's table."""


@dataclass(slots=True)
class Tuned:
    """Outcomes of one backend."""

    backend: str
    num_tasks: int
    """Number of its tasks."""
    timed: list[Timed] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)

    @property
    def compile_s(self) -> float:
        return sum(each.compile_s for each in self.timed)

    @property
    def left(self) -> int:
        """Number of tasks that the budget did not allow."""
        if self.failed:
            return 0  # tasks skipped because of a failure are reported with it
        return self.num_tasks - len(self.timed) - len(self.skipped)

    @property
    def broken(self) -> dict[Subject, str]:
        """One-line reasons of its failures. Each excludes the whole table."""
        return {
            (each.task.point.role, each.task.shape): f"at {each.task.point}, {_one_line(each.reason)}"
            for each in reversed(self.failed)
        }

    def rows(self) -> dict[Subject, list[Measurement]]:
        """Measurements by table, without those of failed ones."""
        found: dict[Subject, list[Measurement]] = {}
        for each in self.timed:
            subject = each.task.point.role, each.task.shape
            if subject not in self.broken:
                found.setdefault(subject, []).append(each.measured)
        return found


def tune(
    jobs: Sequence[Job],
    seconds: float,
    run: RunJob,
    *,
    report: Callable[[Outcome], None] = lambda outcome: None,
    finished: Callable[[Tuned], None] = lambda tuned: None,
) -> list[Tuned]:
    """Run jobs one after the other. The remaining budget is shared evenly by the remaining jobs.

    Compiling and process start-up do not count. ``report`` is called with every outcome. ``finished`` is called after
    every backend with its outcomes so far, also if its process ended or the user interrupted.
    """
    results, left = [], seconds
    for number, job in enumerate(jobs):
        tuned = Tuned(job.backend, len(job.tasks))
        results.append(tuned)
        if not job.tasks:
            continue
        try:
            for outcome in run(replace(job, seconds=left / (len(jobs) - number))):
                report(outcome)
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
    """Tables of a backend, one per role and layer shape: its times, or its failure."""
    rows, broken = tuned.rows(), tuned.broken
    return [
        MeasuredTable(
            processor.name,
            processor.sm,
            tuned.backend,
            *subject,
            tuple(rows.get(subject, ())),
            versions,
            day,
            broken.get(subject, ""),
        )
        for subject in (*rows, *broken)
    ]


def _one_line(text: str) -> str:
    line = "".join(char if char.isprintable() else " " for char in text)
    return " ".join(line.split())[:_LONGEST_REASON]


def missing_tasks(tasks: Iterable[Task], backend: str, tables: Iterable[MeasuredTable]) -> tuple[Task, ...]:
    """Tasks that a backend's tables do not cover yet."""
    have = {
        (table.shape, Point(table.role, *row[:4])) for table in tables if table.backend == backend for row in table.rows
    }
    return tuple(task for task in tasks if (task.shape, task.point) not in have)
