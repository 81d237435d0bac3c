"""Decode of whole models on one GPU: ours against vLLM, transformers and the memory-bandwidth limit.

python benchmarks/decode_h200.py --engine ours --out ours.json           one engine per process
python benchmarks/decode_h200.py --engine vllm --out vllm.json
python benchmarks/decode_h200.py --merge ours.json vllm.json --out benchmarks/results/decode_h200.json
python benchmarks/decode_h200.py --table benchmarks/results/decode_h200.json
python benchmarks/decode_h200.py --smoke --engine ours                   the same code on a CPU with tiny models

Four models with random weights in memory: two dense ones, a mixture of experts, and a hybrid with linear attention
(decode_models.py). A point is a batch of requests with equal context lengths. The time from step to step is measured
while all of them decode; then some steps are traced. A point that fails is recorded with its error.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from decode_models import BYTES_PER_SECOND, DENSE, MODELS, Config, distinct_experts, limit_us, parameters, smaller
from decode_points import Clock, DeviceLock, Point, Settings, error_text, points_of
from decode_report import prefill_table, rates_table, steps_table

_PACKAGES = (
    "torch",
    "triton",
    "vllm",
    "sglang",
    "sglang-kernel",
    "transformers",
    "flashinfer-python",
    "flash-attn-4",
    "sgl-flash-mla",
    "fla-core",
)


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.table:
        result = json.loads(Path(arguments.table).read_text())
        print("\n\n".join((rates_table(result), steps_table(result), prefill_table(result))))
    elif arguments.merge:
        _save(arguments.out, merged([json.loads(Path(path).read_text()) for path in arguments.merge]))
    elif arguments.engine:
        models = arguments.models.split(",")
        if unknown := set(models) - set(MODELS):
            sys.exit(f"unknown models: {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
        separate = arguments.engine != "ours" and len(models) > 1
        found = _in_processes(arguments, models) if separate else measured(arguments, models)
        _save(arguments.out, found)
        print(rates_table(found), steps_table(found), prefill_table(found), sep="\n\n")
    else:
        sys.exit("give --engine, --merge or --table")


def measured(arguments: argparse.Namespace, models: list[str]) -> dict[str, Any]:
    """Results of one engine for all models. The remaining time is shared evenly by the remaining models."""
    batches, contexts = _numbers(arguments.batches), _numbers(arguments.contexts)
    settings = Settings(
        attention_backend=arguments.attention_backend,
        prefill_backend=arguments.prefill_attention_backend,
        eager=arguments.eager,
        no_overlap=arguments.no_overlap,
        fill_cache=not arguments.compute_contexts,
        trace=not arguments.no_trace,
        prefill_models=DENSE,
    )
    if arguments.smoke:
        batches, contexts = [1, 3], [40, 100]
        settings = replace(settings, device="cpu", prefill=64, max_new_tokens=100, eager=True)
    end, lock = time.perf_counter() + arguments.budget, DeviceLock(arguments.turns)
    machine = machine_of()
    points: list[Point] = []
    notes: dict[str, Any] = {}
    prefills: dict[str, Any] = {}

    def found() -> dict[str, Any]:
        of_engine = {"models": notes, "prefill": prefills, "points": [_entry(point) for point in points if point.found]}
        return {"machine": machine, "engines": {arguments.engine: of_engine}}

    for number, model in enumerate(models):
        config = smaller(MODELS[model]) if arguments.smoke else MODELS[model]
        own = points_of(model, batches, contexts)
        points += own
        left = (end - time.perf_counter()) / (len(models) - number)
        clock = Clock(left, lambda: _save(arguments.out, found()), lock)
        clock.notes, clock.prefill = notes, prefills
        is_linear = "layer_types" in config
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            try:
                if clock.left_s <= 0:
                    raise TimeoutError("no time was left")
                _engine(arguments.engine)(model, config, folder, own, replace(settings, is_linear=is_linear), clock)
            except Exception as error:
                print(f"{model}: {error_text(error)}", flush=True)
                for point in own:
                    point.found.setdefault("error", error_text(error))
    return found()


def _engine(name: str) -> Any:
    """Import an engine's ``measure``, and only its own libraries."""
    if name == "ours":
        from decode_ours import measure
    elif name == "vllm":
        from decode_vllm import measure
    else:
        from decode_transformers import measure
    return measure


