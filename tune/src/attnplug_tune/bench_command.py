"""``attnplug bench``: compare backends with each other, their libraries and the bandwidth limit; or two results."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from attnplug.cli import output
from attnplug.machine.interrupt import raise_on_sigterm
from attnplug.machine.runtime import runtime_of
from attnplug.registry.selection import AUTO
from attnplug_tune.charts import rows_as_svg
from attnplug_tune.console import describe_unmeasured, print_fastest, progress, write_text
from attnplug_tune.measure import Failed, Timed
from attnplug_tune.place import bandwidth, commit
from attnplug_tune.process import in_own_process
from attnplug_tune.report import report_page
from attnplug_tune.results import BenchRow, Comparison, Results, compare, read_results, row_of, standings
from attnplug_tune.table_writing import versions_of
from attnplug_tune.workload import Workload, read_workload


def bench(parsed: argparse.Namespace) -> int:
    """Measure and print, or compare two results."""
    if parsed.compare is not None:
        return _compared(*map(Path, parsed.compare), json=parsed.json)
    work = read_workload(parsed)
    names = work.chosen(parsed.backends, parsed.render)
    jobs = [work.job(name, raw=parsed.against == "raw") for name in names]
    rate = bandwidth(work.device)
    if (module := runtime_of(work.device).module) is not None:
        module.empty_cache()  # for the processes that measure
    rows, failed = [], []
    header = _header(work, names, rate)
    try:
        with raise_on_sigterm(), progress(sum(len(job.tasks) for job in jobs), shown=not parsed.json) as report:
            for job in jobs:
                for outcome in in_own_process(job):
                    report(outcome)
                    if isinstance(outcome, Timed):
                        rows.append(row_of(outcome, rate))
                    else:
                        failed.append(outcome)
    finally:  # an interrupted run keeps the points that were finished
        results = Results(header, tuple(rows), tuple(map(describe_unmeasured, failed)))
        if parsed.out is not None:
            write_text(parsed.out, json.dumps(results.as_json(), indent=1) + "\n")
        if parsed.plot is not None:
            write_text(parsed.plot, _plotted(parsed.plot, rows, header, results.failed))
    if parsed.json:
        output.write_json(results.as_json())
    else:
        print_fastest(rows)
        limit = f"limit: {rate / 1e9:.0f} GB/s, plain reading or copying"
        print("\n".join(["", *map(str, standings(rows)), limit, *work.notes, *results.failed]))
    return 1 if not rows or any(isinstance(each, Failed) for each in failed) else 0


def _plotted(path: str, rows: list[BenchRow], header: Mapping[str, object], notes: Sequence[str]) -> str:
    """Draw the results in the format of the file's suffix: SVG, or an HTML page with tables."""
    if Path(path).suffix.lower() == ".svg":
        return rows_as_svg(rows) + "\n"
    return report_page(f"attnplug bench on {header['device']}, {str(header['date'])[:10]}", rows, notes)


def _header(work: Workload, names: tuple[str, ...], rate: float) -> Mapping[str, object]:
    versions: dict[str, str] = {}
    for name in names:
        if name != AUTO:
            versions |= versions_of(work.registry.get(name), work.processor)
    return {
        "device": work.processor.name,
        "sm": work.processor.sm,
        "driver": work.processor.driver or None,
        "versions": {"python": platform.python_version(), **versions},
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "bandwidth_gb_per_s": rate / 1e9,
    }


def _compared(old: Path, new: Path, *, json: bool) -> int:
    found: Comparison = compare(read_results(old), read_results(new))
    if json:
        lists = {name: list(getattr(found, name)) for name in ("slower", "faster", "gone")}
        output.write_json({**lists, "compared": found.common})
    else:
        for title in ("slower", "faster", "gone"):
            for line in getattr(found, title):
                print(f"{title}: {line}")
        counts = f"{len(found.slower)} slower, {len(found.faster)} faster, {len(found.gone)} gone"
        print(f"{found.common} measurements compared: {counts}; the rest is the same within noise")
    return 1 if found.slower else 0
