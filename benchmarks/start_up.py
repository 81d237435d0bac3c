"""Start-up time of ``attnplug`` with many plugins installed, beyond a bare interpreter.

Goals: listing under 300 ms, explaining a choice for a GPU under 500 ms. Fabricates plugin distributions (a dist-info
folder and a module each) on PYTHONPATH, runs the commands alternately, and compares medians. The minimum CPU time is
independent of other load. Finally it lists the most expensive imports.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

LIMIT_MS = 300
EXPLAIN_LIMIT_MS = 500
BARE = "python -c pass"
EXPLAIN = "attnplug explain --sm 90"
SHOWN_IMPORTS = 8

_PLUGIN = """
from __future__ import annotations

from attnplug import AttentionKind, BackendSpec, Capabilities, DType, PageSizes, hookimpl


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="{name}",
            summary="a plugin that only takes time to load",
            contract="1.0",
            factory="{name}_backend:Backend",
            capabilities=Capabilities(
                kinds=frozenset({{AttentionKind.MHA}}),
                devices=frozenset({{"cuda"}}),
                dtypes=frozenset({{DType.FLOAT16, DType.BFLOAT16}}),
                min_sm=90,
                page_sizes=PageSizes(frozenset({{64}})),
            ),
            requires={requires},
        )
    ]
"""


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one command: median, difference to the bare interpreter, and minimum CPU time."""

    command: str
    median_ms: float
    fastest_ms: float
    beyond_ms: float
    cpu_ms: float

    @property
    def limit_ms(self) -> int:
        return EXPLAIN_LIMIT_MS if self.command == EXPLAIN else LIMIT_MS

    @property
    def within(self) -> bool:
        return self.beyond_ms < self.limit_ms


@dataclass(frozen=True, slots=True)
class ImportCost:
    """Import time of a top-level package: with everything that it imports first, and of its own modules alone."""

    package: str
    cumulative_ms: float
    own_ms: float


def fabricate(folder: Path, plugins: int) -> None:
    """Write ``count`` plugin distributions; every other one requires a missing package."""
    for number in range(plugins):
        name = f"fabricated_{number:03}"
        requires = ("something>=1",) if number % 2 else ()
        (folder / f"{name}.py").write_text(_PLUGIN.format(name=name, requires=requires))
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[attnplug.plugins]\n{name} = {name}\n")


def measure(commands: Mapping[str, tuple[list[str], dict[str, str]]], runs: int) -> list[Timing]:
    """Time every command ``runs`` times, alternately, so that other load affects all of them alike."""
    times: dict[str, list[float]] = {title: [] for title in commands}
    busy: dict[str, list[float]] = {title: [] for title in commands}
    for number in range(runs + 1):
        for title, (command, environment) in commands.items():
            started, used = time.perf_counter(), _children_ms()
            done = subprocess.run(command, env=environment, capture_output=True, check=False)
            elapsed = 1e3 * (time.perf_counter() - started)
            if done.returncode:
                sys.exit(f"{title} failed with exit code {done.returncode}:\n{done.stderr.decode()}")
            if number:  # the first round compiles the plugins and fills the disk cache
                times[title].append(elapsed)
                busy[title].append(_children_ms() - used)
    bare = statistics.median(times[BARE])
    return [
        Timing(title, (middle := statistics.median(taken)), min(taken), middle - bare, min(busy[title]))
        for title, taken in times.items()
    ]


