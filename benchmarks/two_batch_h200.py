"""Two-batch overlap on a GPU: steps as two halves on two streams, against whole steps.

python benchmarks/two_batch_h200.py --out benchmarks/results/two_batch_h200.json

The Llama model of decode_models.py, in bfloat16. A step is a forward of the runner with planning, timed until
the device has finished, alternating both ways; and the same forward captured in a CUDA graph, which gives device time
only. Batches that the engine would not split are halved here too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from decode_models import MODELS
from gpu_report import Report, attempt, describe

from attnplug import ForwardBatch, ForwardMode, Geometry
from attnplug_engine import Engine
from attnplug_engine.execution.runner import ModelRunner
from attnplug_engine.options import EngineOptions

ROWS, CONTEXT, REQUESTS = 16_384, 1024, 256
PREFILLS = ([16_384], [4096] * 4, [8192], [2048] * 4, [512] * 7 + [4608], [2048], [512])
DECODES = (64, 256)
ROUNDS = 10


class Driver:
    """A runner with hand-made batches."""

    def __init__(self, folder: str, *, halves: bool) -> None:
        options = EngineOptions(
            device="cuda",
            disable_cuda_graph=True,
            random_weights=True,
            page_size=16,
            max_batch=REQUESTS,
            num_pages=(REQUESTS * (CONTEXT + 64) + ROWS) // 16 + 1024,
            context_length=ROWS + 64,
            chunked_prefill_size=ROWS,
            two_batch_overlap=halves,
        )
        self.runner: ModelRunner = Engine(folder, options).runner
        self.rows = [self.runner.table.admit() for _ in range(REQUESTS)]
        if self.runner._two_batch is not None:
            self.runner._two_batch.least_rows = 0
        assert self.runner.pools.mha is not None
        for layer in self.runner.pools.mha.layer_ids:  # decodes read rows that were never written
            for memory in (self.runner.pools.mha.keys(layer), self.runner.pools.mha.values(layer)):
                memory.normal_()

    def batch(self, mode: ForwardMode, new: Sequence[int], context: int = 0) -> ForwardBatch:
        """Batch with ``new`` new tokens per request after ``context``."""
        table, rows = self.runner.table, self.rows[: len(new)]
        for row in self.rows:
            table.truncate(row, 0)
        for row, count in zip(rows, new, strict=True):
            table.extend(row, context + count)
        page_table, seq_lens = table.batch(rows)
        lens = [table.length(row) for row in rows]
        geometry = Geometry.of_lengths(mode, page_table, list(new), lens, table.page_size, seq_lens=seq_lens)
        positions = torch.cat([torch.arange(context, context + count) for count in new]).cuda()
        ids = torch.randint(0, self.runner.model.vocab_size, (sum(new),), device="cuda")
        return ForwardBatch(geometry, ids, positions)

    def graph(self, batch: ForwardBatch) -> torch.cuda.CUDAGraph:
        """Capture a forward that is already planned."""
        runner, two = self.runner, self.runner._two_batch
        halves = None if two is None else two.halves(batch)
        if halves is None:
            runner.attention.plan(batch)
            batch.mark_forward_metadata_ready()
        run: Callable[[], Any] = (lambda: runner.run_model(batch)) if halves is None else (lambda: two.forward(halves))
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            run()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=aside):
            run()
        return graph


def timed(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def compare(drivers: Sequence[Driver], make: Callable[[Driver], ForwardBatch]) -> dict[str, float]:
    """Milliseconds of both, and the speed-up by halves."""
    with torch.inference_mode():
        eager: list[list[float]] = [[], []]
        for _ in range(ROUNDS):
            for driver, times in zip(drivers, eager, strict=True):
                batch = make(driver)
                times.append(timed(lambda batch=batch, driver=driver: driver.runner.forward(batch)))
        batches = [make(driver) for driver in drivers]
        graphs = [driver.graph(batch) for driver, batch in zip(drivers, batches, strict=True)]
        replayed: list[list[float]] = [[], []]
        for _ in range(ROUNDS):
            for graph, times in zip(graphs, replayed, strict=True):
                times.append(timed(graph.replay))
    whole, halves, device_whole, device_halves = (statistics.median(times[1:]) for times in eager + replayed)
    return {
        "whole_ms": whole,
        "halves_ms": halves,
        "speed": whole / halves,
        "device_whole_ms": device_whole,
        "device_halves_ms": device_halves,
        "device_speed": device_whole / device_halves,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = describe("steps as two halves", ("torch", "attnplug", "attnplug-engine"), None)
    report = Report(arguments.out, found)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(dict(MODELS["llama"])))
        drivers = [Driver(folder, halves=halves) for halves in (False, True)]
    report.put("backend", drivers[0].runner.backend.backend_id.name)
    extend, decode = ForwardMode.EXTEND, ForwardMode.DECODE
    cases: dict[str, Callable[[Driver], ForwardBatch]] = {
        f"prefill {' + '.join(map(str, new))}": lambda driver, new=new: driver.batch(extend, new) for new in PREFILLS
    }
    for requests in DECODES:
        cases[f"decode {requests} of {CONTEXT}"] = lambda driver, requests=requests: driver.batch(
            decode, [1] * requests, CONTEXT
        )
    for name, make in cases.items():
        row = attempt(lambda make=make: compare(drivers, make))
        report.put(name, row)
        print(name, {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})


if __name__ == "__main__":
    main()
