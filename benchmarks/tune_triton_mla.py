"""The table of ``attnplug_triton_mla.configurations``, measured: candidates for every shape, over several lengths.

Decode in CUDA graphs of 20 calls over caches that are not in L2. For each (heads, requests) first how the cache rows
are cut, then how parts are merged, starting from the best two cuts. The length is not known when a configuration is
chosen, so what counts is the mean, over lengths, of a candidate's time to the best one's. Prints the table as it stands
in the module; ``--write`` puts it there. Kernels are compiled by several processes beforehand.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import re
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from gpu_clock import capture, device_us
from mla_sides import CALLS, DIMS, Case, Ours, Rig, random, rotating_layers
from torch import Tensor

from attnplug_triton_mla.backend import TritonMLABackend
from attnplug_triton_mla.configurations import Configuration

REPLAYS = 9
LENGTHS = (1024, 4096, 16384, 65536)
MOST_TOKENS = 1 << 20
HEADS = {16: 16, 32: 32, 128: None}
"""Heads that are measured, with the rows that the entry found serves at most; the last serves all."""
REQUESTS = {1: 2, 4: 8, 16: 32, 64: None}
"""Requests that are measured, with the requests that the entry found serves at most."""
MODULE = Path(__file__).parents[1] / "plugins/triton_mla/src/attnplug_triton_mla/configurations.py"


def cuts(heads: int) -> list[Configuration]:
    """Ways to cut the cache rows, merged by a kernel. What does not fit the device is left out by its error."""
    tile = 16 if heads <= 16 else 32 if heads <= 32 else 64
    low = [(32, 4, 3), (32, 4, 4), (64, 4, 3), (64, 8, 2), (64, 8, 3), (128, 8, 2)]
    tall = [(32, 8, 2), (32, 8, 3), (32, 8, 4), (32, 4, 3), (64, 8, 2)]
    shapes = [(step, warps, stages, 1) for step, warps, stages in (tall if tile == 64 else low)]
    if tile < 64:
        shapes += [(32, 4, 3, 2), (64, 8, 2, 2)]
    return [Configuration(tile, step, warps, stages, programs) for step, warps, stages, programs in shapes]


def merges(cut: Configuration) -> list[Configuration]:
    """Ways to merge what a cut leaves in parts."""
    kernel = replace(cut, merge="kernel")
    last = replace(cut, merge="last")
    return [
        kernel,
        replace(kernel, overlap=True),
        replace(kernel, half_partials=True),
        replace(kernel, merge_columns=512, merge_parts=16),
        replace(kernel, merge_columns=64, merge_parts=64),
        replace(kernel, least_steps=2),
        last,
        replace(last, part_cost=0.25),
        replace(last, part_cost=1.0),
        replace(last, part_cost=1.0, half_partials=True),
    ]


class Bench:
    """One case, on which configurations take turns."""

    def __init__(self, case: Case, rig: Rig) -> None:
        self._case, self._rig, self._layers = case, rig, rotating_layers(case)
        self._ours = Ours(case, rig.device, self._layers, TritonMLABackend)
        self._q = random(case.requests, case.heads, DIMS.row_dim, device=rig.device)

    def measure(self, candidates: Iterable[Configuration]) -> dict[Configuration, float]:
        """Microseconds of a call, or infinity for one that fails."""
        graphs, times = {}, {}
        for candidate in candidates:
            try:
                graphs[candidate] = capture(self._body(candidate))[0]
            except Exception as error:  # too much shared memory, most of all
                print(f"{self._case} {brief(candidate)}: {type(error).__name__}: {error}"[:200], file=sys.stderr)
                times[candidate] = math.inf
        replays = {str(number): graph.replay for number, graph in enumerate(graphs.values())}
        us = device_us(replays, REPLAYS, self._rig.cold)
        return times | {candidate: us[str(number)] / CALLS for number, candidate in enumerate(graphs)}

    def _body(self, candidate: Configuration) -> Any:
        backend = TritonMLABackend(self._ours.context, choose=lambda *_: candidate)
        backend.init_cuda_graph_state(self._case.requests, self._case.requests)
        batch, layers = self._ours.batch(), self._ours.layers
        batch.plan = backend.init_forward_metadata_out_graph(batch, in_capture=True)

        def body() -> Tensor:
            backend.init_forward_metadata_in_graph(batch)
            for number in range(CALLS):
                layer = layers[number % self._layers]
                out = backend.forward_decode(self._q, None, None, layer, batch, save_kv_cache=False)
            return out

        return body


def compile_some(work: Sequence[tuple[int, Configuration]]) -> None:
    """Compile kernels into Triton's cache, by running each once on a small batch."""
    rig = Rig(torch.device("cuda", 0))
    for heads, candidate in work:
        bench = Bench(Case(heads, 1, 128), rig)
        try:
            bench._body(candidate)()
        except Exception:  # said where it is measured
            continue
    torch.cuda.synchronize()


