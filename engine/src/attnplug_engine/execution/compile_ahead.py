"""Parallel compilation of an engine's Triton kernels at its first start (E1).

A warm-up compiles kernels one after the other, as they are launched. Therefore a subprocess without a GPU
(``attnplug_engine.recording``) first starts the same engine on fake tensors, and compiles all kernels that it would
launch into Triton's disk cache, one process per core. The warm-up then loads them from the cache. Kernels that the
subprocess does not find are compiled at their first launch.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryFile
from threading import TIMEOUT_MAX, Timer
from typing import Any

import torch

from attnplug.auto.table_store import TableError, cache_folders
from attnplug_engine.checkpoints.random import TINY
from attnplug_engine.execution.compilations import Compilation
from attnplug_engine.kernels import usable
from attnplug_engine.models.host_memory import available_memory
from attnplug_engine.options import EngineOptions
from attnplug_engine.parallel.collectives import TensorParallel

_BYTES_PER_COMPILER = 1 << 30  # of host memory
_TIMEOUT_SECONDS = 600.0
"""Time limit of the recording process, so that a start-up does not hang with it."""
_MODULE = "attnplug_engine.recording"
_VERSIONED = ("attnplug", "torch", "triton", "flash-linear-attention", "flashinfer")
"""Prefixes of distributions whose versions kernels depend on."""


@dataclass(frozen=True, slots=True)
class GPU:
    """Description of a GPU: torch's properties, bytes of memory, and Triton's target (backend, architecture, warp
    size)."""

    properties: dict[str, Any]
    memory: int
    target: tuple[str, Any, int]

    @classmethod
    def of(cls, device: torch.device) -> GPU:
        """Describe a GPU of this machine."""
        from triton.runtime import driver

        found, target = torch.cuda.get_device_properties(device), driver.active.get_current_target()
        named = {name: getattr(found, name) for name in dir(found) if not name.startswith("_")}
        properties = {name: value for name, value in named.items() if isinstance(value, int | float | str)}
        return cls(properties, found.total_memory, (target.backend, target.arch, target.warp_size))


@dataclass(frozen=True, slots=True)
class AheadRequest:
    """Engine or embedder whose start-up is recorded."""

    model: str
    options: Any
    """``EngineOptions`` or ``EmbedOptions``."""
    gpu: GPU
    ranks: int
    workers: int
    """Number of processes that compile."""
    num_pages: int | None = None
    """Pages of an engine's KV cache."""


@dataclass(frozen=True, slots=True)
class AheadReport:
    """Kernels that were compiled ahead. ``problem``: why recording stopped early; None if it did not."""

    compiled: tuple[Compilation, ...] = ()
    problem: str | None = None
    skipped: tuple[str, ...] = ()
    """Reasons why kernels were not recorded: those of other libraries, and what a call launches behind them."""
    cached: int = 0
    """Number of kernels that the cache already had."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Names of the kernels that could not be compiled, and their errors."""
    backends: Mapping[str, str] = field(default_factory=dict)
    """Recorded backends by role."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Backends that could not be imported or built by the recording process, and why."""

    @property
    def not_recorded(self) -> str | None:
        """Why kernels may be missing; None if none is."""
        reasons = [*self.skipped] if self.problem is None else [*self.skipped, self.problem]
        return "; ".join(reasons) or None


def compile_ahead(
    model: str,
    options: Any,
    device: torch.device,
    parallel: TensorParallel,
    progress: Callable[[int, int], None] | None = None,
    num_pages: int | None = None,
) -> AheadReport:
    """Compile the Triton kernels of an engine's start-up into the disk cache, unless an earlier start did so.

    ``progress(done, found)`` is called while kernels are found and compiled. Rank 0 compiles for all ranks, which wait.
    A kernel that fails to compile is not an error here: it is compiled again, and reported, where it is launched.
    """
    report = AheadReport()
    if not usable(device) or options.compile_processes == 0:
        return report
    if parallel.rank == 0:
        workers = options.compile_processes or compile_workers()
        report = fill_cache(AheadRequest(model, options, GPU.of(device), parallel.size, workers, num_pages), progress)
    if parallel.size > 1:
        parallel.all_gather(torch.zeros(1, device=device), 0)
    return report


