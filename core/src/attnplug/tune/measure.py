"""Measuring one backend: task by task, within a budget, and whatever it does."""

from __future__ import annotations

import gc
import math
import os
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from attnplug.auto.measured_ranking import default_ranking
from attnplug.auto.measurement import Measurement
from attnplug.choose.assembly import build_selection
from attnplug.choose.building import build_backend
from attnplug.choose.registry import Registry
from attnplug.choose.select import select
from attnplug.choose.selection import AUTO, BackendRequest
from attnplug.contract.backend import AttentionBackend
from attnplug.contract.context import HostContext
from attnplug.declare.errors import BackendError, describe_error
from attnplug.declare.model import ModelSpec
from attnplug.declare.options import parse_options
from attnplug.declare.problem import Problem
from attnplug.machine.interrupt import Terminated
from attnplug.tune.clock import Chain, Clock
from attnplug.tune.raw import RAW, raw_chain
from attnplug.tune.shapes import Task
from attnplug.tune.stage import Build, Setup, Stage, stage_bytes

_COMPILING_S = 2.0
"""Preparing a point takes a fraction of a second. Whatever takes longer than this compiles kernels."""
_SHARE_OF_MEMORY = 0.8
_SHORTEST_US = 0.01


@dataclass(frozen=True, slots=True)
class Job:
    """One backend, and what is to be measured of it."""

    backend: str
    """Its name, or ``auto`` for what is chosen at each point."""
    tasks: tuple[Task, ...]
    device: str
    max_context: int
    seconds: float = math.inf
    """After so many no further task begins. Compiling does not count."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """The backend's options, as given."""
    raw: bool = False
    """Whether the backend's library is measured too, called directly."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One task, measured in ``seconds``. ``compile_s`` beside them is what compiling its kernels took, if it had to.
    ``planned_by`` is the backend that ``auto`` took."""

    side: str
    task: Task
    measured: Measurement
    seconds: float = 0.0
    compile_s: float = 0.0
    planned_by: str = ""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A task that does not fit into memory."""

    side: str
    task: Task
    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A task at which a side failed: it is left out for this role and sort of layer.

    ``last`` says that its process ended, or can no longer use the GPU: nothing comes after it from that process.
    """

    side: str
    task: Task
    reason: str
    last: bool = False


Outcome = Timed | Skipped | Failed


def run_job(job: Job, registry: Registry, clock: Clock) -> Iterator[Outcome]:
    """Measure a backend's tasks one after the other. Nothing that it raises escapes.

    Where it fails, its other tasks of that role and sort of layer are not tried.
    """
    setup = Setup(torch.device(job.device), job.max_context)
    spent, broken, gaps = 0.0, set[tuple[object, ...]](), dict[int, float]()
    for task in job.tasks:
        if spent >= job.seconds:
            return
        for outcome in _measured(job, task, setup, registry, clock, broken, gaps):
            if isinstance(outcome, Failed):
                broken.add(_sort(outcome.side, task))
            elif isinstance(outcome, Timed):
                spent += outcome.seconds
            yield outcome
        if setup.device.type == "cuda":
            if (lost := _lost()) is not None:
                yield Failed(job.backend, task, f"the GPU is lost: {lost}", last=True)
                return
            gc.collect()


def _sort(side: str, task: Task) -> tuple[object, ...]:
    return side, task.point.role, task.shape


def _measured(
    job: Job,
    task: Task,
    setup: Setup,
    registry: Registry,
    clock: Clock,
    broken: set[tuple[object, ...]],
    gaps: dict[int, float],
) -> list[Outcome]:
    """The backend at one point, and its library on the same caches."""
    side, raw = job.backend, f"{RAW}{job.backend}"
    found: list[Outcome] = []
    if _sort(side, task) in broken:
        return found
    needed, have = stage_bytes(task), memory_of(setup.device)
    if needed > have:
        return [Skipped(side, task, f"it takes {needed / 2**30:.1f} GiB, and may take {have / 2**30:.1f} GiB")]
    began = clock.now()
    try:
        with torch.inference_mode():
            stage = Stage(task, setup, _builder(job, registry, task))
            found.append(_timed(stage, stage.chain(side), clock, began, gaps))
            if job.raw and _sort(raw, task) not in broken:
                side, began = raw, clock.now()
                chain = raw_chain(job.backend, raw, stage)
                if chain is not None:
                    found.append(_timed(stage, chain, clock, began, gaps))
    except (KeyboardInterrupt, Terminated):
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        found.append(Skipped(side, task, f"it runs out of memory: {describe_error(error).splitlines()[0]}"))
    except BaseException as error:  # kernels and their libraries raise anything
        found.append(Failed(side, task, describe_error(error)))
    return found


