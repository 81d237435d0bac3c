"""Tuning of ``attnplug_triton_mla.configurations``: candidates for every shape, over several lengths.

Decode runs in CUDA graphs of 20 calls over caches that are not in L2, and candidates alternate. For each (heads,
requests, cache dtype) every tile configuration is combined with every merge configuration of its KV splits. The length
is not known when a configuration is chosen. So candidates are ranked by the ratio of their time to the best one's,
averaged over lengths. The tables' own choice is printed next to the best. Kernels are compiled by several processes
before the measurement.

After every shape all times are written to ``--json``; ``--seconds`` ends the run early, with all results so far.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from gpu_clock import capture, device_us
from gpu_report import Report, describe
from mla_sides import CALLS, Rig
from triton_mla_variants import PACKAGES, Side, Variant

from attnplug import DType
from attnplug_triton_mla.configurations import ANY, MLAKernelConfig, choose

WHAT = (
    "triton_mla: candidates for the tables in configurations.py; µs of a decode in graphs of 20, caches out of L2. A "
    "name is Configuration's arguments"
)
REPLAYS = 9
MOST_TOKENS = 1 << 18
LENGTHS = (1024, 4096, 16384, 65536)


@dataclass(frozen=True)
class Shape:
    heads: int
    requests: int
    fp8: bool

    def variant(self, length: int) -> Variant:
        kv_dtype = DType.FLOAT8_E4M3 if self.fp8 else DType.BFLOAT16
        return Variant((length,) * self.requests, self.heads, kv_dtype=kv_dtype)

    def chosen(self, tokens: int) -> MLAKernelConfig:
        return choose(self.heads, self.requests, tokens, format="fp8" if self.fp8 else "plain")


SHAPES = [Shape(heads, requests, False) for requests in (1, 4, 16, 32, 64) for heads in (16, 128)]
SHAPES += [Shape(16, requests, True) for requests in (1, 4, 16, 64)]
SHAPES += [Shape(128, 4, True), *(Shape(32, requests, False) for requests in (1, 4, 16))]
SHAPES += [Shape(16, 2, False), Shape(128, 2, False), *(Shape(64, requests, False) for requests in (1, 4))]
"""In the order of measurement."""


def tile_configs(shape: Shape) -> list[MLAKernelConfig]:
    """Tile configurations: tile, step, warps, stages, kernel, and dependent fields."""
    found = [MLAKernelConfig(16, 64, 4, 3), MLAKernelConfig(16, 32, 4, 4)]
    if shape.fp8:
        return [*found, MLAKernelConfig(16, 64, 4, 4), MLAKernelConfig(16, 64, 4, 3, programs=2)]
    found += [MLAKernelConfig(16, 32, 4, buffers, "low") for buffers in (3, 4)]
    if shape.heads > 16:
        found.append(MLAKernelConfig(64, 64, 8, 2, "wide", part_cost=1 / 16 if shape.requests == 1 else 0.0))
    return found


def merge_configs(requests: int) -> list[tuple[int, int, int]]:
    """Merge configurations: number of splits and columns per program, and warps."""
    if requests <= 2:
        return [(128, 32, 1), (128, 32, 2), (64, 64, 2), (32, 64, 1)]
    return [(32, 64, 1), (32, 128, 1), (16, 512, 4)] if requests <= 8 else [(16, 512, 4), (16, 256, 1)]


def candidates(shape: Shape) -> list[MLAKernelConfig]:
    """All candidates, and the current entry of the tables."""
    found = [
        replace(config, merge_parts=parts, merge_columns=columns, merge_warps=warps, overlap=True)
        for config, (parts, columns, warps) in itertools.product(tile_configs(shape), merge_configs(shape.requests))
    ]
    return list(dict.fromkeys([*found, shape.chosen(1024), shape.chosen(ANY)]))


def brief(configuration: MLAKernelConfig) -> str:
    """Format as in the table: the first four fields by position, others if they differ from their
    defaults."""
    place, named = fields(configuration)[:4], fields(configuration)[4:]
    given = [repr(getattr(configuration, field.name)) for field in place]
    for field in named:
        value = getattr(configuration, field.name)
        if value != field.default and field.name != "overlap":
            given.append(f"{field.name}={value!r}")
    return ", ".join(given)


def compile_one(shape: Shape, candidate: MLAKernelConfig) -> None:
    """Compile a candidate into Triton's cache by running a small batch."""
    with torch.inference_mode():
        Side(shape.variant(128), torch.device("cuda", 0)).with_configs(lambda *_, **__: candidate).calls()
    torch.cuda.synchronize()


