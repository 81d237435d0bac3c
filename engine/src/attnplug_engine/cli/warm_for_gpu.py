"""Execution of ``attnplug warm --gpu``: compile Triton's kernels for a GPU that this machine does not have."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from attnplug.auto.table_store import cache_folders
from attnplug.cli import output
from attnplug_engine.cli.gpu_file import read_gpu
from attnplug_engine.cli.output import progress_bar
from attnplug_engine.execution.compilations import describe
from attnplug_engine.execution.compile_ahead import (
    AheadReport,
    AheadRequest,
    compile_workers,
    mark_recorded,
    record,
)
from attnplug_engine.models.architectures import load_spec
from attnplug_engine.options import EngineOptions


def warm_for_gpu(parsed: argparse.Namespace, options: EngineOptions) -> int:
    """Record a start-up on the described GPU and compile its kernels; print what was compiled and what was not.

    Returns 1 if the recording stopped early. Unlike a start-up, it records even if an earlier one did.
    """
    load_spec(parsed.model)  # a mistake in the model is reported before a process is started
    gpu, folder = read_gpu(parsed.gpu), cache_folders()["triton"]
    workers = options.compile_processes or compile_workers()
    request = AheadRequest(parsed.model, options, gpu, parsed.tensor_parallel, workers, options.num_pages)
    console = Console(stderr=True, highlight=False, markup=False)
    with progress_bar(console, "compiling kernels", shown=not parsed.json) as (bar, task):
        report = record(request, lambda done, found: bar.update(task, completed=done, total=found))
    if report.problem is None and not report.left_out:  # the GPU's machine might choose a backend that was left out
        mark_recorded(request, report)
    if parsed.json:
        output.write_json(_as_json(report, gpu.properties["name"], str(folder)))
    else:
        _print(report, gpu.properties["name"])
        print(f"triton cache: {folder}")
    if report.problem is None:
        return 0
    print(f"error: the recording stopped early: {report.problem}", file=sys.stderr)
    return 1


def _as_json(report: AheadReport, gpu: str, folder: str) -> dict[str, object]:
    return {
        "device": "cuda",
        "gpu": gpu,
        "backends": dict(report.backends),
        "left_out": dict(report.left_out),
        "compiled": [{"name": each.name, "seconds": each.seconds} for each in report.compiled],
        "loaded": report.cached,
        "failed": dict(report.failed),
        "skipped": list(report.skipped),
        "stopped": report.problem,
        "caches": {"triton": folder},
    }


def _print(report: AheadReport, gpu: str) -> None:
    for each in sorted(report.compiled, key=lambda each: -each.seconds):
        print(f"{each.seconds:6.1f} s  {each.name}")
    print(f"for {gpu}: {describe(report.compiled) or 'compiled nothing'}; found {report.cached} in the cache")
    for role, name in report.backends.items():
        print(f"{role}: {name}")
    for name, why in report.left_out.items():
        print(f"without {name}, which the GPU's machine may choose: {why}")
    for name, error in report.failed.items():
        print(f"not compiled: {name}: {error.strip().splitlines()[0]}")
    for text in report.skipped:
        print(f"not compiled: {text}")