def compile_all(processes: int) -> None:
    kernels: dict[tuple[Any, ...], tuple[int, Configuration]] = {}
    for heads in HEADS:
        for cut in cuts(heads):
            for merge in ("kernel", "last"):
                kernels[heads, cut.tile, cut.step, cut.warps, cut.stages, merge] = heads, replace(cut, merge=merge)
    work = list(kernels.values())
    shares = [work[number::processes] for number in range(processes)]
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_some, shares))


def regret(times: Sequence[dict[Configuration, float]], candidate: Configuration) -> float:
    """Mean over the lengths of a candidate's time to the best one's."""
    return sum(found.get(candidate, math.inf) / min(found.values()) for found in times) / len(times)


def tune(heads: int, requests: int, rig: Rig, results: list[dict[str, Any]]) -> Configuration:
    """The best configuration for a shape over all lengths."""
    lengths = [length for length in LENGTHS if requests * length <= MOST_TOKENS]
    benches = [Bench(Case(heads, requests, length), rig) for length in lengths]
    first = [bench.measure(cuts(heads)) for bench in benches]
    best_cuts = sorted(first[0], key=lambda cut: regret(first, cut))[:2]
    second = [bench.measure([way for cut in best_cuts for way in merges(cut)]) for bench in benches]
    best = min(second[0], key=lambda candidate: regret(second, candidate))
    for length, cut_us, merge_us in zip(lengths, first, second, strict=True):
        measured = [{**asdict(candidate), "us": us} for candidate, us in (cut_us | merge_us).items() if us < math.inf]
        results.append({"heads": heads, "requests": requests, "length": length, "candidates": measured})
        best_us = min([*cut_us.values(), *merge_us.values()])
        print(f"  {length:>6}: chosen {merge_us[best]:6.1f} µs, best {best_us:6.1f} µs", flush=True)
    return best


def brief(configuration: Configuration) -> str:
    """As it is written in the table: the first four fields by place, others where they differ from their defaults."""
    place, named = fields(configuration)[:4], fields(configuration)[4:]
    given = [repr(getattr(configuration, field.name)) for field in place]
    for field in named:
        value = getattr(configuration, field.name)
        if value != field.default:
            given.append(f"{field.name}=" + (f'"{value}"' if isinstance(value, str) else repr(value)))
    return f"Configuration({', '.join(given)})"


def table(entries: Sequence[tuple[int | None, int | None, Configuration]]) -> str:
    lines = [f"    ({rows or 'ANY'}, {most or 'ANY'}, {brief(entry)})," for rows, most, entry in entries]
    heading = "    # rows of a request up to, requests up to"
    return "\n".join(["TABLE: tuple[tuple[int, int, Configuration], ...] = (", heading, *lines, ")"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", type=Path, help="every time that was measured")
    parser.add_argument("--write", action="store_true", help="put the table into configurations.py")
    parser.add_argument("--processes", type=int, default=8, help="that compile")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("tune_triton_mla measures kernels, and torch sees no CUDA device here")
    started = time.monotonic()
    compile_all(arguments.processes)
    print(f"compiled after {time.monotonic() - started:.0f} s", flush=True)
    torch.manual_seed(0)
    results: list[dict[str, Any]] = []
    entries = []
    with torch.inference_mode():
        rig = Rig(torch.device("cuda", 0))
        for heads, most_rows in HEADS.items():
            for requests, most_requests in REQUESTS.items():
                print(f"[{time.monotonic() - started:4.0f} s] {heads} heads, {requests} requests", flush=True)
                entries.append((most_rows, most_requests, tune(heads, requests, rig, results)))
                torch.cuda.empty_cache()
                if arguments.json is not None:
                    arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    text = table(entries)
    print(f"\n{text}\n\n{time.monotonic() - started:.0f} s in all")
    if arguments.write:
        source = MODULE.read_text()
        replaced, count = re.subn(r"^TABLE: .*?^\)$", lambda _: text, source, flags=re.MULTILINE | re.DOTALL)
        if count != 1:
            sys.exit(f"{MODULE} has {count} tables; put it there by hand")
        MODULE.write_text(replaced)


if __name__ == "__main__":
    main()
