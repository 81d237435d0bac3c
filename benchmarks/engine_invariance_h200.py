"""``batch_invariant`` on a GPU: random schedules with equal bits, and the cost of decode and prefill.

python benchmarks/engine_invariance_h200.py --out benchmarks/results/engine_invariance_h200.json
python benchmarks/engine_invariance_h200.py --smoke        the same code on a CPU with small models

Schedules: the models of decode_models.py with 4 layers, in bfloat16. Every request is compared with itself alone in an
eager engine; the others capture decode steps and prefills, chunk prompts, preempt, and speculate. Costs: the whole
models; both engines are in memory, and their runs alternate. A model that no backend serves is listed with the reason.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from decode_models import MODELS, smaller
from decode_points import DeviceLock

from attnplug.host import SelectionError
from attnplug_engine import Engine, SamplingParams
from attnplug_testing.engine_schedules import Sizes, alone, differing, settings, subjects

ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of a run. ``points`` are (requests, context) of decode steps, ``prompts`` the tokens of prefills."""

    device: str
    schedules: int
    points: Sequence[tuple[int, int]]
    prompts: Sequence[int]
    steps: int
    page_size: int = 64
    subjects: int = 12
    sizes: Sizes = Sizes(vocab=500, prompt=120, output=10, companions=8)
    context: int = 192
    """Context of the engines that play schedules."""
    engines: int | None = None
    """Number of engines that play schedules, besides the eager one. None: one per setting."""


FULL = Scale("cuda", 2000, ((1, 512), (8, 512), (64, 512), (1, 8192), (16, 8192)), (512, 4096), 64)
SMOKE = Scale("cpu", 2, ((2, 8),), (8,), 2, 8, 2, Sizes(500, prompt=10, output=3, companions=2, steps=3), 16, 1)


