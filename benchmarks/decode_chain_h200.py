"""Time of attention, output projection, norm and gate-up projection of decode layers on an H200, in about two minutes.

python benchmarks/decode_chain_h200.py --out benchmarks/results/decode_chain_h200.json
python benchmarks/decode_chain_h200.py --smoke                           tiny layers on a CPU, kernels interpreted

Graphs have 16 layers of ``decode_models``' Llama-1B or MLA model, each with its own weights and cache. Layers call the
engine's modules and backends as a captured step does; queries, keys and values of a layer are columns of the previous
layer's result, so that every layer waits for the one before. All times are microseconds per layer, medians of replays
that alternate between graphs. For each of the four shapes:

- ``base``: the chain as it is, and ``base again`` for the spread;
- ``alone``: the same calls with one kind of kernel only; ``floor``: bytes of each part at 4.2 TB/s; ``without``: the
  chain with one part left out;
- ``a``: products that load or prefetch weights before they wait for attention (programmatic dependent launch; the base
  already does for one row), and other tile configurations, which change what fits beside attention;
- ``b``: a side stream that prefetches the next weights into L2 during attention, by bytes and programs;
- ``c``: other splits and merges of attention.

A variant is timed if a layer of it agrees with float64, its results with the base's, and its replays with each other.
Errors are recorded in its place. ``timelines`` are the kernels of two layers of the base and of the best variants, as
the profiler sees them.
Kernels are compiled first, by processes that share Triton's cache. No variant begins after ``--seconds``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from decode_models import MODELS, smaller
from decode_trace import recorded
from gpu_clock import capture, device_us
from gpu_report import Report, attempt, describe
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is defined

from decode_chain import Chain, Shape, exact_layer
from decode_chain_variants import Variant, base_of, parts_of, variants, warm

WHAT = "decode layers: attention, output projection, norm and gate-up in CUDA graphs, µs of a layer"
PACKAGES = ("torch", "triton", "attnplug", "attnplug-engine", "attnplug-triton-mha", "attnplug-triton-mla")
LAYERS = 16
ROUNDS, REPEATS = 21, 3
_COMPILE_SECONDS = 100
_SLEEP = 400_000
"""Clock cycles before each replay, in which the host launches it."""
_LARGEST_ERROR = 0.02
"""Largest relative distance of a layer's results from float64, by norms. bfloat16 rounds to 0.002."""
_LARGEST_DRIFT = 0.1
"""Largest distance from the base's results after all layers, each of which rounds once more."""


# Checks


