"""``auto`` for prefill: measure the tables that ship, and check its choices at random points off the grid.

python benchmarks/auto_prefill.py tune nvidia-h200.json            all prefill tables, into one file
python benchmarks/auto_prefill.py tune nvidia-h200.json --fp8      the same over fp8 caches
python benchmarks/split_tables.py nvidia-h200.json                 adds them to the packages of their backends
python benchmarks/auto_prefill.py check --out auto_prefill_h200.json

``check`` measures ``auto``, with the tables that ship, or with those of a file as this machine's own, beside every
backend: single prompts, many prompts, prefixes and mixed batches. The share of a point is the fastest backend's time
divided by that of the backend that ``auto`` chose; the goal is 0.98. ``--smoke`` runs the same code on a CPU, with
small points.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnplug_tune.points import CPU_PREFILLS, PREFILLS
from attnplug_tune.results import BenchRow, by_point, read_results

from attnplug.auto.table_store import CACHE_VARIABLE, read_tables, table_path
from attnplug.declare.device import Processor
from attnplug.registry.selection import AUTO

GOAL = 0.98
ABSORBED = (
    *((1, 512, 0), (1, 2048, 0), (1, 512, 8192), (32, 1, 4096), (8, 512, 0), (1, 32, 0), (128, 1, 4096), (1, 256, 0)),
    *((8, 256, 4096), (1, 8192, 0), (1, 2048, 8192), (1, 1, 4096), (32, 32, 0), (8, 256, 0), (1, 256, 4096)),
    *((1, 32, 4096), (32, 1, 512), (128, 1, 512)),
)
"""(requests, new tokens, prefix) of absorbed extends, which run captured and in mixed batches. Long ones run as MHA."""
MLA, GQA = "triton_mla,flashinfer_mla,flashattention", "triton_mha,flashattention,flashinfer"
FP8_MLA, FP8_GQA = "triton_mla,flashinfer_mla", "triton_mha,flashinfer"


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that the same backends serve."""

    layers: str
    backends: str
    options: tuple[str, ...] = ()
    points: Sequence[tuple[int, int, int]] = PREFILLS
    budget: int = 200
    """Seconds to measure in. The most informative points come first."""


GROUPS = (
    Group("mla:16,mla:128,mla:32", MLA),
    Group("mla:16,mla:128,mla:32", FP8_MLA, ("--mla-extend", "absorbed"), ABSORBED, 90),
    Group("gqa:32/8x64,gqa:32/8x128,gqa:64/8x128,gqa:16/8x256", GQA),
    Group("mla:128k2048", "triton_mla,flashmla_sparse", ("--host", "vllm"), budget=90),
)
FP8 = ("--kv-dtype", "float8_e4m3")
FP8_GROUPS = (
    Group("mla:16,mla:128", FP8_MLA, FP8),
    Group("mla:16,mla:128", FP8_MLA, (*FP8, "--mla-extend", "absorbed"), ABSORBED),
    Group("gqa:32/8x128", FP8_GQA, FP8),
)
SMOKE_GROUPS = (
    Group("mla:2", "torch_native", points=CPU_PREFILLS),
    Group("mla:2", "torch_native", ("--mla-extend", "absorbed"), CPU_PREFILLS),
    Group("gqa:4/2x64", "torch_native", points=CPU_PREFILLS),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("tune", "check"))
    parser.add_argument("tables", type=Path, nargs="?")
    parser.add_argument("--fp8", action="store_true", help="fp8 caches")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--again", action="store_true", help="tune: measure known points again")
    parser.add_argument("--count", type=int, default=12, help="check: random points of each layer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", default="", metavar="PREFIX", help="only groups that begin so: mla or gqa")
    parser.add_argument("--out", type=Path, help="check: write points and shares as JSON")
    arguments = parser.parse_args()
    groups = SMOKE_GROUPS if arguments.smoke else FP8_GROUPS if arguments.fp8 else GROUPS
    groups = tuple(group for group in groups if group.layers.startswith(arguments.layers))
    if arguments.action == "tune":
        if arguments.tables is None:
            parser.error("tune: the file of the tables is missing")
        for group in groups:
            points = ",".join(f"{requests}x{prefix}+{new}" for requests, new, prefix in group.points)
            more = ("--again",) if arguments.again else ()
            budget = ("--budget", str(group.budget))
            run("tune", group, points, arguments.smoke, *budget, "--tables", str(arguments.tables), *more)
        return
    points = random_points(arguments.count, random.Random(arguments.seed), smoke=arguments.smoke)
    rows: list[BenchRow] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE_VARIABLE] = folder
        if arguments.tables is not None:
            file = read_tables(arguments.tables)
            cached = table_path(Processor(file.device, file.sm))
            cached.parent.mkdir()
            shutil.copy(arguments.tables, cached)
        for number, group in enumerate(group for group in groups if "--mla-extend" not in group.options):
            out = Path(folder) / f"{number}.json"
            with_auto = Group(group.layers, f"{AUTO},{group.backends}", group.options)
            run("bench", with_auto, ",".join(points), arguments.smoke, "--out", str(out))
            rows += read_results(out).rows
            report = summary(rows)
            print(json.dumps({key: value for key, value in report.items() if key != "points"}, indent=1), flush=True)
            if arguments.out:
                arguments.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


