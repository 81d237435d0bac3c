"""Serving benchmark: Poisson arrivals at three loads, ours beside vLLM on one GPU.

python benchmarks/arrivals_h200.py --out arrivals.json            all engines and models, each in its own process
python benchmarks/arrivals_h200.py --engine vllm,ours --models llama --ttft --out arrivals.json
python benchmarks/arrivals_h200.py --table arrivals.json
python benchmarks/arrivals_h200.py --engine ours --models llama --smoke        the same code on a CPU with a tiny model

Prompts are log-uniform from 32 to 8192 tokens, outputs uniform from 32 to 128 tokens, greedy, without stop tokens and
prefix cache. All engines get the same prompts at the same times, drawn from a fixed seed. One thread adds the requests
that have arrived and steps the engine. TTFT counts from the arrival. Inter-token latency are the times between
consecutive tokens of a request, of all requests.

First all requests arrive at once: requests/s of this run are an engine's saturation. Loads are fractions of vLLM's
saturation, or of ours if vLLM refuses the model. Below saturation, throughput is that of the arrivals for every engine;
the run at saturation compares throughput.

``--ttft`` also measures ``ttft_h200.py``'s cases, before the arrivals, which saves starting each engine again.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from decode_models import MODELS
from serving import ENGINES, Limits, Server, in_processes, measure_in_process, read, synchronize
from ttft_h200 import CASES, SMOKE_CASES, cases_of, measure_ttft, ttft_table

LOADS = (0.4, 0.7, 0.95)
_SEED = 39
_WARM_UP = 24
"""Requests of the run before the measured ones."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths of requests, and how many there are. ``at_once`` is the number of requests of the saturation run."""

    prompt: tuple[int, int] = (32, 8192)
    output: tuple[int, int] = (32, 128)
    at_once: int = 400
    seconds: float = 5.0
    vocabulary: int = 32000


