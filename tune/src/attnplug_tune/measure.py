"""Measurement of one backend, task by task, within a budget. Failures of the backend do not escape."""

from __future__ import annotations

import gc
import math
import os
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from attnplug.auto.ranking import default_ranking
from attnplug.auto.table_store import Measurement
from attnplug.contract.backend import AttentionBackend
from attnplug.contract.context import HostContext
from attnplug.declare.errors import BackendError, describe_error
from attnplug.declare.model import ModelSpec
from attnplug.declare.options import parse_options
from attnplug.declare.problem import Problem
from attnplug.machine.interrupt import Terminated
from attnplug.machine.runtime import runtime_of
from attnplug.registry.assembly import build_backend, build_selection
from attnplug.registry.registry import Registry
from attnplug.registry.select import select
from attnplug.registry.selection import AUTO, BackendRequest
from attnplug_tune.clock import Chain, Clock
from attnplug_tune.raw import RAW, raw_chain
from attnplug_tune.shapes import Task
from attnplug_tune.stage import Build, Setup, Stage, stage_bytes

_COMPILING_S = 2.0
"""Preparing a point takes a fraction of a second. If it takes longer than this, it compiled kernels."""
_SHARE_OF_MEMORY = 0.8
_SHORTEST_US = 0.01


@dataclass(frozen=True, slots=True)
class Job:
    """Tasks of one backend."""

    backend: str
    """Name, or ``auto`` for the choice at each point."""
    tasks: tuple[Task, ...]
    device: str
    max_context: int
    seconds: float = math.inf
    """Budget: no task starts after it is spent. Compiling does not count."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Options of the backend, unparsed."""
    raw: bool = False
    """Also measure the backend's library, called directly."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Result of a measured task.

    Measuring took ``seconds``. Compiling its kernels, if needed, took ``compile_s`` in addition. ``planned_by`` is the
    backend that ``auto`` chose.
    """

    side: str
    task: Task
    measured: Measurement
    seconds: float = 0.0
    compile_s: float = 0.0
    planned_by: str = ""


@dataclass(frozen=True, slots=True)
class Skipped:
    """Task that does not fit into memory."""

    side: str
    task: Task
    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """Task at which a side failed. The side is left out for this role and layer shape.

    ``last``: the process ended or can no longer use the GPU, so this is its last outcome.
    """

    side: str
    task: Task
    reason: str
    last: bool = False


Outcome = Timed | Skipped | Failed


def run_job(job: Job, registry: Registry, clock: Clock) -> Iterator[Outcome]:
    """Measure a backend's tasks one after the other. Exceptions of the backend become outcomes.

    After a failure, its other tasks of the same role and layer shape are skipped.
    """
    setup = Setup(torch.device(job.device), job.max_context)
    spent, broken, gaps = 0.0, set[tuple[object, ...]](), dict[int, float]()
    for task in job.tasks:
        if spent >= job.seconds:
            return
        for outcome in _outcomes(job, task, setup, registry, clock, broken, gaps):
            if isinstance(outcome, Failed):
                broken.add(_series(outcome.side, task))
            elif isinstance(outcome, Timed):
                spent += outcome.seconds
            yield outcome
        if (module := runtime_of(setup.device).module) is not None:
            if (error := _device_error(module)) is not None:
                yield Failed(job.backend, task, f"the GPU is lost: {error}", last=True)
                return
            gc.collect()


def _series(side: str, task: Task) -> tuple[object, ...]:
    return side, task.point.role, task.shape


def _outcomes(
    job: Job,
    task: Task,
    setup: Setup,
    registry: Registry,
    clock: Clock,
    broken: set[tuple[object, ...]],
    gaps: dict[int, float],
) -> list[Outcome]:
    """Measure the backend at one point, and its library on the same caches."""
    side, raw = job.backend, f"{RAW}{job.backend}"
    found: list[Outcome] = []
    if _series(side, task) in broken:
        return found
    needed, have = stage_bytes(task), memory_of(setup.device)
    if needed > have:
        return [Skipped(side, task, f"it takes {needed / 2**30:.1f} GiB, and may take {have / 2**30:.1f} GiB")]
    began = clock.now()
    try:
        with torch.inference_mode():
            stage = Stage(task, setup, _builder(job, registry, task))
            found.append(_time(stage, stage.chain(side), clock, began, gaps))
            if job.raw and _series(raw, task) not in broken:
                side, began = raw, clock.now()
                chain = raw_chain(job.backend, raw, stage)
                if chain is not None:
                    found.append(_time(stage, chain, clock, began, gaps))
    except (KeyboardInterrupt, Terminated):
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        found.append(Skipped(side, task, f"it runs out of memory: {describe_error(error).splitlines()[0]}"))
    except BaseException as error:  # kernels and their libraries raise anything
        found.append(Failed(side, task, describe_error(error)))
    return found


