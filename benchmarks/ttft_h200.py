"""Time to first token on one GPU: from ``generate`` to one token of each prompt, the first time and later.

python benchmarks/ttft_h200.py --models llama,mla --out ttft.json
python benchmarks/ttft_h200.py --models mla --settings '{"attention_backend": "triton_mla"}' --cases 1x8184,32x512
python benchmarks/ttft_h200.py --smoke        the same code on a CPU with tiny models

A case is a number of prompts and their length. ``first_ms`` is its first run in this engine, and in the first case also
the engine's first request; ``median_ms`` is the median of the others. ``first_over_tenth`` may be 1.5 (E1), and nothing
may be compiled after start-up. The prefix cache is off.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decode_h200 import machine_of
from decode_models import MODELS, smaller

from attnplug_engine import Engine

_MOST_OVER_TENTH = 1.5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="llama,mla")
    parser.add_argument("--cases", default="128x256,1x8184,1x2048,32x512,3x5000,1x512,1x64")
    parser.add_argument("--settings", default="{}", help="JSON of further engine settings")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    settings = json.loads(arguments.settings)
    cases = [
        tuple(map(int, case.split("x"))) for case in ("3x5,1x9" if arguments.smoke else arguments.cases).split(",")
    ]
    found: dict[str, Any] = {"machine": machine_of(), "settings": settings, "models": {}}
    for model in arguments.models.split(","):
        found["models"][model] = _measured(model, settings, cases, arguments)
        if arguments.out:
            Path(arguments.out).write_text(json.dumps(found, indent=1) + "\n")


def _measured(model: str, settings: dict[str, Any], cases: list[tuple[int, ...]], arguments: Any) -> dict[str, Any]:
    config = smaller(MODELS[model]) if arguments.smoke else MODELS[model]
    device = "cpu" if arguments.smoke else "cuda"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        started = time.perf_counter()
        engine = Engine(folder, random_weights=True, device=device, prefix_cache=False, ignore_eos=True, **settings)
        start_s = time.perf_counter() - started
    serving = {str(role): choice.chosen_name for role, choice in engine.selection.choices.items()}
    print(f"{model}: started in {start_s:.1f} s, {serving}", flush=True)
    points = []
    for prompts, tokens in cases:
        times = [_first_tokens(engine, prompts, tokens, device) for _ in range(1 + arguments.runs)]
        tenth = times[min(9, arguments.runs)]
        median = statistics.median(times[1:])
        points.append(
            {
                "prompts": prompts,
                "tokens": tokens,
                "first_ms": 1e3 * times[0],
                "tenth_ms": 1e3 * tenth,
                "first_over_tenth": times[0] / tenth,
                "median_ms": 1e3 * median,
                "worst_ms": 1e3 * max(times[1:]),
                "tokens_per_s": prompts * tokens / median,
            }
        )
        print(
            f"{model} {prompts} x {tokens}: first {1e3 * times[0]:.1f} ms ({times[0] / tenth:.2f} x the tenth), then "
            f"{1e3 * median:.1f} (at most {1e3 * max(times[1:]):.1f}), {prompts * tokens / median:.0f} tokens/s",
            flush=True,
        )
    late = [each.name for each in engine.compilations_since_start]
    slow = [f"{point['prompts']}x{point['tokens']}" for point in points if point["first_over_tenth"] > _MOST_OVER_TENTH]
    print(
        f"{model}: {len(late)} kernels compiled or loaded after start-up; first slower than allowed: {slow or 'none'}"
    )
    compiled = [each.name for each in engine.start_up.compiled if not each.cached]
    return {"start_s": start_s, "compiled": compiled, "late": late, "backends": serving, "points": points}


def _first_tokens(engine: Engine, prompts: int, tokens: int, device: str) -> float:
    random = np.random.default_rng(prompts + tokens)
    ids = random.integers(engine.vocab_size, size=(prompts, tokens)).tolist()
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    engine.generate(ids, max_tokens=1)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