def compile_workers() -> int:
    """Return how many kernels to compile at a time: as cores and memory allow."""
    return max(min(len(os.sched_getaffinity(0)), available_memory() // _BYTES_PER_COMPILER), 1)


def fill_cache(request: AheadRequest, progress: Callable[[int, int], None] | None = None) -> AheadReport:
    """Record a start-up, unless a marker file says that this was done for an equal request."""
    try:
        if _marker(request).exists():
            return AheadReport()
    except TableError as error:
        return AheadReport(problem=error.message)
    report = record(request, progress, _TIMEOUT_SECONDS)
    if report.problem is None:
        mark_recorded(request, report)
    return report


def mark_recorded(request: AheadRequest, report: AheadReport) -> None:
    """Write the marker file, by which equal start-ups skip the recording."""
    marker = _marker(request)
    with suppress(OSError):  # without a marker, the next start records again
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.write_text(json.dumps({each.name: each.seconds for each in report.compiled}))


def record(
    request: AheadRequest, progress: Callable[[int, int], None] | None = None, seconds: float = TIMEOUT_MAX
) -> AheadReport:
    """Run the recording process, for at most ``seconds``."""
    modules = os.pathsep.join(path or os.curdir for path in sys.path)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": modules}
    environment.pop("TRITON_INTERPRET", None)
    environment["FLASHINFER_DISABLE_JIT"] = "1"  # its modules do not run on fake tensors
    # Its errors go to a file: a pipe without a reader would block it.
    with (
        TemporaryFile() as errors,
        subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE],  # -P: files of the working directory are not imported
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            start_new_session=True,  # so that it can be killed together with its compilers
        ) as process,
    ):
        limit = Timer(seconds, _kill, [process])
        limit.start()
        try:
            report = _follow(process, request, progress)
        except BaseException:
            _kill(process)
            raise
        finally:
            limit.cancel()
        if report is None:
            errors.seek(0)
            printed = errors.read().decode(errors="replace").rstrip().splitlines()
            report = AheadReport(problem=f"its process ended early{': ' + printed[-1][:400] if printed else ''}")
    return report


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the process and its compilers."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _follow(
    process: subprocess.Popen[bytes], request: AheadRequest, progress: Callable[[int, int], None] | None
) -> AheadReport | None:
    """Send the request, and read one JSON line per event. Returns None if the process ends before it has finished."""
    assert process.stdin is not None and process.stdout is not None
    with suppress(BrokenPipeError):  # it failed to start; its standard error says why
        process.stdin.write(pickle.dumps(request))
        process.stdin.close()
    compiled: list[Compilation] = []
    skipped: dict[str, None] = {}
    failed: dict[str, str] = {}
    backends: dict[str, str] = {}
    left_out: dict[str, str] = {}
    done = found = cached = 0
    finished, problem = False, None
    for line in process.stdout:
        if not line.startswith(b"{"):
            continue  # printed by a library while it was imported
        event = json.loads(line)
        if "name" in event:
            done += 1
            if "error" in event:
                failed[event["name"]] = event["error"]
            elif event["cached"]:
                cached += 1
            else:
                compiled.append(Compilation(event["name"], event["seconds"], cached=False))
        elif "skipped" in event:
            skipped[event["skipped"]] = None
        elif "role" in event:
            backends[event["role"]] = event["backend"]
        elif "left_out" in event:
            left_out[event["left_out"]] = event["why"]
        found, problem = event.get("found", found), event.get("stopped", problem)
        finished |= "finished" in event
        if progress is not None and found:
            progress(done, found)
    if not finished:
        return None
    return AheadReport(tuple(compiled), problem, tuple(skipped), cached, failed, backends, left_out)


def _marker(request: AheadRequest) -> Path:
    return cache_folders()["triton"] / f"attnplug-{_digest(request)}.json"


def _digest(request: AheadRequest) -> str:
    """Return a hash of what cached kernels depend on: the model's config, options, GPU, CPU architecture, versions."""
    path = Path(request.model)
    config = path / "config.json" if path.is_dir() else path
    content = request.model if request.model.startswith(TINY) or not config.is_file() else config.read_text()
    options = replace(request.options, device=None, compile_processes=None)
    if isinstance(options, EngineOptions):  # weights of a recording are always random
        options = replace(options, random_weights=False, ignore_eos=False)
    gpu = (request.gpu.properties["name"], *request.gpu.target)
    # Not the local version: "+cpu" and "+cu129" are builds of one torch.
    found = ((each.name, each.version.partition("+")[0]) for each in distributions() if _is_versioned(each.name))
    versions = sorted({f"{name} {version}" for name, version in found})
    known = repr((content, options, gpu, platform.machine(), request.ranks, versions))
    return hashlib.sha256(known.encode()).hexdigest()[:24]


def _is_versioned(name: str | None) -> bool:
    return name is not None and name.lower().replace("_", "-").startswith(_VERSIONED)
