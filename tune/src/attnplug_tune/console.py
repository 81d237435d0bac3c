"""Console output of ``tune`` and ``bench``, their progress bar, and the files they write."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from attnplug.cli.output import table
from attnplug.declare.errors import UsageError
from attnplug_tune.measure import Failed, Outcome, Skipped, Timed
from attnplug_tune.results import BenchRow, by_point, sides_of


class ProgressReport:
    """Progress bar on standard error if it is a terminal. Tasks that were not measured get a line each."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar, self._task = bar, task

    def __call__(self, outcome: Outcome) -> None:
        if isinstance(outcome, Timed):
            point = f"{outcome.side}: {outcome.task.point.role} {outcome.task.point}"
            self._bar.update(self._task, advance=1, description=point)
        else:
            print(describe_unmeasured(outcome), file=sys.stderr)


@contextmanager
def progress(tasks: int, *, shown: bool) -> Iterator[ProgressReport]:
    console = Console(stderr=True, highlight=False, markup=False)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        yield ProgressReport(bar, bar.add_task("measuring", total=tasks))


def describe_unmeasured(outcome: Skipped | Failed) -> str:
    """One line: a task that was not measured, and the reason."""
    reason = " ".join(outcome.reason.split())
    if isinstance(outcome, Skipped):
        return f"{outcome.side}: {outcome.task} is left out: {reason}"
    role, shape = outcome.task.point.role, outcome.task.shape
    return f"{outcome.side}: left out for {role} of {shape}, because of {outcome.task.point}: {reason}"


def print_fastest(rows: Sequence[BenchRow]) -> None:
    """Print a table for each role and layer: the times of every side, and the fastest one of each point."""
    for (layer, role), points in by_point(rows).items():
        sides = sides_of(points)
        lines = []
        for point, found in points.items():
            best = min(found.values(), key=lambda row: (row.us, row.side))
            cells = [found[side].label if side in found else "" for side in sides]
            share = "" if best.share is None else f" ({best.share:.0%} of the limit)"
            lines.append([str(point), best.side + share, *cells])
        print(f"\n{role}: {layer}, µs per call\n{table(['point', 'fastest', *sides], lines)}")


def write_text(path: str, text: str) -> None:
    """Write a requested file. Raises UsageError if it cannot be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
