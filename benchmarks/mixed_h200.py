"""Mixed MLA steps on a GPU: decodes apart from a chunk that runs as MHA, against the whole batch absorbed.

python benchmarks/mixed_h200.py --out benchmarks/results/mixed_h200.json
python benchmarks/mixed_h200.py --smoke                the same code on a CPU with a tiny model

The MLA model of decode_models.py, in bfloat16, with the backends that ``auto`` selects. A step is an eager forward of
the runner with planning, timed until the device has finished, alternating both ways.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from decode_models import MODELS

from attnplug import ForwardBatch, ForwardMode, Geometry
from attnplug_engine import Engine
from attnplug_engine.execution.runner import ModelRunner

DECODES, BEHIND = (32, 128), 4096
CHUNKS = ((256, 0), (512, 0), (1024, 0), (2048, 0), (8192, 0), (512, 8192), (2048, 8192))
"""(new tokens, rows before them) of the request that is prefilled."""
ROUNDS = 10


class Driver:
    """A runner over random cache rows, with hand-made mixed batches."""

    def __init__(self, model: str, device: str, requests: int, context: int) -> None:
        pages = (requests * (context // 2 + 64) + 2 * context) // 64 + 1
        engine = Engine(
            model,
            device=device,
            random_weights=True,
            disable_cuda_graph=True,
            page_size=64,
            max_batch=requests,
            num_pages=pages,
            context_length=context,
            chunked_prefill_size=context,
        )
        self.runner: ModelRunner = engine.runner
        self.rows = [self.runner.table.admit() for _ in range(requests)]
        assert self.runner.pools.mla is not None
        for layer in self.runner.pools.mla.layer_ids:
            self.runner.pools.mla.rows(layer).normal_()

    def batch(self, decodes: int, behind: int, new: int, prefix: int) -> ForwardBatch:
        """Batch of ``decodes`` requests behind ``behind`` rows each, and ``new`` tokens behind ``prefix``."""
        table, rows = self.runner.table, self.rows[: decodes + 1]
        for row in self.rows:
            table.truncate(row, 0)
        counts, starts = [1] * decodes + [new], [behind] * decodes + [prefix]
        lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        for row, length in zip(rows, lengths, strict=True):
            table.extend(row, length)
        page_table, seq_lens = table.batch(rows)
        geometry = Geometry.of_lengths(
            ForwardMode.MIXED, page_table, counts, lengths, table.page_size, seq_lens=seq_lens
        )
        device = self.runner.device
        positions = torch.cat([torch.arange(*span) for span in zip(starts, lengths, strict=True)]).to(device)
        ids = torch.randint(0, self.runner.model.vocab_size, (sum(counts),), device=device)
        return ForwardBatch(geometry, ids, positions)

    def step(self, batch: ForwardBatch) -> tuple[float, list[str]]:
        """Return the seconds of a forward and the backends that planned it."""
        batch = replace(batch, plan=None, plan_record=None)
        self._wait()
        started = time.perf_counter()
        self.runner.forward(batch)
        self._wait()
        assert batch.plan is not None
        return time.perf_counter() - started, batch.plan.attention.planner_names()

    def _wait(self) -> None:
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize(self.runner.device)


def measure(driver: Driver, decodes: int, behind: int, new: int, prefix: int) -> dict[str, Any]:
    """Measure one batch both ways, alternating; the first two rounds are warm-ups."""
    batch, attention = driver.batch(decodes, behind, new, prefix), driver.runner.attention
    mla = attention.mla
    assert mla is not None
    policy = mla.policy
    ways = {"whole": replace(policy, split_threshold=1 << 62), "apart": replace(policy, split_threshold=0)}
    times: dict[str, list[float]] = {way: [] for way in ways}
    found: dict[str, Any] = {"decodes": decodes, "behind": behind, "new": new, "prefix": prefix}
    counts = batch.geometry.query_lens, batch.geometry.kv_lens
    found["by_default"] = "apart" if attention.decodes_apart(*counts) else "whole"
    try:
        for _ in range(ROUNDS + 2):
            for way, mla.policy in ways.items():
                seconds, found[f"{way}_backends"] = driver.step(batch)
                times[way].append(seconds)
    finally:
        mla.policy = policy
    found |= {f"{way}_ms": 1e3 * statistics.median(seconds[2:]) for way, seconds in times.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        if arguments.smoke:
            driver, cases = Driver("tiny:deepseek_v3", "cpu", 4, 256), [(3, 40, 64, 0), (2, 40, 30, 60)]
        else:
            Path(folder, "config.json").write_text(json.dumps(MODELS["mla"]))
            driver = Driver(folder, "cuda", max(DECODES) + 1, 16384)
            cases = [(decodes, BEHIND, *chunk) for decodes in DECODES for chunk in CHUNKS]
        for case in cases:
            rows.append(measure(driver, *case))
            print(json.dumps(rows[-1]), flush=True)
            if arguments.out is not None:
                arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