def _children_ms() -> float:
    """CPU time of all processes that have ended so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1e3 * (used.ru_utime + used.ru_stime)


def import_costs(command: list[str], environment: dict[str, str]) -> list[ImportCost]:
    """The most expensive packages by ``-X importtime``, beyond what the bare interpreter imports.

    Python leaves out modules that ``importlib.import_module`` imports, plugins among them. Their cost is the difference
    between the commands with and without plugins.
    """
    usual = {name for name, _, _ in _import_times([sys.executable, "-X", "importtime", "-c", "pass"], environment)}
    cumulative: dict[str, float] = {}
    own: dict[str, float] = {}
    for name, self_us, total_us in _import_times([sys.executable, "-X", "importtime", *command], environment):
        package = name.partition(".")[0]
        if name not in usual:
            cumulative[package] = max(cumulative.get(package, 0), total_us / 1e3)
            own[package] = own.get(package, 0) + self_us / 1e3
    ranked = sorted(cumulative, key=lambda package: -cumulative[package])
    return [ImportCost(package, cumulative[package], own[package]) for package in ranked[:SHOWN_IMPORTS]]


def _import_times(command: Sequence[str], environment: dict[str, str]) -> list[tuple[str, int, int]]:
    """Name, own and cumulative microseconds of each import, from the quickest of three runs."""
    attempts = []
    for _ in range(3):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        lines = re.findall(r"^import time:\s+(\d+) \|\s+(\d+) \|\s+(\S+)$", done.stderr, re.MULTILINE)
        attempts.append([(name, int(own), int(total)) for own, total, name in lines])
    return min(attempts, key=lambda attempt: sum(own for _, own, _ in attempt))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plugins", type=int, default=50, metavar="N", help="plugins to fabricate (50)")
    parser.add_argument("--runs", type=int, default=15, metavar="N", help="timed runs of each command (15)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a file, too")
    options = parser.parse_args()
    if options.plugins < 0 or options.runs < 1:
        parser.error("--plugins must be 0 or more and --runs 1 or more")
    attnplug = shutil.which("attnplug", path=str(Path(sys.executable).parent))
    if attnplug is None:
        sys.exit(f"there is no attnplug beside {sys.executable}; install core into that environment first")
    without = {name: value for name, value in os.environ.items() if not name.startswith(("ATTNPLUG_", "PYTHON"))}
    with tempfile.TemporaryDirectory() as folder:
        fabricate(Path(folder), options.plugins)
        crowded = without | {"PYTHONPATH": folder}
        timings = measure(
            {
                BARE: ([sys.executable, "-c", "pass"], crowded),
                "attnplug --version": ([attnplug, "--version"], crowded),
                "attnplug backends": ([attnplug, "backends"], crowded),
                "attnplug backends --json": ([attnplug, "backends", "--json"], crowded),
                "attnplug backends, no plugins": ([attnplug, "backends"], without),
                EXPLAIN: ([attnplug, "explain", "--model", "tiny:deepseek_v3", "--sm", "90"], crowded),
            },
            options.runs,
        )
        imports = import_costs(["-m", "attnplug", "backends"], crowded)
    show(timings, imports, options.plugins, options.runs)
    if options.json is not None:
        figures = {
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "plugins": options.plugins,
            "runs": options.runs,
            "commands": [asdict(timing) | {"limit_ms": timing.limit_ms, "within": timing.within} for timing in timings],
            "imports": [asdict(cost) for cost in imports],
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def show(timings: list[Timing], imports: list[ImportCost], plugins: int, runs: int) -> None:
    print(f"start-up with {plugins} plugins, Python {platform.python_version()}, median of {runs} runs in turn, ms\n")
    print(f"{'':30} {'median':>8} {'fastest':>8} {'least CPU':>10} {'beyond bare':>12}")
    for timing in timings:
        verdict = "" if timing.command == BARE else f"  {'under' if timing.within else 'OVER'} {timing.limit_ms}"
        print(
            f"{timing.command:30} {timing.median_ms:8.0f} {timing.fastest_ms:8.0f} {timing.cpu_ms:10.0f} "
            f"{timing.beyond_ms:12.0f}{verdict}"
        )
    print(
        "\nimports of 'attnplug backends' beyond the bare interpreter's, ms (-X importtime, which itself costs time)\n"
    )
    print(f"{'package':30} {'with what it imports first':>28} {'own modules':>12}")
    for cost in imports:
        print(f"{cost.package:30} {cost.cumulative_ms:28.1f} {cost.own_ms:12.1f}")


if __name__ == "__main__":
    main()