def difference(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """Largest relative distance of results, by norms; NaN counts as infinite."""
    pairs = zip(found, wanted, strict=True)
    each = [float((one.double() - other.double()).norm() / other.double().norm()) for one, other in pairs]
    return max(math.inf if math.isnan(value) else value for value in each)


class Runs:
    """Runs of a variant: replays of its graph, or calls where there are no graphs."""

    def __init__(self, variant: Variant, chain: Chain) -> None:
        self._variant, self._chain, self._replay = variant, chain, None
        if chain.is_cuda:
            graph, self._out = capture(lambda: variant.run(chain))  # type: ignore[arg-type,return-value] # of tensors
            self._replay = graph.replay

    def replay(self) -> None:
        if self._replay is None:
            self._variant.run(self._chain)
        else:
            self._replay()

    def results(self) -> tuple[Tensor, ...]:
        """Results of one run, in memory that had none before."""
        if self._replay is None:
            return self._variant.run(self._chain)
        for out in self._out:
            out.fill_(math.nan)
        self._replay()
        torch.cuda.synchronize()
        return tuple(out.clone() for out in self._out)

    def stable_results(self) -> tuple[Tensor, ...]:
        """Results that further runs repeat; raises if they differ by more than the order of their sums explains."""
        first = self.results()
        for _ in range(REPEATS if self._chain.is_cuda else 0):
            if (distance := difference(self.results(), first)) > _LARGEST_ERROR / 4:
                raise RuntimeError(f"runs differ from each other by {distance:.4f}")
        return first


# Measurement


def measure(shape: Shape, chain: Chain, over: Callable[[], bool], *, layers: int, kinds: str = "abc") -> dict[str, Any]:
    """Everything of one shape. ``over`` returns True if no further variant may begin."""
    exact = exact_layer(chain, chain.first, chain.hidden)
    base = base_of(chain)
    error = difference(base.run(chain, 1), exact)
    found: dict[str, Any] = {"floor_us": chain.floors(), "base_error": error, "errors": {}, "left_out": []}
    if error > _LARGEST_ERROR:
        found["errors"]["base"] = f"the base differs from float64 by {error:.4f}"
        return found
    graphs: dict[str, Runs] = {"base": Runs(base, chain), "base again": Runs(base, chain)}
    wanted = graphs["base"].stable_results()
    differences: dict[str, float] = {}
    for name, part in parts_of(chain).items():
        made = attempt(partial(Runs, part, chain))
        (graphs if isinstance(made, Runs) else found["errors"])[name] = made
    for name, build in variants(chain, kinds):
        if over():
            found["left_out"].append(name)
            continue
        made = attempt(partial(_checked, build, chain, exact, wanted))
        if isinstance(made, dict):
            found["errors"][name] = made["error"]
        else:
            graphs[name], differences[name] = made
    found["difference"] = differences
    if not chain.is_cuda:
        return found
    times = device_us({name: runs.replay for name, runs in graphs.items()}, ROUNDS, lambda: torch.cuda._sleep(_SLEEP))
    us = {name: time / layers for name, time in times.items()}
    found["us"] = {name: round(time, 3) for name, time in us.items()}
    found["share_of_floor"] = sum(found["floor_us"].values()) / us["base"]
    found["best"] = {}
    for kind in "abc":
        own = {name: time for name, time in us.items() if name.startswith(f"{kind}:")}
        if own:
            name = min(own, key=lambda each: own[each])
            found["best"][kind] = {"name": name, "us": round(own[name], 3), "of_base": round(own[name] / us["base"], 4)}
    traced = {"base", *(best["name"] for best in found["best"].values())}
    found["timelines"] = {
        name: attempt(partial(timeline, graphs[name], layers)) for name in sorted(traced) if not over()
    }
    return found


def _checked(
    build: Callable[[], Variant], chain: Chain, exact: tuple[Tensor, ...], wanted: tuple[Tensor, ...]
) -> tuple[Runs, float]:
    variant = build()
    if (error := difference(variant.run(chain, 1), exact)) > _LARGEST_ERROR:
        raise RuntimeError(f"a layer differs from float64 by {error:.4f}")
    runs = Runs(variant, chain)
    distance = difference(runs.stable_results(), wanted)
    if distance > _LARGEST_DRIFT:
        raise RuntimeError(f"results differ from the base's by {distance:.4f}")
    return runs, distance


def timeline(runs: Runs, layers: int) -> list[list[Any]]:
    """Kernels of two layers in the middle of a replay: name, start and end in microseconds."""

    def replays(count: int) -> float:
        for _ in range(count):
            runs.replay()
        torch.cuda.synchronize()
        return 0.0

    events, _ = recorded(replays, 2, is_cuda=True)
    kernels = sorted((event["ts"], event["dur"], event["name"]) for event in events if event.get("cat") == "kernel")
    kernels = kernels[len(kernels) // 2 :]  # the second replay
    begin, end = kernels[0][0], max(start + took for start, took, _ in kernels)
    first, last = (begin + (end - begin) * part / layers for part in (layers // 2, layers // 2 + 2))
    inside = [each for each in kernels if first <= each[0] < last]
    return [[name[:60], round(start - first, 2), round(start + took - first, 2)] for start, took, name in inside]


def _compile(shapes: list[Shape], part: int, parts: int, kinds: str) -> None:
    """Call every kernel of a part once."""
    for index, shape in enumerate(shapes):
        chain = Chain(shape, MODELS[shape.model], 1, torch.device("cuda"))
        todo: list[Callable[[], None]] = [lambda chain=chain: base_of(chain).run(chain)]
        todo += [lambda chain=chain: chain.layers[0].norm(chain.hidden)]
        todo += [lambda chain=chain, build=build: warm(chain, build()) for _, build in variants(chain, kinds)]
        for each in todo[(part + index) % parts :: parts]:
            attempt(each)
    torch.cuda.synchronize()


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama,mla")
    parser.add_argument("--requests", default="1,16")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--kinds", default="abc", help="kinds of variants to time, e.g. ac")
    parser.add_argument("--seconds", type=float, default=210.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--compile", metavar="PART/PARTS", help="only fill Triton's cache with a part of the kernels")
    arguments = parser.parse_args(given)
    models, requests = arguments.models.split(","), [int(each) for each in arguments.requests.split(",")]
    with torch.inference_mode():
        if arguments.smoke:
            _smoke(models, requests, Report(arguments.out, {"what": WHAT}))
            return
        if not torch.cuda.is_available():
            sys.exit(
                "decode_chain_h200 measures kernels of an NVIDIA GPU, and torch sees none here; --smoke needs none"
            )
        shapes = [Shape(model, count, arguments.context) for model in models for count in requests]
        if arguments.compile:
            part, parts = map(int, arguments.compile.split("/"))
            _compile(shapes, part, parts, arguments.kinds)
            return
        report = Report(arguments.out, describe(WHAT, PACKAGES, arguments.commit))
        parts = max((os.cpu_count() or 2) - 2, 1)
        same = ["--models", arguments.models, "--requests", arguments.requests, "--context", str(arguments.context)]
        same += ["--kinds", arguments.kinds]
        workers = [
            subprocess.Popen([sys.executable, __file__, *same, "--compile", f"{part}/{parts}"]) for part in range(parts)
        ]
        for worker in workers:
            try:
                worker.wait(timeout=max(_COMPILE_SECONDS - report.seconds, 0.1))
            except subprocess.TimeoutExpired:  # the rest is compiled when it is first called
                worker.kill()
        report.put("compiled after", report.seconds)
        for shape in shapes:
            found = attempt(partial(_measured, shape, lambda: report.seconds > arguments.seconds, arguments.kinds))
            report.put(str(shape), found)
            print(f"[{report.seconds:4.0f} s] {shape}: base {found.get('us', {}).get('base')},", end=" ")
            print(found.get("best") or found.get("error") or found.get("errors"), flush=True)
            torch.cuda.empty_cache()


def _measured(shape: Shape, over: Callable[[], bool], kinds: str) -> dict[str, Any]:
    chain = Chain(shape, MODELS[shape.model], LAYERS, torch.device("cuda"))
    return measure(shape, chain, over, layers=LAYERS, kinds=kinds)


def _smoke(models: list[str], requests: list[int], report: Report) -> None:
    for model in models:
        for count in requests:
            shape = Shape(model, min(count, 2), 20)
            chain = Chain(shape, {**smaller(MODELS[model]), "intermediate_size": 192}, 1, torch.device("cpu"))
            report.put(str(shape), measure(shape, chain, lambda: False, layers=1))
    print(json.dumps(report.found))


if __name__ == "__main__":
    main()