def _in_processes(arguments: argparse.Namespace, models: list[str]) -> dict[str, Any]:
    """Measure each model in its own process: these engines free their memory only when the process ends."""
    end = time.perf_counter() + arguments.budget
    if arguments.engine == "transformers":
        models = [model for model in models if model in DENSE]
    results = []
    for number, model in enumerate(models):
        left = (end - time.perf_counter()) / (len(models) - number)
        with tempfile.TemporaryDirectory() as folder:
            # Next to the result, in case this process is killed.
            out = Path(f"{arguments.out}.{model}" if arguments.out else f"{folder}/found.json")
            out.unlink(missing_ok=True)
            # The last of duplicate options counts.
            own = ["--models", model, "--out", str(out), "--budget", f"{left}"]
            try:  # ends a start that hangs; the budget itself ends earlier
                subprocess.run([sys.executable, __file__, *sys.argv[1:], *own], timeout=max(left + 30, 1), check=False)
            except subprocess.TimeoutExpired:
                print(f"{model}: no answer within {left + 30:.0f} s", flush=True)
            if out.exists():
                results.append(json.loads(out.read_text()))
    return merged(results)


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge results of several processes. Of duplicate points the last one that did not fail counts."""
    whole: dict[str, Any] = {"machine": {}, "engines": {}}
    for result in results:
        whole["machine"] |= result["machine"]
        for engine, found in result["engines"].items():
            into = whole["engines"].setdefault(engine, {"models": {}, "prefill": {}, "points": []})
            into["models"] |= found["models"]
            into["prefill"] |= found["prefill"]
            known = {(point["model"], point["batch"], point["context"]): point for point in into["points"]}
            for point in found["points"]:
                key = point["model"], point["batch"], point["context"]
                if key not in known or "step_us" in point or "step_us" not in known[key]:
                    known[key] = point
            into["points"] = list(known.values())
    return whole


def _entry(point: Point) -> dict[str, Any]:
    """A point as saved: its results, and the terms of its limit."""
    config: Config = MODELS[point.model]
    entry: dict[str, Any] = {"model": point.model, "batch": point.batch, "context": point.context}
    entry["limit_us"] = limit_us(config, point.batch, point.context)
    if experts := config.get("num_experts", 0) or (config.get("n_routed_experts", 0) if point.model == "moe" else 0):
        entry["experts_expected"] = distinct_experts(experts, config["num_experts_per_tok"], point.batch)
    if "step_us" in point.found:
        entry["tokens_per_s"] = 1e6 * point.batch / point.found["step_us"]
        entry["share"] = entry["limit_us"] / point.found["step_us"]
    return _rounded({**entry, **point.found})


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def machine_of() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"host": platform.machine(), "python": platform.python_version()}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    found["bytes_a_second"] = BYTES_PER_SECOND
    found["parameters"] = {name: round(parameters(config)) for name, config in MODELS.items()}
    return found


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _save(path: str | None, result: dict[str, Any]) -> None:
    if path:
        Path(path).write_text(json.dumps(result, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["ours", "vllm", "transformers"])
    parser.add_argument("--models", default="llama,mla,moe,hybrid")
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--contexts", default="512,8192")
    parser.add_argument(
        "--budget", type=float, default=600, help="seconds in all; the largest points are left out first"
    )
    parser.add_argument("--turns", metavar="FILE", help="lock file: processes with the same file measure one at a time")
    parser.add_argument("--attention-backend", default="auto", help="ours: the backend to run on")
    parser.add_argument("--prefill-attention-backend", help="ours: the one that prefills, if it is another")
    parser.add_argument("--eager", action="store_true", help="ours and vLLM: no CUDA graphs")
    parser.add_argument("--no-overlap", action="store_true", help="ours: schedule a step after the one before it")
    parser.add_argument("--no-trace", action="store_true", help="ours: rates alone")
    parser.add_argument(
        "--compute-contexts", action="store_true", help="ours: prefill contexts, and not fill the cache"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny models, batches and contexts on the CPU")
    parser.add_argument("--out", metavar="FILE")
    parser.add_argument("--merge", nargs="+", metavar="FILE")
    parser.add_argument("--table", metavar="FILE")
    return parser


if __name__ == "__main__":
    main()
