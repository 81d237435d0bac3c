"""Decode steps of fp8 checkpoints on an H200, against our bfloat16 and vLLM.

python benchmarks/quantized_h200.py --out benchmarks/results/quantized_h200.json
python benchmarks/quantized_h200.py --smoke                              the same code on a CPU with tiny models

Models are those of decode_models.py, 1 × 512 and 16 × 512, in bfloat16 and in fp8 blocks of 128 × 128, with random
weights; the same with vLLM, if it is installed, in processes of its own. ``share`` is the time to read fp8 weights, a
bfloat16 head and the cache at 4.2 TB/s, divided by the step's time. ``quantized_products_h200.py`` measures products.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from decode_models import BYTES_PER_SECOND, MODELS, Config, cache_bytes, parameters, smaller
from decode_points import Clock, DeviceLock, Point, Settings
from gpu_report import Report, attempt, describe

WHAT = "decode steps with quantized weights, µs"
PACKAGES = ("torch", "triton", "vllm", "attnplug-engine")
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
POINTS = ((1, 512), (16, 512))
GOALS = {"bfloat16": {1: 1.5, 16: 1.25}, "vllm": {1: 1.3, 16: 1.3}, "share": {1: 0.6}}
"""Speed-ups over bfloat16 and vLLM, and shares of the byte limit, by batch."""


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama,mla,moe")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--vllm", metavar="MODEL", help="measure vLLM only, and print the steps of MODEL as JSON")
    parser.add_argument("--lock", metavar="FILE", help="of --vllm: lock file of processes that share the GPU")
    parser.add_argument("--vllm-steps", metavar="FOLDER", type=Path, help="with MODEL.json that --vllm printed before")
    arguments = parser.parse_args(given)
    if arguments.vllm:
        config, lock = quantized(MODELS[arguments.vllm]), DeviceLock(arguments.lock)
        print(json.dumps(_measured("vllm", arguments.vllm, config, smoke=False, lock=lock)))
        return
    machine = {"what": WHAT} if arguments.smoke else describe(WHAT, PACKAGES, arguments.commit)
    report = Report(arguments.out, machine)
    report.put("goals", GOALS)
    for model in arguments.models.split(","):
        report.put(model, attempt(partial(compared, model, arguments.vllm_steps, smoke=arguments.smoke)))
        print(model, json.dumps(report.found[model]), flush=True)


def compared(model: str, vllm_steps: Path | None = None, *, smoke: bool) -> dict[str, Any]:
    """Steps of one model by batch: of each engine, ratios to ours in fp8, and our share of the byte limit."""
    config = smaller(MODELS[model]) if smoke else MODELS[model]
    steps = {name: _measured("ours", model, made, smoke=smoke) for name, made in
             (("bfloat16", config), ("fp8", quantized(config)))}  # fmt: skip
    if vllm_steps is not None:
        steps["vllm"] = json.loads((vllm_steps / f"{model}.json").read_text().splitlines()[-1])
    elif find_spec("vllm") is not None and not smoke:
        done = subprocess.run([sys.executable, __file__, "--vllm", model], capture_output=True, text=True, check=False)
        lines = done.stdout.splitlines()
        steps["vllm"] = json.loads(lines[-1]) if done.returncode == 0 and lines else {"error": done.stderr[-2000:]}
    found: dict[str, Any] = {"step_us": steps}
    for batch, context in POINTS:
        own = steps["fp8"].get(str(batch))
        if own is None:
            continue
        ratios = {
            name: times[str(batch)] / own for name, times in steps.items() if name != "fp8" and str(batch) in times
        }
        found[f"{batch} × {context}"] = {"share": limit_us(config, batch, context) / own, "speedup": ratios}
    return found


def limit_us(config: Config, batch: int, context: int) -> float:
    """Time to read a step's fp8 weights, a bfloat16 head and the cache."""
    head = 2 * config["vocab_size"] * config["hidden_size"]
    moved = parameters(config, batch=batch, ends=0) + head + cache_bytes(config, batch, context)
    return 1e6 * moved / BYTES_PER_SECOND


def quantized(config: Config) -> Config:
    return {**config, "quantization_config": FP8}


def _measured(
    engine: str, model: str, config: Config, *, smoke: bool, lock: DeviceLock | None = None
) -> dict[str, Any]:
    """Microseconds of a step by batch, or the error."""
    if engine == "ours":
        from decode_ours import measure
    else:
        from decode_vllm import measure
    points = [Point(model, batch, context) for batch, context in POINTS]
    settings = Settings(trace=False, prefill=512, is_linear="layer_types" in config)
    if smoke:
        points = [Point(model, batch, 40) for batch, _ in POINTS]
        settings = Settings(device="cpu", eager=True, trace=False, prefill=64, max_new_tokens=100)
    clock = Clock(600, lambda: None, lock or DeviceLock(None))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        measure(model, config, folder, points, settings, clock)
    gc.collect()
    found: dict[str, Any] = {
        str(point.batch): point.found.get("step_us") for point in points if "step_us" in point.found
    }
    errors = [point.found["error"] for point in points if "error" in point.found]
    return found | ({"error": errors[0]} if errors else {})


if __name__ == "__main__":
    main()
