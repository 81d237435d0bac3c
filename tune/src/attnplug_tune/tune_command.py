"""``attnplug tune``: measure the backends that can serve a model, and store their times for ``auto``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from attnplug.auto.table_store import MeasuredTable, TableError, read_tables, table_path
from attnplug.cli import output
from attnplug.declare.device import Processor
from attnplug.machine.interrupt import raise_on_sigterm
from attnplug_tune.console import describe_unmeasured, print_fastest, progress, write_text
from attnplug_tune.process import in_own_process
from attnplug_tune.report import report_page
from attnplug_tune.results import row_of, rows_of_tables
from attnplug_tune.table_writing import ensure_writable, versions_of, write_tables
from attnplug_tune.tuning import Tuned, missing_tasks, tables_of, tune
from attnplug_tune.workload import Workload, read_workload


def tune_backends(parsed: argparse.Namespace) -> int:
    """Measure, write tables after every backend, and print the fastest one of each point."""
    work = read_workload(parsed)
    names, day = work.chosen(parsed.backends, parsed.render, auto=False), datetime.now(UTC).date().isoformat()
    path = table_path(work.processor) if parsed.tables is None else Path(parsed.tables)
    versions = {name: versions_of(work.registry.get(name), work.processor) for name in names}
    present = _present(path, work.processor)
    ensure_writable(path)
    have = [] if parsed.again else [table for table in present if table.versions == versions.get(table.backend)]
    jobs = [work.job(name) for name in names]
    num_tasks = {job.backend: len(job.tasks) for job in jobs}
    jobs = [replace(job, tasks=missing_tasks(job.tasks, job.backend, have)) for job in jobs]

    def finished(tuned: Tuned) -> None:
        if tables := tables_of(tuned, work.processor, versions[tuned.backend], day):
            write_tables(path, tables)

    with raise_on_sigterm(), progress(sum(len(job.tasks) for job in jobs), shown=not parsed.json) as report:
        try:
            results = tune(jobs, parsed.budget, in_own_process, report=report, finished=finished)
        except KeyboardInterrupt:
            kept = f"the points that were finished are in {path}" if os.path.exists(path) else "no point was finished"
            raise KeyboardInterrupt(f"while measuring; {kept}") from None
    tables = [table for table in _present(path, work.processor) if table.backend in names and _asked_for(table, work)]
    notes = [*work.notes, *(line for tuned in results for line in _lines(tuned, num_tasks[tuned.backend]))]
    rows = list(rows_of_tables(tables))
    if parsed.report is not None:
        title = f"attnplug tune on {work.processor.name}, {day}"
        write_text(parsed.report, report_page(title, rows, [*notes, f"Tables: {path}"]))
    if parsed.json:
        output.write_json(
            {"device": work.processor.name, "tables": str(path), "backends": [_as_json(each) for each in results]}
        )
    else:
        print_fastest(rows)
        print("\n".join(["", *notes, f"tables: {path}" + f", report: {parsed.report}" * bool(parsed.report)]))
    return 0 if rows else 1


def _present(path: Path, processor: Processor) -> tuple[MeasuredTable, ...]:
    """Tables of a file. Raises TableError if it cannot be read or is of another device; the user may remove it."""
    if not os.path.exists(path):
        return ()
    try:
        file = read_tables(path)
        if (file.device, file.sm) != (processor.name, processor.sm):
            raise TableError(f"{path} was measured on {Processor(file.device, file.sm)}, but this is {processor}")
    except TableError as error:
        raise TableError(f"{error.message}; remove it, or name another file with --tables") from error
    return file.tables


def _asked_for(table: MeasuredTable, work: Workload) -> bool:
    return any(table.shape == task.shape for task in work.job(table.backend).tasks)


def _lines(tuned: Tuned, num_tasks: int) -> Iterator[str]:
    """Summary line of a backend, and a line for each failure."""
    known = num_tasks - tuned.num_tasks
    count = len(tuned.timed)
    parts = [f"{count} point{'s' * (count != 1)} measured in {sum(each.seconds for each in tuned.timed):.1f} s"]
    parts += [f"{known} known before"] * bool(known)
    parts += [f"{len(tuned.skipped)} too large for memory"] * bool(tuned.skipped)
    parts += [f"{tuned.left} not reached within the budget"] * bool(tuned.left)
    parts += [f"{tuned.compile_s:.0f} s of compiling, not part of the budget"] * bool(tuned.compile_s)
    yield f"{tuned.backend}: {', '.join(parts)}"
    yield from map(describe_unmeasured, tuned.failed)


def _as_json(tuned: Tuned) -> dict[str, object]:
    rows = [row_of(each) for each in tuned.timed]
    return {
        "backend": tuned.backend,
        "rows": [{name: getattr(row, name) for name in row.__slots__ if name != "limit_us"} for row in rows],
        "left": tuned.left,
        "compile_s": tuned.compile_s,
        "skipped": [*map(describe_unmeasured, tuned.skipped)],
        "failed": [*map(describe_unmeasured, tuned.failed)],
    }