def shortened(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's config with at most 4 layers."""
    layers = min(config["num_hidden_layers"], 4)
    short = {**config, "num_hidden_layers": layers}
    if "layer_types" in config:
        short["layer_types"] = config["layer_types"][:layers]
    if "first_k_dense_replace" in config:
        short["first_k_dense_replace"] = min(config["first_k_dense_replace"], layers)
    return short


def write(folder: Path, config: Mapping[str, Any]) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def schedules(folder: str, scale: Scale, count: int) -> dict[str, Any]:
    """Play ``count`` schedules, divided over engines; return those whose bits differ from the request alone."""
    context, page, sizes = scale.context, scale.page_size, scale.sizes
    shared = {
        "device": scale.device, "random_weights": True, "batch_invariant": True, "ignore_eos": True, "max_batch": 12,
        "context_length": context, "page_size": page, "num_pages": 12 * (context // page + 1),
    }  # fmt: skip
    wanted = subjects(scale.subjects, sizes)
    started = time.perf_counter()
    engine = Engine(folder, **shared, disable_cuda_graph=True)
    results = alone(engine, wanted)
    found: dict[str, Any] = {"backends": backends(engine), "schedules": 0, "differing": {}}
    chosen = {"eager": {"disable_cuda_graph": True}, **dict(list(settings(context, page).items())[: scale.engines])}
    del engine
    for number, (name, given) in enumerate(chosen.items()):
        gc.collect()
        engine = Engine(folder, **{**shared, **given})
        seeds = range(number * count, number * count + -(-count // len(chosen)))
        if wrong := differing(engine, seeds, wanted, results, sizes):
            found["differing"][name] = wrong
        found["schedules"] += len(seeds)
        del engine
    return {**found, "seconds": time.perf_counter() - started}


class Timed:
    """An engine whose decode steps and prefills are timed."""

    def __init__(self, folder: str, scale: Scale, *, batch_invariant: bool) -> None:
        longest = max(*(context for _, context in scale.points), *scale.prompts) + scale.steps + 64
        self._scale = scale
        pages = max(
            requests * -(-(context + scale.steps + 64) // scale.page_size) for requests, context in scale.points
        )
        self.engine = Engine(
            folder,
            device=scale.device,
            random_weights=True,
            batch_invariant=batch_invariant,
            ignore_eos=True,
            prefix_cache=False,
            page_size=scale.page_size,
            max_batch=max(requests for requests, _ in scale.points),
            context_length=longest,
            num_pages=pages + -(-longest // scale.page_size),
        )

    def decode(self, requests: int, context: int) -> float:
        """Return the milliseconds of a decode step."""
        engine, steps = self.engine, self._scale.steps
        params = SamplingParams(max_tokens=steps + 24)
        running = [engine.add(_prompt(number, context), params) for number in range(requests)]
        while min(len(request.output) for request in running) < 8:
            engine.step()
        self._wait()
        started = time.perf_counter()
        for _ in range(steps):
            engine.step()
        self._wait()
        seconds = time.perf_counter() - started
        for request in running:
            engine.abort(request)
        while engine.step() is not None:
            pass
        return 1e3 * seconds / steps

    def prefill(self, tokens: int) -> float:
        """Return the milliseconds until the first token of a prompt."""
        self._wait()
        started = time.perf_counter()
        self.engine.generate([_prompt(0, tokens)], max_tokens=1)
        return 1e3 * (time.perf_counter() - started)

    def _wait(self) -> None:
        if self._scale.device == "cuda":
            torch.cuda.synchronize()


def _prompt(number: int, tokens: int) -> list[int]:
    return [(7 * place + 31 * number) % 499 for place in range(tokens)]


def backends(engine: Engine) -> dict[str, str | None]:
    return {str(role): choice.chosen_name for role, choice in engine.selection.choices.items()}


def costs(folder: str, scale: Scale, lock: DeviceLock) -> dict[str, Any]:
    """Measure both engines at each point, alternating; the first round is a warm-up."""
    engines = {name: Timed(folder, scale, batch_invariant=name == "invariant") for name in ("default", "invariant")}
    lock.acquire()
    points: list[dict[str, Any]] = [{"requests": requests, "context": context} for requests, context in scale.points]
    points += [{"prompt": tokens} for tokens in scale.prompts]
    for point in points:
        times: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(ROUNDS + 1):
            for name, timed in engines.items():
                run = timed.prefill(point["prompt"]) if "prompt" in point else timed.decode(*list(point.values())[:2])
                times[name].append(run)
        middle = {name: statistics.median(found[1:]) for name, found in times.items()}
        point |= {f"{name}_ms": ms for name, ms in middle.items()}
        point["speed"] = middle["default"] / middle["invariant"]
    return {"backends": {name: backends(timed.engine) for name, timed in engines.items()}, "points": points}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--part", choices=("schedules", "costs"), help="only this part")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--schedules", type=int, help="schedules of each model; 2000 in all by default")
    parser.add_argument("--lock", metavar="FILE", help="lock file: processes start together, time costs one at a time")
    arguments = parser.parse_args()
    lock = DeviceLock(arguments.lock)
    scale = SMOKE if arguments.smoke else FULL
    report: dict[str, Any] = {"device": scale.device, "torch": torch.__version__, "models": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            config = smaller(MODELS[name]) if arguments.smoke else MODELS[name]
            found: dict[str, Any] = {}
            try:
                if arguments.part != "costs":
                    count = arguments.schedules or -(-scale.schedules // len(arguments.models))
                    found["schedules"] = schedules(
                        write(Path(folder) / f"{name}-short", shortened(config)), scale, count
                    )
                if arguments.part != "schedules":
                    found["costs"] = costs(write(Path(folder) / name, config), scale, lock)
            except SelectionError as error:
                found["refused"] = str(error)
            report["models"][name] = found
            print(name, json.dumps(found)[:2000], flush=True)
            if arguments.out is not None:
                arguments.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
