"""The table of ``attnplug_triton_mla.configurations``, measured: candidates for every shape, over several lengths.

Decode in CUDA graphs of 20 calls over caches that are not in L2. For each (heads, requests) first how the cache rows
are cut, then how parts are merged, then what else may pay, each time from the best two so far. The length is not known
when a configuration is chosen, so what counts is the mean, over lengths, of a candidate's time to the best one's.
Kernels are compiled by several processes before they are measured.

After every measurement the times and the table as it would be then are written to ``--json``, or to
``$OUT/tune_triton_mla.json`` where there is such a folder; ``--seconds`` ends it in good order. Shapes that were not
reached keep the entry that they have; the ones with goals come first. ``--write`` puts the table into the module.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, wait
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from gpu_clock import capture, device_us
from mla_sides import CALLS, DIMS, Case, Ours, Rig, random, rotating_layers
from torch import Tensor

from attnplug_triton_mla.backend import TritonMLABackend
from attnplug_triton_mla.configurations import Configuration, choose

REPLAYS = 9
LENGTHS = (1024, 4096, 16384, 65536)
MOST_TOKENS = 1 << 20
HEADS = {16: 16, 32: 32, 128: None}
"""Heads that are measured, with the rows that the entry found serves at most; the last serves all."""
MANY = 16
"""Requests from which on the last program may be the one that merges; before, there are too many parts for one."""
REQUESTS = {1: 2, 4: 8, 16: 32, 64: None}
"""Requests that are measured, with the requests that the entry found serves at most."""
SHAPES = [(heads, requests) for heads_of_some in ((16, 128), (32,)) for requests in REQUESTS for heads in heads_of_some]
"""In the order in which they are measured."""
MODULE = Path(__file__).parents[1] / "plugins/triton_mla/src/attnplug_triton_mla/configurations.py"


def cuts(heads: int) -> list[Configuration]:
    """Ways to cut the cache rows: tile, step, warps, stages, programs of a multiprocessor."""
    low = [
        *((16, 32, 4, 3, 1), (16, 32, 4, 3, 2), (16, 32, 4, 2, 3), (16, 32, 4, 4, 1)),
        *((16, 64, 4, 2, 2), (16, 64, 4, 3, 1), (16, 64, 8, 3, 1)),
    ]
    tall = [(16, 64, 4, 3, 1), (32, 32, 4, 3, 2), (32, 32, 8, 3, 1), (32, 64, 8, 2, 1), (32, 64, 8, 3, 1)]
    return [Configuration(*shape, overlap=True) for shape in (low if heads <= 16 else tall)]


def merges(cut: Configuration, requests: int) -> list[Configuration]:
    """Who merges what a cut leaves in parts, how many parts and columns at once."""
    shapes = [(64, 64), (128, 32), (256, 32), (16, 512), (16, 256), (32, 128)]
    by_kernel = [replace(cut, merge="kernel", merge_parts=parts, merge_columns=columns) for parts, columns in shapes]
    last = replace(cut, merge="last", merge_columns=128)
    by_last = [replace(last, part_cost=0.25), replace(last, part_cost=1.0)] if requests >= MANY else []
    return by_kernel + by_last


def refined(way: Configuration) -> list[Configuration]:
    """What may pay on top of a way to merge."""
    return [way, replace(way, overlap=False), replace(way, least_steps=2)]


class Progress:
    """The clock, and what is known so far, in a file that is whole at any time."""

    def __init__(self, path: Path | None, seconds: float) -> None:
        self._path, self._started, self._seconds = path, time.monotonic(), seconds
        self._measured: list[dict[str, Any]] = []
        self._entries: dict[tuple[int, int], Configuration] = {}

    @property
    def passed(self) -> float:
        return time.monotonic() - self._started

    @property
    def left(self) -> float:
        return self._seconds - self.passed

    def measured(self, case: Case, times: dict[Configuration, float]) -> None:
        candidates = [{**asdict(candidate), "us": us} for candidate, us in times.items() if us < math.inf]
        self._measured.append({**asdict(case), "candidates": candidates})
        self._write()

    def found(self, heads: int, requests: int, entry: Configuration) -> None:
        self._entries[heads, requests] = entry
        self._write()

    def table(self) -> str:
        """As it stands in the module, or is to stand there."""
        lines = [
            "TABLE: tuple[tuple[int, int, Configuration], ...] = (",
            "    # rows of a request up to, requests up to",
        ]
        for heads, most_rows in HEADS.items():
            for requests, most in REQUESTS.items():
                entry = self._entries.get((heads, requests), choose(heads, requests, False))
                lines.append(f"    ({most_rows or 'ANY'}, {most or 'ANY'}, {brief(entry)}),")
        return "\n".join([*lines, ")"])

    def _write(self) -> None:
        if self._path is None:
            return
        tuned = [f"{heads} heads, {requests} requests" for heads, requests in self._entries]
        known = {
            "device": torch.cuda.get_device_name(),
            "seconds": round(self.passed, 1),
            "tuned": tuned,
            "table": self.table().split("\n"),
            "measured": self._measured,
        }
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(known, indent=1) + "\n")
        part.replace(self._path)


def step(ours: Ours, q: Tensor, candidate: Configuration) -> Callable[[], Tensor]:
    """A decode step of 20 calls, ready to be captured: the kernel that plans, then the layers in turn."""
    backend, batch, layers = TritonMLABackend(ours.context, choose=lambda *_: candidate), ours.batch(), ours.layers
    backend.init_cuda_graph_state(ours.case.requests, ours.case.requests)
    batch.plan = backend.init_forward_metadata_out_graph(batch, in_capture=True)

    def body() -> Tensor:
        backend.init_forward_metadata_in_graph(batch)
        for number in range(CALLS):
            layer = layers[number % len(layers)]
            out = backend.forward_decode(q, None, None, layer, batch, save_kv_cache=False)
        return out

    return body


class Bench:
    """One case, on which configurations take turns."""

    def __init__(self, case: Case, rig: Rig) -> None:
        self.case, self._rig = case, rig
        self._ours = Ours(case, rig.device, rotating_layers(case), TritonMLABackend)
        self._q = random(case.requests, case.heads, DIMS.row_dim, device=rig.device)

    def measure(self, candidates: Iterable[Configuration]) -> dict[Configuration, float]:
        """Microseconds of a call, or infinity for one that fails."""
        graphs, times = {}, {}
        for candidate in candidates:
            try:
                graphs[candidate] = capture(step(self._ours, self._q, candidate))[0]
            except Exception as error:  # too much shared memory, most of all
                print(f"{self.case} {brief(candidate)}: {type(error).__name__}: {error}"[:200], file=sys.stderr)
                times[candidate] = math.inf
        replays = {str(number): graph.replay for number, graph in enumerate(graphs.values())}
        us = device_us(replays, REPLAYS, self._rig.cold)
        return times | {candidate: us[str(number)] / CALLS for number, candidate in enumerate(graphs)}


# Compiling


@cache
def small(heads: int) -> tuple[Ours, Tensor]:
    device = torch.device("cuda", 0)
    return Ours(Case(heads, 1, 128), device, 1, TritonMLABackend), random(1, heads, DIMS.row_dim, device=device)


def compile_one(heads: int, candidate: Configuration) -> None:
    """Into Triton's cache, by running it on a small batch."""
    with torch.inference_mode():
        step(*small(heads), candidate)()
    torch.cuda.synchronize()


