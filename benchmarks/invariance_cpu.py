"""Cost of invariance on one CPU core: torch_native by layer, and the engine with small models.

python benchmarks/invariance_cpu.py --out benchmarks/results/invariance_cpu.json
python benchmarks/invariance_cpu.py --smoke        the same code with tiny cases

Runs without and with all levels alternate; ``ratio`` is the median time with levels divided by that without.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from decode_points import DeviceLock
from engine_invariance_h200 import Scale, costs, write
from gpu_report import Report
from invariance_h200 import PAGE, Bench, Shape

from attnplug import ForwardBatch, ForwardMode, Geometry
from attnplug.host import Limits, MLADims, load_registry, plan_forward

WHAT = "times on one CPU core in float32 without and with all levels of invariance, and their ratio"
ROUNDS = 7
SHAPES = (Shape("mha", 32), Shape("mla", 16))
DECODES = ((1, 1000), (1, 4000), (8, 1000), (8, 4000))
"""Requests, and rows of each."""
EXTENDS = ((0, 1000), (900, 100), (3000, 1000))
"""Cached and new rows of one request."""
_LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 2048, "intermediate_size": 5632, "vocab_size": 4096,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip
_DEEPSEEK = {
    "model_type": "deepseek_v2", "num_hidden_layers": 2, "hidden_size": 2048, "intermediate_size": 5632,
    "vocab_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
    "routed_scaling_factor": 1.0, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip
MODELS = {"llama": _LLAMA, "deepseek_v2": _DEEPSEEK}
FULL = Scale("cpu", 0, ((1, 512), (8, 512)), (512,), 16)
_TINY_DIMS = MLADims(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16)
_TINY_SIZES = {
    "hidden_size": 64, "intermediate_size": 64, "vocab_size": 512, "moe_intermediate_size": 32, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip


def smaller(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's config with tiny sizes, in the fields that it has."""
    return {key: _TINY_SIZES.get(key, value) for key, value in config.items()}


def layer_times(shape: Shape, before: Sequence[int], new: int) -> dict[str, float]:
    """Time one layer of torch_native over requests of ``before`` cached and ``new`` new rows, plan included."""
    pages = max(-(-(rows + new) // PAGE) for rows in before)
    limits = Limits(len(before), len(before) * new, max(before) + new)
    bench = Bench(shape, torch.device("cpu"), len(before) * pages, 1, limits)
    table = torch.randperm(len(before) * pages).view(len(before), pages).int()
    mode = ForwardMode.DECODE if new == 1 else ForwardMode.EXTEND
    q, claimed = (
        bench.queries(len(before) * new, 1),
        load_registry().backends["torch_native"].spec.capabilities.invariant,
    )
    built = {
        label: bench.build("torch_native", levels)
        for label, levels in (("default", frozenset()), ("invariant", claimed))
    }
    times: dict[str, list[float]] = {label: [] for label in built}
    for _ in range(ROUNDS + 1):
        for label, backend in built.items():
            lengths = [new] * len(before), [rows + new for rows in before]
            batch = ForwardBatch(Geometry.of_lengths(mode, table, *lengths, PAGE))
            started = time.perf_counter()
            plan_forward(backend, batch)
            run = backend.forward_decode if new == 1 else backend.forward_extend
            run(q, None, None, bench.layers[0], batch, save_kv_cache=False)
            times[label].append(time.perf_counter() - started)
    return with_ratio({f"{label}_ms": 1e3 * statistics.median(found[1:]) for label, found in times.items()})


def with_ratio(times: Mapping[str, float]) -> dict[str, float]:
    return {**times, "ratio": times["invariant_ms"] / times["default_ms"]}


def measure(report: Report, *, smoke: bool) -> None:
    shapes = (Shape("mha", 4, 2, 16), Shape("mla", 4, mla=_TINY_DIMS)) if smoke else SHAPES
    layers = []
    for shape in shapes:
        for requests, rows in ((2, 70),) if smoke else DECODES:
            times = layer_times(shape, [rows - 1] * requests, 1)
            layers.append({"shape": str(shape), "requests": requests, "rows": rows} | times)
            print(layers[-1], flush=True)
        for before, new in ((40, 20),) if smoke else EXTENDS:
            layers.append({"shape": str(shape), "before": before, "new": new} | layer_times(shape, [before], new))
            print(layers[-1], flush=True)
    report.put("torch_native", layers)
    scale = Scale("cpu", 0, ((2, 8),), (8,), 2, page_size=8) if smoke else FULL
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for name, config in MODELS.items():
            checkpoint = write(Path(folder) / name, smaller(config) if smoke else config)
            points = costs(checkpoint, scale, DeviceLock(None))["points"]
            found[name] = [
                with_ratio({key: value for key, value in point.items() if key != "speed"}) for point in points
            ]
            print(name, found[name], flush=True)
        report.put("engine", found)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", metavar="FILE", type=Path)
    parser.add_argument("--smoke", action="store_true", help="tiny cases")
    given = parser.parse_args(arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            machine = {"machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
            measure(Report(given.out, {"what": WHAT, **machine, "rounds": ROUNDS}), smoke=given.smoke)
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