SMOKE = Workload(prompt=(2, 40), output=(2, 6), at_once=8, seconds=0.1, vocabulary=512)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that arrives ``at`` seconds after the start of a run."""

    at: float
    prompt: list[int]
    max_tokens: int


def arrivals(workload: Workload, rate: float | None, count: int | None = None) -> list[Arrival]:
    """Draw requests: ``count`` at once, or as many as arrive at ``rate`` per second within the workload's time.

    The n-th request is the same at every rate.
    """
    if rate is not None:
        count = max(round(rate * workload.seconds), 1)
    assert count is not None
    gaps = np.random.default_rng(_SEED).exponential(size=count)
    at = np.zeros(count) if rate is None else np.cumsum(gaps) / rate
    drawn = []
    for number in range(count):
        random = np.random.default_rng((_SEED, number))
        low, high = workload.prompt
        tokens = round(float(np.exp(random.uniform(np.log(low), np.log(high)))))
        prompt = random.integers(workload.vocabulary, size=tokens).tolist()
        drawn.append(Arrival(float(at[number]), prompt, int(random.integers(*workload.output, endpoint=True))))
    return drawn


def serve(server: Server, requests: Sequence[Arrival]) -> list[list[float]]:
    """Serve requests as they arrive; return for each the times of its tokens, in seconds since the start."""
    gc.collect()
    synchronize()
    times: list[list[float]] = [[] for _ in requests]
    added, started = 0, time.perf_counter()
    while added < len(requests) or server.has_work:
        now = time.perf_counter() - started
        while added < len(requests) and requests[added].at <= now:
            server.add(added, requests[added].prompt, requests[added].max_tokens)
            added += 1
        if not server.has_work:
            time.sleep(max(requests[added].at - (time.perf_counter() - started), 0.0))
            continue
        got = server.step()
        now = time.perf_counter() - started
        for number in got:
            times[number].append(now)
    if short := [n for n, request in enumerate(requests) if len(times[n]) != request.max_tokens]:
        raise RuntimeError(f"{len(short)} of {len(requests)} requests did not get all their tokens")
    return times


def summary(requests: Sequence[Arrival], times: Sequence[Sequence[float]]) -> dict[str, Any]:
    """TTFT and inter-token latency in milliseconds, and throughput."""
    first = [1e3 * (each[0] - request.at) for request, each in zip(requests, times, strict=True)]
    gaps = [1e3 * (after - before) for each in times for before, after in pairwise(each)]
    seconds = max(each[-1] for each in times)
    prompts, outputs = sum(len(request.prompt) for request in requests), sum(map(len, times))
    return {
        "requests": len(requests),
        "prompt_tokens": prompts,
        "output_tokens": outputs,
        "seconds": seconds,
        "requests_per_s": len(requests) / seconds,
        "output_tokens_per_s": outputs / seconds,
        "total_tokens_per_s": (prompts + outputs) / seconds,
        "ttft_ms": _percentiles(first),
        "inter_token_ms": _percentiles(gaps),
    }


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{percent}": float(np.percentile(values, percent)) for percent in (50, 90, 99, 100)}


def measure_arrivals(
    server: Server, found: dict[str, Any], save: Callable[[], None], workload: Workload, base: float | None
) -> None:
    """Measure saturation, then all loads, as fractions of ``base`` requests/s (None: of this saturation)."""
    serve(server, arrivals(workload, None, min(_WARM_UP, workload.at_once)))
    requests = arrivals(workload, None, workload.at_once)
    found["saturation"] = summary(requests, serve(server, requests))
    found["base_requests_per_s"] = base = base or found["saturation"]["requests_per_s"]
    found["loads"] = {}
    for load in LOADS:
        requests = arrivals(workload, load * base)
        found["loads"][str(load)] = summary(requests, serve(server, requests))
        save()


def base_rate(results: Mapping[str, Any], engine: str) -> float | None:
    """Return the requests/s of which loads are fractions, from the results of engines that were measured before."""
    for name in ("vllm", "ours"):
        if name == engine:
            return None
        if rate := results.get(name, {}).get("saturation", {}).get("requests_per_s"):
            return float(rate)
    return None


def table(result: dict[str, Any]) -> str:
    """Results by model and load, one line per engine, and ratios to vLLM."""
    lines = [
        "| model, load | engine | requests/s | TTFT p50, p99 (ms) | inter-token p50, p99 (ms) | output tokens/s | "
        "total tokens/s | throughput / vLLM |",
        "|---" * 8 + "|",
    ]
    for model, engines in result["models"].items():
        for load in ("saturation", *map(str, LOADS)):
            rows = {name: found.get("loads", {}).get(load, found.get(load)) for name, found in engines.items()}
            for name, row in rows.items():
                if row is None:
                    reason = f"{engines[name].get('error', 'not measured')}"
                    lines.append(f"| {model}, {load} | {name} | {reason.splitlines()[0]} |" + " |" * 5)
                    continue
                first, gap = row["ttft_ms"], row["inter_token_ms"]
                base = rows.get("vllm")
                ratio = f"{row['output_tokens_per_s'] / base['output_tokens_per_s']:.2f}" if base else ""
                lines.append(
                    f"| {model}, {load} | {name} | {row['requests_per_s']:.1f} | {first['p50']:.1f}, {first['p99']:.1f}"
                    f" | {gap['p50']:.1f}, {gap['p99']:.1f} | {row['output_tokens_per_s']:,.0f} | "
                    f"{row['total_tokens_per_s']:,.0f} | {ratio} |"
                )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default=",".join(ENGINES), help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--settings", default="{}", help="JSON of further settings of our engine")
    parser.add_argument("--seconds", type=float, default=5.0, help="time over which the requests of a load arrive")
    parser.add_argument("--ttft", action="store_true", help="measure the cases of ttft_h200.py too")
    parser.add_argument("--timeout", type=float, default=540, help="seconds of processes that start together")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out", metavar="FILE")
    parser.add_argument("--results", metavar="FILE", help="results that name vLLM's saturation; else --out")
    parser.add_argument("--lock", metavar="FILE", help="lock file: processes start together, measure one at a time")
    parser.add_argument("--table", metavar="FILE")
    arguments = parser.parse_args(argv)
    if arguments.table:
        return _print_tables(arguments.table)
    engines, models = arguments.engine.split(","), arguments.models.split(",")
    for name, values, known in (("--engine", engines, ENGINES), ("--models", models, MODELS)):
        if unknown := set(values) - set(known):
            parser.error(f"{name}: unknown {', '.join(sorted(unknown))}; give some of {', '.join(known)}")
    if len(engines) * len(models) > 1:
        if not arguments.out:
            parser.error("several engines or models need --out FILE")
        in_processes(__file__, engines, models, arguments.out, arguments.timeout)
        return _print_tables(arguments.out)
    (engine,), (model,) = engines, models
    workload = SMOKE if arguments.smoke else Workload(seconds=arguments.seconds)
    cases = cases_of(SMOKE_CASES if arguments.smoke else CASES)
    base = base_rate(read(arguments.results or arguments.out)["models"].get(model, {}), engine)

    def measure(server: Server, found: dict[str, Any], save: Callable[[], None]) -> None:
        if arguments.ttft and engine != "ours-before":
            measure_ttft(server, found, save, limits.config(model), cases)
        measure_arrivals(server, found, save, workload, base)

    limits = Limits(128, 4, "cpu") if arguments.smoke else Limits(33024, 256)
    more = json.loads(arguments.settings)
    measure_in_process(engine, model, limits, more, arguments.lock, arguments.out, measure)


def _print_tables(path: str) -> None:
    result = json.loads(Path(path).read_text())
    tables = [table(result)]
    if any("ttft" in found for engines in result["models"].values() for found in engines.values()):
        tables.append(ttft_table(result))
    print("\n\n".join(tables))


if __name__ == "__main__":
    main()