class Compiler:
    """Other processes that compile what is about to be measured, each kernel once."""

    def __init__(self, pool: Executor, progress: Progress) -> None:
        self._pool, self._progress = pool, progress
        self._known: set[tuple[Any, ...]] = set()

    def compile(self, work: Iterable[tuple[int, Configuration]]) -> None:
        """Returns when all is there, or when time is over. What fails will say so where it is measured."""
        futures = []
        for heads, candidate in work:
            own = replace(candidate, part_cost=0.0, least_steps=1, programs=1)  # these are numbers to a kernel
            if (heads, own) not in self._known:
                self._known.add((heads, own))
                futures.append(self._pool.submit(compile_one, heads, own))
        wait(futures, timeout=max(self._progress.left, 0))


# Choosing


Times = dict[Case, dict[Configuration, float]]
"""Microseconds of every candidate, by case."""


def ranking(times: Times) -> list[Configuration]:
    """Candidates by the mean, over the cases, of their time to the best one's."""
    candidates = next(iter(times.values()))
    return sorted(candidates, key=lambda candidate: sum(us[candidate] / min(us.values()) for us in times.values()))


def measure_all(benches: Sequence[Bench], candidates: Sequence[Configuration], progress: Progress) -> Times:
    """The times of every case that there was time for; those where everything failed are left out."""
    found = {}
    for bench in benches:
        if progress.left <= 0:
            break
        us = bench.measure(candidates)
        progress.measured(bench.case, us)
        if min(us.values()) < math.inf:
            found[bench.case] = us
    return found


