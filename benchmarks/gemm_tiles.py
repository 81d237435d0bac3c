"""Tile configurations of the GEMMs of an MLA step with few rows, tried one shape at a time in a captured chain.

python benchmarks/gemm_tiles.py --rows 1 --out benchmarks/results/product_cuts_h200.json
python benchmarks/gemm_tiles.py --rows 4 --out benchmarks/results/product_tiles_h200.json

A single GEMM says little, because kernels overlap. So 16 layers of GEMMs are timed, each with its own weights, without
attention. A configuration that is faster by a microsecond is kept while the next shape is tried, in two passes. With
more than two rows tensor-core configurations and the library are tried too. The winners are in
``attnplug_engine.kernels.gemm_tiles``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from decode_points import DeviceLock
from gpu_report import describe
from torch.nn import functional as F

from attnplug_engine.kernels import gemm_tiles
from attnplug_engine.kernels.elementwise import rms_norm, silu_and_mul
from attnplug_engine.kernels.gemm_tiles import GemmConfig, choose_few
from attnplug_engine.kernels.skinny_gemm import skinny_gemm

LAYERS, HIDDEN, RANK = 16, 2048, 1536
SHAPES = {  # rows and columns of the matrix, and its blocks per program
    "qkv_a": (2112, 2048, 1),
    "q_b": (3072, 1536, 1),
    "o": (2048, 2048, 1),
    "gate_up": (16384, 2048, 2),
    "down": (2048, 8192, 1),
    "head": (32000, 2048, 1),
}
WHOLE = [(1, 1), (1, 2), (2, 2), (2, 4), (4, 2), (4, 4), (4, 8), (8, 4), (8, 8), (16, 8)]  # rows and warps
TRIED = {name: [GemmConfig(rows, 2048, warps) for rows, warps in WHOLE] for name in SHAPES}
TRIED["gate_up"] = [config for config in TRIED["gate_up"] if config.block_n <= 8]
TRIED["down"] = [GemmConfig(1, 8192, 4), GemmConfig(1, 8192, 8), GemmConfig(2, 8192, 8), GemmConfig(4, 8192, 8)]
TRIED["down"] += [
    GemmConfig(2, 4096, 4),
    GemmConfig(4, 4096, 4),
    GemmConfig(4, 4096, 8),
    GemmConfig(8, 4096, 8),
    GemmConfig(4, 2048, 4),
]
LIBRARY = None
TILES = [(16, 2048, 8), (16, 1024, 8), (16, 1024, 4), (16, 512, 4), (16, 512, 8), (32, 512, 8), (32, 256, 4)]
STREAMED = [(64, 64, 4, 6), (64, 64, 4, 10), (64, 128, 4, 4), (64, 128, 4, 6), (64, 128, 4, 8), (64, 256, 4, 4)]
STREAMED += [(128, 64, 8, 6), (128, 128, 8, 3), (128, 128, 8, 4)]  # rows of the matrix, columns, warps, stages
_SHARED = 220 << 10


def candidates(rows: int) -> dict[str, list[GemmConfig | None]]:
    if rows <= gemm_tiles.FEW:
        return {name: list(configs) for name, configs in TRIED.items()}
    found: dict[str, list[GemmConfig | None]] = {}
    for name, (_, _, tiles) in SHAPES.items():
        found[name] = [LIBRARY]
        if rows <= gemm_tiles.MORE:
            found[name] += [GemmConfig(*config, tiles=True) for config in TILES]
        for lines, columns, warps, stages in STREAMED:
            if (lines + max(rows, 16)) * columns * stages * 2 <= _SHARED:
                found[name].append(GemmConfig(lines // tiles, columns, warps, tiles=True, stages=stages))
    return found


@cache
def gains(width: int) -> torch.Tensor:
    return torch.ones(width, dtype=torch.bfloat16, device="cuda")


def run(
    name: str, x: torch.Tensor, weight: torch.Tensor, config: GemmConfig | None, onto: torch.Tensor | None = None
) -> torch.Tensor:
    norm = None if name in ("o", "down", "head") else (gains(x.shape[1]), 1e-6)
    if config is LIBRARY:
        x = x if norm is None else rms_norm(x, *norm)
        out = F.linear(x, weight) if onto is None else torch.addmm(onto, x, weight.t())
        return silu_and_mul(out) if name == "gate_up" else out
    return skinny_gemm(x, weight, config, norm=norm, gated=name == "gate_up", onto=onto)


def compile_one(job: tuple[str, GemmConfig | None, int]) -> None:
    """Compile one configuration into Triton's cache; runs in a process pool, since compiling takes most of the time."""
    name, config, rows = job
    outputs, inputs, _ = SHAPES[name]
    shape: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    onto = torch.zeros(rows, outputs, **shape) if name in ("o", "down") else None
    run(
        name,
        torch.zeros(rows, max(inputs, 3072), **shape)[:, :inputs],
        torch.zeros(outputs, inputs, **shape),
        config,
        onto,
    )


