"""Decode steps of transformers' ``generate`` with a static cache, which it compiles: its own attention against ours.

python benchmarks/transformers_h200.py --out OUT.json [--implementations sdpa,attnplug:auto] [--smoke]

Each implementation runs the same random model, in bfloat16 and in turns. A step is the time between two tokens, on the
host: ``generate`` compiles with ``mode="reduce-overhead"``, so a step is a replayed CUDA graph and transformers' loop
around it. ``agree`` is the share of tokens that equal those of ``sdpa``; near ties of a random model differ.
``breaks`` counts graph breaks. flash_attention_2 and flash_attention_3 run if their packages are installed.
``--smoke`` runs a tiny model on a CPU without compiling it, in float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from decode_points import DeviceLock, Point
from decode_transformers import decode
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, LlamaConfig, __version__

import attnplug_transformers  # noqa: F401 (registers the names)

LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
}
TINY = LLAMA_8B | {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
POINTS = ((1, 2048), (16, 2048))
ROUNDS = 3
_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
OURS = ("attnplug:triton_mha", "attnplug:auto")


def installed() -> list[str]:
    """Implementations that can run here, transformers' first."""
    return ["sdpa", *(name for name, module in _PACKAGES.items() if find_spec(module)), *OURS]


def measure(
    names: Sequence[str], points: Sequence[tuple[int, int]], lock: DeviceLock, *, smoke: bool
) -> list[dict[str, Any]]:
    """Measure the implementations at each point, in turns."""
    device, dtype = ("cpu", torch.float32) if smoke else ("cuda", torch.bfloat16)
    torch.manual_seed(0)
    config = LlamaConfig(**(TINY if smoke else LLAMA_8B))
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    torch._dynamo.config.recompile_limit = 64  # each implementation and batch is one more version of the model's code
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for batch, context in points:
        point = Point("llama", batch, context)
        for turn in range(1 + ROUNDS):
            if turn == 1:
                lock.acquire()
            for name in names:
                model.set_attn_implementation(name)
                if turn == 0:
                    counters.clear()
                found = decode(model, config.vocab_size, point, device)
                row = rows.setdefault((name, batch), {"implementation": name, "batch": batch, "context": context})
                if turn == 0:  # compiles
                    row["breaks"] = sum(counters["graph_break"].values())
                    row["tokens"] = found["tokens"]
                else:
                    row.setdefault("step_us", []).append(found["step_us"])
    for (_, batch), row in rows.items():
        reference = rows[names[0], batch]
        row["speed_up"] = statistics.median(reference["step_us"]) / statistics.median(row["step_us"])
        row["agree"] = (row["tokens"] == reference["tokens"]).float().mean().item()
    return [{key: value for key, value in row.items() if key != "tokens"} for row in rows.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--implementations", type=lambda text: text.split(","), help="the first is the reference")
    parser.add_argument("--requests", type=int, action="append", help="measure only these batches")
    parser.add_argument("--lock", metavar="FILE", help="lock file: processes compile together, measure one at a time")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    names = options.implementations or (["sdpa", "attnplug:torch_native"] if options.smoke else installed())
    points = ((1, 24), (3, 40)) if options.smoke else POINTS
    points = tuple(point for point in points if not options.requests or point[0] in options.requests)
    rows = measure(names, points, DeviceLock(options.lock), smoke=options.smoke)
    facts = {"transformers": __version__, "torch": torch.__version__}
    if not options.smoke:
        facts["device"] = torch.cuda.get_device_name()
    options.out.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")
    for row in rows:
        step, speed_up = statistics.median(row["step_us"]), row["speed_up"]
        print(f"{row['implementation']:24} {row['batch']:3} × {row['context']:5} {step:9.1f} µs {speed_up:5.2f} ×")


if __name__ == "__main__":
    main()