def _time(stage: Stage, chain: Chain, clock: Clock, began: float, gaps: dict[int, float]) -> Timed:
    clock.warm_up(chain)
    prepared = clock.now() - began
    _check_output(stage, chain.side)
    gap = _gap(stage, clock, gaps) if chain.captured else 0.0
    times = [max(1e6 * seconds / chain.calls - gap, _SHORTEST_US) for seconds in clock.times(chain)]
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    point = chain.task.point
    found = (round(time, 3) for time in (middle, low, high))
    measured = Measurement(point.requests, point.length, point.tokens, point.ragged, *found)
    compile_s = prepared if prepared > _COMPILING_S else 0.0
    chosen = chain.planned_by if chain.side == AUTO else ""
    return Timed(chain.side, chain.task, measured, clock.now() - began - compile_s, compile_s, chosen)


def _check_output(stage: Stage, side: str) -> None:
    """Reject outputs of a wrong shape or that are not finite. The conformance suite checks the values."""
    out, rows, heads = stage.last, stage.task.point.rows, stage.task.layer.num_heads
    if not stage.ran:
        return
    is_result = isinstance(out, torch.Tensor) and out.ndim == 3 and out.shape[:2] == (rows, heads)
    if not is_result and not side.startswith(RAW):  # a library's output may have another shape
        found = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
        raise BackendError(f"{side} returned {found}; the result must have shape [{rows} tokens, {heads} heads, width]")
    if isinstance(out, torch.Tensor) and not bool(torch.isfinite(out).all()):
        raise BackendError(f"{side} returned non-finite results over a cache of random rows")


def _gap(stage: Stage, clock: Clock, known: dict[int, float]) -> float:
    """Microseconds between two calls of a captured chain. Measured once per number of calls."""
    if stage.calls not in known:
        links = stage.links()
        clock.warm_up(links)
        known[stage.calls] = 1e6 * statistics.median(clock.times(links)) / links.calls
    return known[stage.calls]


def memory_of(device: torch.device) -> float:
    """Bytes that a stage may use."""
    if (module := runtime_of(device).module) is not None:
        free, _ = module.mem_get_info(device)
        cached: int = module.memory_reserved(device) - module.memory_allocated(device)
        return float(_SHARE_OF_MEMORY * (free + cached))
    return 0.25 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _device_error(module: Any) -> str | None:
    """Error that makes the GPU unusable for this process, such as an illegal memory access; None if there is none."""
    try:
        module.synchronize()
    except RuntimeError as error:
        return describe_error(error).splitlines()[0]
    return None


def _builder(job: Job, registry: Registry, task: Task) -> Build:
    role = task.point.role
    if job.backend != AUTO:
        registered = registry.get(job.backend)
        spec = registered.spec
        options = parse_options(spec.name, spec.options, job.settings)

        def build(context: HostContext) -> AttentionBackend:
            own = context.for_backend(spec.name, spec.capabilities, roles=frozenset({role}), options=options)
            return build_backend(registered, own)

        return build

    runtime = runtime_of(torch.device(job.device))
    processor = runtime.processor(torch.device(job.device))

    def choose(context: HostContext) -> AttentionBackend:
        shape = task.shape
        problem = Problem(
            ModelSpec("measured", "measured", context.model.layers, context.model.context_length),
            device=context.device.type,
            sm=processor.sm or None,
            architecture=processor.architecture,
            dtype=shape.dtype,
            kv_dtype=shape.kv_dtype,
            page_size=shape.page_size,
            wants_graphs=runtime.graph is not None,
            mla_by_host=shape.hosted and not shape.topk,
            mla_extend=shape.path,
        )
        ranking = default_ranking(registry, problem, per_batch=True)
        return build_selection(select(registry, BackendRequest(), problem, ranking=ranking), context)

    return choose