def compile_all(shapes: Iterable[Shape], processes: int, seconds: float) -> None:
    """Compile all candidates. Failures are reported by the measurement. Requests and programs are runtime arguments."""
    work = {(replace(s, requests=1), replace(c, programs=1, part_cost=0.0)) for s in shapes for c in candidates(s)}
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
    wait([pool.submit(compile_one, *each) for each in sorted(work, key=str)], timeout=seconds)
    pool.shutdown(wait=False, cancel_futures=True)


def measure(shape: Shape, length: int, rig: Rig) -> dict[MLAKernelConfig, float]:
    """Microseconds of a call, or infinity for a candidate that fails."""
    plain, sides, graphs, times = Side(shape.variant(length), rig.device), [], {}, {}
    for candidate in candidates(shape):
        try:
            side = plain.with_configs(lambda *_, chosen=candidate, **__: chosen)
            graphs[candidate] = capture(side.calls)[0]
            sides.append(side)  # a graph does not keep the plan that it reads
        except Exception as error:  # usually out of shared memory
            print(f"{shape} {brief(candidate)}: {type(error).__name__}: {error}"[:200], file=sys.stderr)
            times[candidate] = math.inf
    us = device_us({brief(candidate): graph.replay for candidate, graph in graphs.items()}, REPLAYS, rig.cold)
    return times | {candidate: us[brief(candidate)] / CALLS for candidate in graphs}


def ranking(times: dict[int, dict[MLAKernelConfig, float]]) -> list[MLAKernelConfig]:
    """Candidates by the mean, over lengths, of the ratio of their time to the best one's."""
    found = next(iter(times.values()))
    return sorted(found, key=lambda candidate: sum(us[candidate] / min(us.values()) for us in times.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="where to write, after every shape")
    parser.add_argument("--commit", metavar="TEXT", help="what was measured; .gpu/commit has it otherwise")
    parser.add_argument("--seconds", metavar="N", type=float, default=300, help="after which no further shape begins")
    parser.add_argument("--processes", type=int, default=min(8, os.cpu_count() or 1), help="that compile")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("tune_triton_mla measures kernels, and torch sees no CUDA device here")
    report = Report(arguments.json, describe(WHAT, PACKAGES, arguments.commit))
    torch.manual_seed(0)
    compile_all(SHAPES, arguments.processes, arguments.seconds)
    print(f"compiled after {report.seconds:.0f} s", flush=True)
    rig, rows = Rig(torch.device("cuda", 0)), []
    for shape in SHAPES:
        if report.seconds > arguments.seconds:
            break
        with torch.inference_mode():
            lengths = [length for length in LENGTHS if shape.requests * length <= MOST_TOKENS]
            times = {length: measure(shape, length, rig) for length in lengths}
        rows += [
            {**asdict(shape), "length": length, "us": {brief(c): round(t, 2) for c, t in us.items() if t < math.inf}}
            for length, us in times.items()
        ]
        report.put("cases", rows)
        best = ranking(times)[0]
        print(f"[{report.seconds:4.0f} s] {shape}\n  best:   {brief(best)}", flush=True)
        for length, us in times.items():
            chosen, least = shape.chosen(length), min(us.values())
            print(f"  {length:>6}: best {us[best]:6.2f}, table {us[chosen]:6.2f}, least {least:6.2f}", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
