"""fp8 checkpoints on an H200: whole models against our bfloat16 and vLLM, and single products against libraries.

python benchmarks/quantized_h200.py --out benchmarks/results/quantized_h200.json
python benchmarks/quantized_h200.py --smoke                              the same code on a CPU with tiny models

``models``: decode steps of the models of decode_models.py, 1 × 512 and 16 × 512, in bfloat16 and in fp8 blocks of 128 ×
128, with random weights; the same with vLLM, if it is installed, in processes of its own. ``share`` is the time to read
fp8 weights, a bfloat16 head and the cache at 4.2 TB/s, divided by the step's time. ``products``: one weight ``[24576,
7168]`` in fp8 blocks, int4 and MXFP4; ``share`` is that of the codes and scales. Calls cycle over enough weights that
none is found in L2. ``quantized_products_h200.py`` sweeps over configurations.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from decode_models import BYTES_PER_SECOND, MODELS, Config, cache_bytes, parameters, smaller
from decode_points import Clock, DeviceLock, Point, Settings
from gpu_clock import device_us
from gpu_report import Report, attempt, describe
from quantized_products_h200 import drawn

from attnplug_engine.quantization import libraries
from attnplug_engine.quantization.fp8 import Fp8Blocks
from attnplug_engine.quantization.int4 import Int4Groups
from attnplug_engine.quantization.mxfp4 import Mxfp4
from attnplug_engine.quantization.scheme import QuantizedWeight, Scheme

WHAT = "decode steps and products with quantized weights, µs"
PACKAGES = ("torch", "triton", "vllm", "sgl-deep-gemm", "attnplug-engine")
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
POINTS = ((1, 512), (16, 512))
GOALS = {"bfloat16": {1: 1.5, 16: 1.25}, "vllm": {1: 1.3, 16: 1.3}, "share": {1: 0.6}, "product": 0.75}
"""Speed-ups over bfloat16 and vLLM, and shares of the byte limit, by batch."""
ROWS = (1, 4, 16, 64, 256, 1024)
COLD_BYTES = 400 << 20


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama,mla,moe")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--vllm", metavar="MODEL", help="measure vLLM only, and print the steps of MODEL as JSON")
    arguments = parser.parse_args(given)
    if arguments.vllm:
        print(json.dumps(_measured("vllm", arguments.vllm, _quantized(MODELS[arguments.vllm]), smoke=False)))
        return
    machine = {"what": WHAT} if arguments.smoke else describe(WHAT, PACKAGES, arguments.commit)
    report = Report(arguments.out, machine)
    report.put("goals", GOALS)
    for model in arguments.models.split(","):
        report.put(model, attempt(lambda model=model: compared(model, smoke=arguments.smoke)))
        print(model, json.dumps(report.found[model]), flush=True)
    for name, scheme in (("fp8", Fp8Blocks()), ("int4", Int4Groups(32)), ("mxfp4", Mxfp4())):
        report.put(f"products, {name}", attempt(lambda scheme=scheme: products(scheme, smoke=arguments.smoke)))
        print(name, json.dumps(report.found[f"products, {name}"]), flush=True)


def compared(model: str, *, smoke: bool) -> dict[str, Any]:
    """Steps of one model by batch: of each engine, ratios to ours in fp8, and our share of the byte limit."""
    config = smaller(MODELS[model]) if smoke else MODELS[model]
    steps = {name: _measured("ours", model, made, smoke=smoke) for name, made in
             (("bfloat16", config), ("fp8", _quantized(config)))}  # fmt: skip
    if find_spec("vllm") is not None and not smoke:
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


def _quantized(config: Config) -> Config:
    return {**config, "quantization_config": FP8}


def _measured(engine: str, model: str, config: Config, *, smoke: bool) -> dict[str, Any]:
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
    clock = Clock(600, lambda: None, DeviceLock(None))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        measure(model, config, folder, points, settings, clock)
    gc.collect()
    found: dict[str, Any] = {
        str(point.batch): point.found.get("step_us") for point in points if "step_us" in point.found
    }
    errors = [point.found["error"] for point in points if "error" in point.found]
    return found | ({"error": errors[0]} if errors else {})


def products(scheme: Scheme, *, smoke: bool) -> dict[str, Any]:
    """Microseconds of products by rows: our kernel, the libraries, and a bfloat16 weight; our share of the limit."""
    outputs, width = (256, 256) if smoke else (24576, 7168)
    device = torch.device("cpu" if smoke else "cuda")
    weight = drawn(scheme, outputs, width, device.type)
    copies = 1 if smoke else -(-COLD_BYTES // weight.nbytes)
    weights = [weight, *(drawn(scheme, outputs, width, device.type) for _ in range(copies - 1))]
    plain = torch.randn(outputs, width, device=device, dtype=torch.bfloat16)
    found: dict[str, Any] = {}
    for rows in (1, 4) if smoke else ROWS:
        x = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
        wanted = scheme.reference(x, weight).float()
        error = float((scheme.multiply(x, weight).float() - wanted).norm() / wanted.norm())
        entry: dict[str, Any] = {"error": error}
        if not smoke:
            entry["us"] = times = device_us(_calls(scheme, x, weights, plain), 20, lambda: None)
            entry["share"] = 1e6 * weight.nbytes / BYTES_PER_SECOND / times["ours"]
        found[str(rows)] = entry
    return found


def _calls(scheme: Scheme, x: torch.Tensor, weights: list[QuantizedWeight], plain: torch.Tensor) -> dict[str, Any]:
    """Calls to be timed. Each takes the next weight, so that none is in L2."""
    turn = {"next": 0}

    def following() -> QuantizedWeight:
        turn["next"] = (turn["next"] + 1) % len(weights)
        return weights[turn["next"]]

    calls: dict[str, Any] = {
        "ours": lambda: scheme.multiply(x, following()),
        "bfloat16": lambda: x @ plain.t(),
    }
    if scheme.kernel == "fp8" and libraries.block_product(x.device) is not None:
        from attnplug_engine.kernels.scaled_rows import scale_rows

        def deep_gemm() -> torch.Tensor:
            weight = following()
            return libraries.deep_gemm_blocks(*scale_rows(x), weight.codes, weight.scales)

        calls["deep_gemm"] = deep_gemm
    return calls


if __name__ == "__main__":
    main()