class Chain:
    def __init__(self, rows: int) -> None:
        torch.manual_seed(0)
        layers = [name for name in SHAPES if name != "head"]
        self.weights = [{name: self._weight(name) for name in layers} for _ in range(LAYERS)]
        self.head = self._weight("head")
        self.x = torch.randn(rows, HIDDEN, device="cuda").bfloat16()

    @staticmethod
    def _weight(name: str) -> torch.Tensor:
        rows, columns, _ = SHAPES[name]
        return (torch.randn(rows, columns, device="cuda") * columns**-0.5).bfloat16()

    def limit_us(self) -> float:
        numbers = sum(weight.numel() for layer in self.weights for weight in layer.values()) + self.head.numel()
        return numbers * 2 / 4.2e6

    def run(self, configs: dict[str, GemmConfig | None]) -> torch.Tensor:
        hidden = self.x
        for weights in self.weights:
            low = run("qkv_a", hidden, weights["qkv_a"], configs["qkv_a"])
            queries = run("q_b", low[:, :RANK], weights["q_b"], configs["q_b"])
            hidden = run("o", queries[:, :HIDDEN], weights["o"], configs["o"], hidden)
            gated = run("gate_up", hidden, weights["gate_up"], configs["gate_up"])
            hidden = run("down", gated, weights["down"], configs["down"], hidden)
        return run("head", hidden, self.head, configs["head"])

    def timed_us(self, configs: dict[str, GemmConfig | None], replays: int = 40) -> float:
        self.run(configs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(configs)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 6)]
        for event in events:
            event.record()
            graph.replay()
        torch.cuda.synchronize()
        times = [first.elapsed_time(second) for first, second in pairwise(events[5:])]
        return statistics.median(times) * 1e3


def shown(config: GemmConfig | None) -> str | list[int]:
    if config is LIBRARY:
        return "library"
    return [config.block_n, config.block_k, config.warps, config.stages]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--turns", metavar="FILE", help="lock file: processes with the same file measure one at a time")
    parser.add_argument("--compilers", type=int, default=12)
    arguments = parser.parse_args()
    rows, tried_configs = arguments.rows, candidates(arguments.rows)
    with multiprocessing.get_context("spawn").Pool(arguments.compilers) as pool:
        jobs = [(name, config, rows) for name, configs in tried_configs.items() for config in configs]
        pool.map(compile_one, jobs, chunksize=2)
    lock = DeviceLock(arguments.turns)  # held until the process ends
    lock.acquire()
    chain = Chain(rows)
    gemm_tiles.FEW_ROW_CONFIGS = {}  # use the rule, not earlier measurements
    ruled: dict[str, GemmConfig | None] = dict.fromkeys(SHAPES)
    if rows <= gemm_tiles.FEW:
        ruled = {name: choose_few(outputs // tiles, inputs, tiles) for name, (outputs, inputs, tiles) in SHAPES.items()}
    configs, tried = dict(ruled), []
    for _ in range(2):
        for name, own in tried_configs.items():
            best = chain.timed_us(configs)
            for config in own:
                time = chain.timed_us({**configs, name: config})
                tried.append([name, shown(config), round(time, 1)])
                if time < best - 1:
                    best, configs[name] = time, config
    result = {
        **describe(f"cuts of products of {rows} rows", ("torch", "triton", "attnplug-engine"), None),
        "limit_us": chain.limit_us(),
        "before_us": chain.timed_us(ruled, 80),
        "after_us": chain.timed_us(configs, 80),
        "cuts": {name: shown(config) for name, config in configs.items()},
        "tried": tried,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print({key: value for key, value in result.items() if key != "tried"})


if __name__ == "__main__":
    main()
