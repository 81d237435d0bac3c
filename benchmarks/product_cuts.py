"""Cuts of the few-row products of an MLA step at batch 1, tried one shape after the other in a captured chain.

python benchmarks/product_cuts.py --out benchmarks/results/product_cuts_h200.json

A product alone says little: kernels overlap, so what counts is the time of 16 layers of products, each with weights of
its own. Attention is left out. Every cut that is better by a microsecond stays while the next shape is tried, twice
over. What won is in ``attnplug_engine.kernels.products.CUTS``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from gpu_report import describe

from attnplug_engine.kernels import products
from attnplug_engine.kernels.products import Cut, choose, product

LAYERS, HIDDEN, RANK = 16, 2048, 1536
SHAPES = {  # rows and columns of the matrix, and how many blocks of it a program takes
    "qkv_a": (2112, 2048, 1),
    "q_b": (3072, 1536, 1),
    "o": (2048, 2048, 1),
    "gate_up": (16384, 2048, 2),
    "down": (2048, 8192, 1),
    "head": (32000, 2048, 1),
}
WHOLE = [(1, 1), (1, 2), (2, 2), (2, 4), (4, 2), (4, 4), (4, 8), (8, 4), (8, 8), (16, 8)]  # rows and warps
TRIED = {name: [Cut(rows, 2048, warps) for rows, warps in WHOLE] for name in SHAPES}
TRIED["gate_up"] = [cut for cut in TRIED["gate_up"] if cut.block_n <= 8]
TRIED["down"] = [Cut(1, 8192, 4), Cut(1, 8192, 8), Cut(2, 8192, 8), Cut(4, 8192, 8)]
TRIED["down"] += [Cut(2, 4096, 4), Cut(4, 4096, 4), Cut(4, 4096, 8), Cut(8, 4096, 8), Cut(4, 2048, 4)]


def run(name: str, x: torch.Tensor, weight: torch.Tensor, cut: Cut, onto: torch.Tensor | None = None) -> torch.Tensor:
    norm = None if name in ("o", "down") else (torch.ones(x.shape[1], dtype=x.dtype, device=x.device), 1e-6)
    return product(x, weight, norm=norm, gated=name == "gate_up", onto=onto, cut=cut)


def compile_one(job: tuple[str, Cut]) -> None:
    """Put one cut's kernel into Triton's cache; in a process of its own, since compiling takes most of the time."""
    name, cut = job
    outputs, inputs, _ = SHAPES[name]
    shape: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    onto = torch.zeros(1, outputs, **shape) if name in ("o", "down") else None
    run(name, torch.zeros(1, max(inputs, 3072), **shape)[:, :inputs], torch.zeros(outputs, inputs, **shape), cut, onto)


class Chain:
    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [name for name in SHAPES if name != "head"]
        self.weights = [{name: self._weight(name) for name in layers} for _ in range(LAYERS)]
        self.head = self._weight("head")
        self.x = torch.randn(1, HIDDEN, device="cuda").bfloat16()

    @staticmethod
    def _weight(name: str) -> torch.Tensor:
        rows, columns, _ = SHAPES[name]
        return (torch.randn(rows, columns, device="cuda") * columns**-0.5).bfloat16()

    def limit_us(self) -> float:
        numbers = sum(weight.numel() for layer in self.weights for weight in layer.values()) + self.head.numel()
        return numbers * 2 / 4.2e6

    def run(self, cuts: dict[str, Cut]) -> torch.Tensor:
        hidden = self.x
        for weights in self.weights:
            low = run("qkv_a", hidden, weights["qkv_a"], cuts["qkv_a"])
            queries = run("q_b", low[:, :RANK], weights["q_b"], cuts["q_b"])
            hidden = run("o", queries[:, :HIDDEN], weights["o"], cuts["o"], hidden)
            gated = run("gate_up", hidden, weights["gate_up"], cuts["gate_up"])
            hidden = run("down", gated, weights["down"], cuts["down"], hidden)
        return run("head", hidden, self.head, cuts["head"])

    def timed_us(self, cuts: dict[str, Cut], replays: int = 40) -> float:
        self.run(cuts)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(cuts)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 6)]
        for event in events:
            event.record()
            graph.replay()
        torch.cuda.synchronize()
        times = [first.elapsed_time(second) for first, second in pairwise(events[5:])]
        return statistics.median(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(12) as pool:
        pool.map(compile_one, [(name, cut) for name, cuts in TRIED.items() for cut in cuts], chunksize=2)
    chain = Chain()
    products.CUTS = {}  # what the rule says, not what was measured before
    ruled = {name: choose(rows // tiles, columns, tiles) for name, (rows, columns, tiles) in SHAPES.items()}
    cuts, tried = dict(ruled), []
    for _ in range(2):
        for name, candidates in TRIED.items():
            best = chain.timed_us(cuts)
            for cut in candidates:
                time = chain.timed_us({**cuts, name: cut})
                tried.append([name, cut.block_n, cut.block_k, cut.warps, round(time, 1)])
                if time < best - 1:
                    best, cuts[name] = time, cut
    result = {
        **describe("cuts of products of one row", ("torch", "triton", "attnplug-engine"), None),
        "limit_us": chain.limit_us(),
        "before_us": chain.timed_us(ruled, 80),
        "after_us": chain.timed_us(cuts, 80),
        "cuts": {name: [cut.block_n, cut.block_k, cut.warps] for name, cut in cuts.items()},
        "tried": tried,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print({key: value for key, value in result.items() if key != "tried"})


if __name__ == "__main__":
    main()