def run(command: str, group: Group, points: str, smoke: bool, *options: str) -> None:
    """Run ``attnplug tune`` or ``attnplug bench``. A backend that fails is reported and does not end the run."""
    device = ("--device", "cpu" if smoke else "cuda")
    layers = ("--shapes", group.layers, "--backends", group.backends, *group.options)
    code = "from attnplug.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, command, *device, *layers, "--points", points, *options], check=False
    )
    if done.returncode not in (0, 1):
        sys.exit(done.returncode)


def random_points(count: int, draw: random.Random, *, smoke: bool) -> list[str]:
    """Draw batches as ``--points`` spells them: in turn one prompt, several, prefixes, and chunks beside decodes."""
    most_rows, longest, most_requests = (256, 512, 4) if smoke else (32768, 49152, 128)

    def between(low: int, high: int) -> int:
        return round(math.exp(draw.uniform(math.log(low), math.log(max(high, low)))))

    found: dict[str, None] = {}
    while len(found) < count:
        kind = len(found) % 4
        requests = 1 if kind in (0, 3) else between(2, most_requests)
        new = between(16, most_rows // (requests if kind != 3 else 4))
        prefix = between(64, longest - new) if kind == 2 or (kind == 3 and draw.random() < 0.5) else 0
        prefix = min(prefix, 4 * most_rows // requests)
        beside = f"&{between(2, most_requests)}x{between(64, longest // 4)}" if kind == 3 else ""
        found[f"{requests}x{prefix}+{new}{beside}"] = None
    return list(found)


def summary(rows: Sequence[BenchRow]) -> dict[str, Any]:
    """Share of each point, and by layer: the geometric mean, the worst one, and the mean for each single backend."""
    points, layers = [], {}
    for (layer, _role), by in by_point(rows).items():
        shares: dict[str, list[float]] = {}
        for point, found in by.items():
            times = {side: row.us for side, row in found.items() if side != AUTO}
            if AUTO not in found or not times:
                continue
            best, chosen = min(times, key=lambda side: times[side]), found[AUTO].planned_by
            entry = {"layer": layer, "point": str(point), "best": best, "chosen": chosen, "us": times}
            entry["share"] = times[best] / times.get(chosen, found[AUTO].us)
            entry["auto_us"] = found[AUTO].us
            points.append(entry)
            shares.setdefault(AUTO, []).append(entry["share"])
            for side, time in times.items():
                shares.setdefault(side, []).append(times[best] / time)
        if shares:
            layers[layer] = {
                "points": len(shares[AUTO]),
                "below_goal": sum(share < GOAL for share in shares[AUTO]),
                "worst": round(min(shares[AUTO]), 3),
                "mean": {
                    side: round(math.exp(math.fsum(map(math.log, each)) / len(each)), 3)
                    for side, each in shares.items()
                },
            }
    worst = sorted(points, key=lambda each: each["share"])[:5]
    return {"goal": GOAL, "layers": layers, "worst": worst, "points": points}


if __name__ == "__main__":
    main()
