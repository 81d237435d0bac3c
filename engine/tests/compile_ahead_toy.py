"""Record launches of small kernels, compile them in forked processes, and count the kernels left to compile.

Prints JSON: the forks' reports, and for every launch of a later process whether the cache had its kernel.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver

from attnplug_engine.execution.compile_ahead import GPU
from attnplug_engine.recording.fake_gpu import fake_gpu
from attnplug_engine.recording.triton_kernels import CompilePool, _Driver, json_lines, record_launches

TARGET = ("cuda", 90, 32)
H200 = GPU({"name": "NVIDIA H200", "major": 9, "minor": 0, "multi_processor_count": 132}, 140 << 30, TARGET)


@triton.jit
def copy(source, target, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + place, tl.load(source + place, mask=place < count), mask=place < count)


@triton.autotune([triton.Config({"BLOCK": block}) for block in (32, 64)], key=["count"])
@triton.jit
def tuned(target, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + place, place.to(tl.float32), mask=place < count)


def launch() -> None:
    """Launch six variants: two blocks, an unaligned pointer, another dtype, and two configurations."""
    rows = torch.zeros(4, 64, device="cuda")
    for block in (16, 32):
        copy[(4,)](rows, torch.empty_like(rows), rows.numel(), BLOCK=block)
    copy[(4,)](rows[1, 1:], torch.empty_like(rows), 63, BLOCK=16)
    copy[(4,)](rows.to(torch.bfloat16), rows, rows.numel(), BLOCK=16)
    tuned[(4,)](rows, rows.numel())
    copy[(4,)](rows[1], torch.empty_like(rows), rows.numel(), BLOCK=16)  # the first variant again


def meet(mine: str, other: str, folder: Path) -> None:
    """Wait until the other process has come here, too."""
    (folder / mine).touch()
    limit = time.monotonic() + 60
    while not (folder / other).exists():
        assert time.monotonic() < limit, "the two processes do not run at the same time"
        time.sleep(0.01)


def record(folder: Path) -> None:
    report = json_lines(os.open(folder / "reports", os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    pool = CompilePool(2, report)
    pool.submit("one", lambda: meet("one", "two", folder))
    pool.submit("two", lambda: meet("two", "one", folder))
    pool.submit("broken", lambda: 1 / 0)
    record_launches(TARGET, pool.submit)
    with fake_gpu(H200):
        launch()
    pool.join()


def main(folder: Path) -> None:
    knobs.cache.dir = str(folder / "cache")
    if not (child := os.fork()):
        record(folder)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    hits: list[tuple[str, bool]] = []
    knobs.compilation.listener = lambda **event: hits.append((event["metadata"]["name"], event["cache_hit"]))
    driver.set_active(_Driver(triton.backends.compiler.GPUTarget(*TARGET)))
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def compile_only(self, *args, **named):
        return run(self, *args, **{**named, "warmup": True})

    def run_all(self, *args, **named):
        for each in self.configs:
            self.fn.run(*args, **named, **each.all_kwargs())

    JITFunction.run, Autotuner.run = compile_only, run_all
    with fake_gpu(H200):
        launch()
    print(json.dumps({"reports": (folder / "reports").read_text().splitlines(), "hits": hits}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
