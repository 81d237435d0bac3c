"""Time to first token on one GPU, ours beside vLLM: from the first ``add`` to one token of each prompt.

python benchmarks/ttft_h200.py --out ttft.json            both engines and all models, each in its own process
python benchmarks/ttft_h200.py --engine ours --models mla --settings '{"attention_backend": "triton_mla"}' \
    --cases 1x8184,32x512
python benchmarks/ttft_h200.py --table ttft.json
python benchmarks/ttft_h200.py --engine ours --models mla --smoke        the same code on a CPU with a tiny model

A case is a number of prompts, which arrive at once, and their length. Each runs ten times with other prompts:
``first_ms`` is its first run in this engine (in the first case also the engine's first request), ``tenth_ms`` the last,
``median_ms`` the median of all but the first. The prefix cache is off. Ours also reports the kernels that were compiled
or loaded after start-up: there may be none (E1).

TFLOP/s of the dense models count, for each prompt of n tokens, 2 n for each parameter outside of embedding and head,
and causal attention: layers x heads x (query and key width + value width) x n^2, which is half of the full square. The
share is that of 707 TFLOP/s, a plain bf16 matmul of 8192^3 on an H200.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from decode_models import MODELS, TFLOPS, Config, has_experts, prefill_flops
from serving import Limits, Server, in_processes, measure_in_process, synchronize

CASES = "1x512,1x2048,1x8184,1x32000,32x512,128x256"
SMOKE_CASES = "3x5,1x9"
_RUNS = 10
_ENGINES = ("vllm", "ours")


def cases_of(text: str) -> list[tuple[int, int]]:
    """Parse cases like ``32x512``: prompts x tokens."""
    return [(int(prompts), int(tokens)) for prompts, _, tokens in (case.partition("x") for case in text.split(","))]


def measure_ttft(
    server: Server,
    found: dict[str, Any],
    save: Callable[[], None],
    config: Config,
    cases: Sequence[tuple[int, int]],
) -> None:
    """Measure all cases of a model into ``found["ttft"]``."""
    found["ttft"] = points = []
    for prompts, tokens in cases:
        times = [_first_tokens(server, prompts, tokens, config["vocab_size"], run) for run in range(_RUNS)]
        median = statistics.median(times[1:])
        point: dict[str, Any] = {
            "prompts": prompts,
            "tokens": tokens,
            "first_ms": 1e3 * times[0],
            "tenth_ms": 1e3 * times[-1],
            "median_ms": 1e3 * median,
            "worst_ms": 1e3 * max(times[1:]),
            "tokens_per_s": prompts * tokens / median,
        }
        if not has_experts(config):
            point["tflops"] = prompts * prefill_flops(config, tokens) / median / 1e12
        points.append(point)
        print(json.dumps(point), flush=True)
        server.note_late_compilations()
        save()


def _first_tokens(server: Server, prompts: int, tokens: int, vocabulary: int, run: int) -> float:
    """Seconds until each of ``prompts`` requests has its only token."""
    ids = np.random.default_rng((prompts, tokens, run)).integers(vocabulary, size=(prompts, tokens)).tolist()
    synchronize()
    started = time.perf_counter()
    for number, prompt in enumerate(ids):
        server.add(number, prompt, 1)
    while server.has_work:
        server.step()
    return time.perf_counter() - started


def ttft_table(result: dict[str, Any]) -> str:
    """TTFT of both engines, vLLM's time over ours, and our first request over our tenth."""
    lines = [
        "| model, prompts | vLLM (ms) | ours (ms) | vLLM / ours | ours, first / tenth | ours, tokens/s | "
        f"ours, of {TFLOPS} TFLOP/s | vLLM, of {TFLOPS} |",
        "|---" * 8 + "|",
    ]
    for model, engines in result["models"].items():
        by = {
            engine: {(point["prompts"], point["tokens"]): point for point in engines.get(engine, {}).get("ttft", [])}
            for engine in _ENGINES
        }
        for key in dict.fromkeys(key for points in by.values() for key in points):
            vllm, ours = by["vllm"].get(key), by["ours"].get(key)
            cells = [f"{point['median_ms']:.1f}" if point else "" for point in (vllm, ours)]
            cells.append(f"{vllm['median_ms'] / ours['median_ms']:.2f}" if vllm and ours else "")
            cells.append(f"{ours['first_ms'] / ours['tenth_ms']:.2f}" if ours else "")
            cells.append(f"{ours['tokens_per_s']:,.0f}" if ours else "")
            for point in (ours, vllm):
                cells.append(f"{100 * point['tflops'] / TFLOPS:.0f} %" if point and "tflops" in point else "")
            lines.append(f"| {model}, {key[0]} × {key[1]} | {' | '.join(cells)} |")
        for engine in _ENGINES:
            if "error" in engines.get(engine, {}):
                lines.append(f"| {model} | {engine}: {engines[engine]['error'].splitlines()[0]} |" + " |" * 6)
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default=",".join(_ENGINES), help=f"of {', '.join(_ENGINES)}")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--cases", default=CASES, help="prompts x tokens of each")
    parser.add_argument("--settings", default="{}", help="JSON of further settings of our engine")
    parser.add_argument("--timeout", type=float, default=540, help="seconds of processes that start together")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out", metavar="FILE")
    parser.add_argument("--results", help=argparse.SUPPRESS)  # of arrivals_h200.py
    parser.add_argument("--lock", metavar="FILE", help="lock file: processes start together, measure one at a time")
    parser.add_argument("--table", metavar="FILE")
    arguments = parser.parse_args(argv)
    if arguments.table:
        return print(ttft_table(json.loads(Path(arguments.table).read_text())))
    engines, models = arguments.engine.split(","), arguments.models.split(",")
    for name, values, known in (("--engine", engines, _ENGINES), ("--models", models, MODELS)):
        if unknown := set(values) - set(known):
            parser.error(f"{name}: unknown {', '.join(sorted(unknown))}; give some of {', '.join(known)}")
    if len(engines) * len(models) > 1:
        if not arguments.out:
            parser.error("several engines or models need --out FILE")
        in_processes(__file__, engines, models, arguments.out, arguments.timeout)
        return print(ttft_table(json.loads(Path(arguments.out).read_text())))
    (engine,), (model,) = engines, models
    cases = cases_of(SMOKE_CASES if arguments.smoke else arguments.cases)
    limits = Limits(128, 4, "cpu") if arguments.smoke else Limits(33024, 256)
    more = json.loads(arguments.settings)

    def measure(server: Server, found: dict[str, Any], save: Callable[[], None]) -> None:
        measure_ttft(server, found, save, limits.config(model), cases)

    measure_in_process(engine, model, limits, more, arguments.lock, arguments.out, measure)


if __name__ == "__main__":
    main()
