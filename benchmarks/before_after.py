"""Ratios of two results of a benchmark, measured on one machine before and after a change.

    python benchmarks/before_after.py --json out.json before.json=after.json …

Cases are matched by position. Times of library calls are compared too: they show how far the two runs differ anyway.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def times(case: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, float]]:
    """All times of a case in microseconds, by their paths."""
    for key, value in case.items() if isinstance(case, dict) else ():
        if isinstance(value, dict):
            yield from times(value, (*path, key))
        elif isinstance(value, float) and any(part in ("us", "host_us") for part in (*path, key)):
            yield "/".join(part for part in (*path, key) if part != "us"), value


def ratios(before: dict[str, Any], after: dict[str, Any]) -> dict[str, list[float]]:
    """``section/path`` → after over before, one for each case."""
    found: dict[str, list[float]] = {}
    for section, cases in after.items():
        if not isinstance(cases, list) or section not in before:
            continue
        for old, new in zip(before[section], cases, strict=True):
            past = dict(times(old))
            for name, value in times(new):
                if past.get(name):
                    found.setdefault(f"{section}/{name}", []).append(value / past[name])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pairs", nargs="+", metavar="BEFORE=AFTER")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    report: dict[str, Any] = {"what": "after over before, one machine and one run of each; medians, least and most"}
    for pair in options.pairs:
        before, after = (json.loads(Path(name).read_text()) for name in pair.split("="))
        report |= {key: after[key] for key in ("device", "driver", "cuda", "date") if key in after}
        rows = {
            name: {
                "cases": len(values),
                "median": round(statistics.median(values), 4),
                "least": round(min(values), 4),
                "most": round(max(values), 4),
            }
            for name, values in ratios(before, after).items()
        }
        name = Path(pair.split("=")[1]).stem
        report[name] = {"before": before.get("commit"), "after": after.get("commit"), "ratios": rows}
        print(name)
        for path, row in rows.items():
            print(f"  {path:45} {row['median']:7.3f}   {row['least']:.3f} … {row['most']:.3f}  ({row['cases']})")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