def _timed(stage: Stage, chain: Chain, clock: Clock, began: float, gaps: dict[int, float]) -> Timed:
    clock.warm_up(chain)
    prepared = clock.now() - began
    _looked_at(stage, chain.side)
    gap = _gap(stage, clock, gaps) if chain.captured else 0.0
    times = [max(1e6 * seconds / chain.calls - gap, _SHORTEST_US) for seconds in clock.times(chain)]
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    point = chain.task.point
    found = (round(time, 3) for time in (middle, low, high))
    measured = Measurement(point.requests, point.length, point.tokens, point.ragged, *found)
    compile_s = prepared if prepared > _COMPILING_S else 0.0
    chosen = chain.planned_by if chain.side == AUTO else ""
    return Timed(chain.side, chain.task, measured, clock.now() - began - compile_s, compile_s, chosen)


def _looked_at(stage: Stage, side: str) -> None:
    """What did not attend must not win by that. Whether the numbers are right is for the conformance suite to say."""
    out, rows, heads = stage.last, stage.task.point.rows, stage.task.layer.num_heads
    if not stage.ran:
        return
    is_result = isinstance(out, torch.Tensor) and out.ndim == 3 and out.shape[:2] == (rows, heads)
    if not is_result and not side.startswith(RAW):  # libraries have shapes of their own
        found = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
        raise BackendError(f"{side} gave {found}; the result has shape [{rows} tokens, {heads} heads, width]")
    if isinstance(out, torch.Tensor) and not bool(torch.isfinite(out).all()):
        raise BackendError(f"{side} gave results that are not finite, over a cache of random rows")


def _gap(stage: Stage, clock: Clock, known: dict[int, float]) -> float:
    """Microseconds between two calls of a captured chain, which are measured once for each length of a chain."""
    if stage.calls not in known:
        links = stage.links()
        clock.warm_up(links)
        known[stage.calls] = 1e6 * statistics.median(clock.times(links)) / links.calls
    return known[stage.calls]


def memory_of(device: torch.device) -> float:
    """Bytes that a stage may take."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return _SHARE_OF_MEMORY * (free + cached)
    return 0.25 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _lost() -> str | None:
    """Why the GPU can no longer be used by this process, if a kernel has read or written outside of memory."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return describe_error(error).splitlines()[0]
    return None


def _builder(job: Job, registry: Registry, task: Task) -> Build:
    role, sm = task.point.role, None
    if job.backend != AUTO:
        registered = registry.get(job.backend)
        spec = registered.spec
        options = parse_options(spec.name, spec.options, job.settings)

        def build(context: HostContext) -> AttentionBackend:
            own = context.for_backend(spec.name, spec.capabilities, roles=frozenset({role}), options=options)
            return build_backend(registered, own)

        return build

    if job.device.startswith("cuda"):
        major, minor = torch.cuda.get_device_capability(torch.device(job.device))
        sm = 10 * major + minor

    def choose(context: HostContext) -> AttentionBackend:
        shape = task.shape
        problem = Problem(
            ModelSpec("measured", "measured", context.model.layers, context.model.context_length),
            device=context.device.type,
            sm=sm,
            dtype=shape.dtype,
            kv_dtype=shape.kv_dtype,
            page_size=shape.page_size,
            wants_graphs=context.device.type == "cuda",
            mla_by_host=shape.hosted,
        )
        ranking = default_ranking(registry, problem, per_batch=True)
        return build_selection(select(registry, BackendRequest(), problem, ranking=ranking), context)

    return choose