def tune(heads: int, requests: int, rig: Rig, compiler: Compiler, progress: Progress) -> None:
    """Find the best configuration for a shape over all lengths, or over those that there is time for."""
    lengths = [length for length in LENGTHS if requests * length <= MOST_TOKENS]
    benches = [Bench(Case(heads, requests, length), rig) for length in lengths]
    by_cut = measure_all(benches, cuts(heads), progress)
    if not by_cut:
        return
    times = by_cut
    for more in (lambda cut: merges(cut, requests), refined):
        best, *others = ranking(times)
        progress.found(heads, requests, best)
        ways = list(dict.fromkeys(way for found in (best, *others[:1]) for way in more(found)))
        compiler.compile((heads, way) for way in ways)
        measured = measure_all(benches, ways, progress)
        if not measured:
            return
        times = measured
    best = ranking(times)[0]
    progress.found(heads, requests, best)
    for case, us in times.items():
        print(f"  {case}: chosen {us[best]:6.1f} µs, best {min(us.values()):6.1f} µs", flush=True)


def brief(configuration: Configuration) -> str:
    """As it is written in the table: the first four fields by place, others where they differ from their defaults."""
    place, named = fields(configuration)[:4], fields(configuration)[4:]
    given = [repr(getattr(configuration, field.name)) for field in place]
    for field in named:
        value = getattr(configuration, field.name)
        if value != field.default:
            given.append(f"{field.name}=" + (f'"{value}"' if isinstance(value, str) else repr(value)))
    return f"Configuration({', '.join(given)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="where to write, after every measurement")
    parser.add_argument("--seconds", metavar="N", type=float, default=300, help="after which nothing further begins")
    parser.add_argument("--write", action="store_true", help="put the table into configurations.py")
    parser.add_argument("--processes", type=int, default=min(8, os.cpu_count() or 1), help="that compile")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("tune_triton_mla measures kernels, and torch sees no CUDA device here")
    path: Path | None = arguments.json
    if path is None and (folder := os.environ.get("OUT")):
        path = Path(folder) / "tune_triton_mla.json"
    progress = Progress(path, arguments.seconds)
    torch.manual_seed(0)
    pool = ProcessPoolExecutor(arguments.processes, mp_context=multiprocessing.get_context("spawn"))
    try:
        compiler = Compiler(pool, progress)
        compiler.compile((heads, cut) for heads in HEADS for cut in cuts(heads))
        print(f"compiled after {progress.passed:.0f} s", flush=True)
        with torch.inference_mode():
            rig = Rig(torch.device("cuda", 0))
            for heads, requests in SHAPES:
                if progress.left <= 0:
                    break
                print(f"[{progress.passed:4.0f} s] {heads} heads, {requests} requests", flush=True)
                tune(heads, requests, rig, compiler, progress)
                torch.cuda.empty_cache()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    text = progress.table()
    print(f"\n{text}\n\n{progress.passed:.0f} s in all")
    if arguments.write:
        source = MODULE.read_text()
        replaced, count = re.subn(r"^TABLE: .*?^\)$", lambda _: text, source, flags=re.MULTILINE | re.DOTALL)
        if count != 1:
            sys.exit(f"{MODULE} has {count} tables; put it there by hand")
        MODULE.write_text(replaced)


if __name__ == "__main__":
    main()
