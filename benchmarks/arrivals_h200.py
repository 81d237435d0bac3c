"""Effect of captured prefills on a server with arriving requests: with and without graphs, in one run.

python benchmarks/arrivals_h200.py --attention-backend triton_mha --models llama --out arrivals.json
python benchmarks/arrivals_h200.py --smoke        the same code on a CPU with a tiny model, without graphs

``max_batch`` requests run at a time; when one ends the next begins, so that most steps are decode steps and some
contain a prefill. Two engines alternate, in reversed order each time. Reported are tokens/s and TTFT, from the step in
which a request could begin. Results are in prefill_graphs_h200.json.
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
from decode_h200 import machine_of
from decode_models import MODELS, smaller
from decode_points import DeviceLock

from attnplug_engine import Engine
from attnplug_engine.request import Request, SamplingParams

_ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="llama,mla")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--prompts", default="32,128,400", help="tokens of prompts, one measurement each")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--turns", help="lock file for processes that share a GPU")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    lock = DeviceLock(arguments.turns)
    if arguments.smoke:
        arguments.requests, arguments.max_tokens, arguments.max_batch, arguments.prompts = 6, 4, 3, "5,9"
    found: dict[str, Any] = {"machine": machine_of(), "max_batch": arguments.max_batch, "models": {}}
    for model in arguments.models.split(","):
        config = smaller(MODELS[model]) if arguments.smoke else MODELS[model]
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            engines = {name: _engine(folder, arguments, eager=name == "eager") for name in ("eager", "captured")}
            lock.acquire()
            found["models"][model] = _measured(engines, arguments)
            found["models"][model]["graphs"] = {name: str(engine.graphs) for name, engine in engines.items()}
        if arguments.out:
            Path(arguments.out).write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found["models"], indent=1))


def _engine(folder: str, arguments: argparse.Namespace, *, eager: bool) -> Engine:
    return Engine(
        folder,
        random_weights=True,
        device="cpu" if arguments.smoke else "cuda",
        attention_backend=arguments.attention_backend,
        max_batch=arguments.max_batch,
        context_length=100 if arguments.smoke else 1024,
        prefix_cache=False,
        ignore_eos=True,
        disable_prefill_cuda_graph=eager,
    )


def _measured(engines: dict[str, Engine], arguments: argparse.Namespace) -> dict[str, Any]:
    points = []
    for tokens in map(int, arguments.prompts.split(",")):
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
        for number in range(1 + _ROUNDS):
            for name in list(engines)[:: 1 if number % 2 else -1]:
                run = _served(engines[name], tokens, arguments)
                if number:  # the first is a warm-up
                    times[name].append(run)
        point: dict[str, Any] = {"prompt": tokens}
        for name, runs in times.items():
            rates, firsts = zip(*runs, strict=True)
            point[name] = {"tokens_s": statistics.median(rates), "first_token_us": 1e6 * statistics.median(firsts)}
        point["ratio"] = point["captured"]["tokens_s"] / point["eager"]["tokens_s"]
        points.append(point)
    return {"requests": arguments.requests, "max_tokens": arguments.max_tokens, "points": points}


def _served(engine: Engine, tokens: int, arguments: argparse.Namespace) -> tuple[float, float]:
    """Tokens per second, and the median TTFT in seconds since a request was added."""
    random = np.random.default_rng(0)
    prompts = random.integers(engine.vocab_size, size=(arguments.requests, tokens)).tolist()
    # Requests of equal length would end and begin together.
    lengths = random.integers(arguments.max_tokens // 2, arguments.max_tokens * 3 // 2, arguments.requests).tolist()
    left = list(zip(prompts, lengths, strict=True))
    running: list[Request] = []
    added: dict[Request, float] = {}
    waited: list[float] = []
    started = time.perf_counter()
    while left or running:
        while left and len(running) < arguments.max_batch:
            prompt, length = left.pop()
            running.append(engine.add(prompt, SamplingParams(max_tokens=length)))
            added[running[-1]] = time.perf_counter()
        engine.step()
        now = time.perf_counter()
        waited += [now - added.pop(request) for request in list(added) if request.output]
        running = [request for request in running if request.finish_reason is None]
    return sum(lengths) / (time.perf_counter() - started), statistics.median(waited)


if __name__ == "__main__":
    main()
