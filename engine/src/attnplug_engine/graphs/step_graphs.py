"""Captured decode and prefill steps of a runner: capture at start-up, replay of the one that fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from attnplug import ExtendPath, ForwardBatch, GraphLevel, PoolError
from attnplug.machine.runtime import runtime_of
from attnplug_engine.execution.runner import ModelRunner, Phase, ReplayedStep
from attnplug_engine.execution.sampler import Sampler
from attnplug_engine.graphs.capture import CaptureFunction
from attnplug_engine.graphs.capture_check import CaptureCheck
from attnplug_engine.graphs.decode import CapturedStep, DecodeGraphs
from attnplug_engine.graphs.prefill import PrefillGraphs
from attnplug_engine.scheduling.step import Step


class CapturedSteps:
    """Captured steps of one model. ``prefill`` is None if no prefill was captured."""

    def __init__(self, decode: DecodeGraphs, prefill: PrefillGraphs | None) -> None:
        self.decode, self.prefill = decode, prefill

    def replay(self, step: Step, sampler: Sampler) -> ReplayedStep | None:
        """Replay the graph that fits a step; return None if there is none."""
        if step.mode.is_decode:
            captured = self.decode.fitting(len(step.entries), step.entries)
            if captured is not None:
                sampled, output = self.decode.run(captured, step, sampler)
                return ReplayedStep(captured.batch, captured.logits[0], sampled, output)
        elif self.prefill is not None:
            captured = self.prefill.fitting(step)
            if captured is not None:
                sampled = self.prefill.run(captured, step, sampler)
                return ReplayedStep(captured.batch, captured.logits[0], sampled, None)
        return None


@torch.inference_mode()
def capture_steps(
    runner: ModelRunner,
    sizes: Sequence[int],
    capture: CaptureFunction,
    progress: Callable[[int, int], None] | None = None,
    *,
    prefills: Sequence[int] = (),
    keep_all: bool = True,
) -> CapturedSteps:
    """Capture decode steps of these batch sizes and prefills of these numbers of tokens for a runner.

    The largest is captured first, so that the others reuse its memory. Unless ``keep_all``, a prefill is kept only if
    its graph saves time. Each graph is compared with eager attention before it is used. The workspace does not grow
    afterwards.
    """
    runner.enter(Phase.WARM_UP, "capture graphs once, before the first step")
    shared = (runner.attention, runner.table, runner.tokens, runner.capacity)
    decode = DecodeGraphs(
        lambda batch: runner.model.logits(runner.run_model(batch)),
        *shared,
        largest=max(sizes),
        has_states=runner.pools.linear is not None,
    )
    prefill = None
    if prefills:
        prefill = prefill_graphs(
            runner,
            lambda batch, rows: runner.model.logits(runner.run_model(batch).index_select(0, rows)),
            largest=max(prefills),
            keep_all=keep_all,
            as_mha=runner.attention.mla is not None and runner.attention.mla.captures_mha,
        )
    check = capture_check(runner)

    def capture_decode(size: int) -> None:
        for captured in decode.capture(size, capture):
            check.run(captured.batch, capture)

    jobs = [CaptureJob(sizes, capture_decode, lambda: decode.sizes)]
    if prefill is not None:
        jobs.insert(0, prefill_job(runner, prefill, prefills, capture, check, keep_all=keep_all))
    reserved = () if prefill is None else (prefill.requests, prefill.largest)
    capture_all(runner, jobs, lambda: decode.reserve(runner.allocator, *reserved), progress)
    runner.graphs = steps = CapturedSteps(decode, prefill if prefill is not None and prefill.sizes else None)
    runner.enter(Phase.SERVE)
    return steps


@dataclass(frozen=True, slots=True)
class CaptureJob:
    """Graphs of one kind to capture: ``capture(size)`` for each of ``sizes``. ``captured()`` returns those that are."""

    sizes: Sequence[int]
    capture: Callable[[int], None]
    captured: Callable[[], Sequence[int]]
    is_prefill: bool = False


def capture_all(
    runner: ModelRunner,
    jobs: Sequence[CaptureJob],
    reserve: Callable[[], None],
    progress: Callable[[int, int], None] | None,
) -> None:
    """Reserve memory for graphs, then capture them: of each job the largest first, so that the others reuse its memory.
    The workspace does not grow afterwards. Raises PoolError if one does not fit."""
    todo = [(job, size) for job in jobs for size in sorted(job.sizes, reverse=True)]
    job, size = todo[0]
    try:
        reserve()
        runner.enter(Phase.CAPTURE)
        for done, (job, size) in enumerate(todo, 1):
            job.capture(size)
            if progress is not None:
                progress(done, len(todo))
    except torch.OutOfMemoryError as error:
        raise _no_memory(runner, size, job.captured(), prefill=job.is_prefill) from error
    runner.workspace.freeze()


def capture_check(runner: ModelRunner) -> CaptureCheck:
    """Return the check of a runner's captured attention."""
    return CaptureCheck(
        runner.spec, runner.attention, runner.pools, runner.allocator, runner.dtype, runner.device, runner.coordinator
    )


def prefill_graphs(
    runner: ModelRunner,
    run_model: Callable[[ForwardBatch, Tensor], Tensor],
    *,
    largest: int,
    keep_all: bool,
    as_mha: bool = False,
) -> PrefillGraphs:
    """Return the graphs of a runner's prefills of up to ``largest`` tokens, still to be captured. ``run_model`` returns
    the logits of the given rows of a batch."""
    return PrefillGraphs(
        run_model,
        runner.attention,
        runner.table,
        runner.tokens,
        runner.capacity,
        largest=largest,
        has_states=runner.pools.linear is not None,
        slower=runner.spec if _eager_is_faster(runner) else None,
        times=runner.extend_times,
        as_mha=as_mha,
        all_reduce_min=None if keep_all else partial(_min_over_ranks, runner),
    )


def prefill_job(
    runner: ModelRunner,
    prefill: PrefillGraphs,
    sizes: Sequence[int],
    capture: CaptureFunction,
    check: CaptureCheck,
    *,
    keep_all: bool,
    follow: Callable[[CapturedStep], None] | None = None,
) -> CaptureJob:
    """Return the job that captures and checks prefills of ``sizes`` tokens, and calls ``follow`` with those that are
    kept. Without ``keep_all``, one that does not fit is left out."""

    def capture_one(size: int) -> None:
        try:
            for captured in prefill.capture(size, capture):
                check.run(captured.batch, capture)
                if follow is not None:
                    follow(captured)
        except torch.OutOfMemoryError:
            if keep_all or runner.parallel.size > 1:
                raise
            prefill.drop(size)  # no setting requests this size

    return CaptureJob(sizes, capture_one, lambda: prefill.sizes, is_prefill=True)


def _eager_is_faster(runner: ModelRunner) -> bool:
    """Return True if prefills that are captured absorbed may be faster without a graph: by another backend, or as MHA,
    which is captured for steps without prefixes only."""
    as_mha = runner.pools.mla is not None and runner.backend.claims.mla_extend != {ExtendPath.ABSORBED}
    return as_mha or runner.attention.graph_level is not GraphLevel.ALWAYS


def _min_over_ranks(runner: ModelRunner, value: float) -> float:
    """Return the minimum of ``value`` over ranks. All ranks run the same steps, so they decide by the same number."""
    return float(runner.parallel.all_gather(torch.tensor([value], device=runner.device), 0).min())


def _no_memory(runner: ModelRunner, size: int, done: Sequence[int], *, prefill: bool = False) -> PoolError:
    """Return the error for a graph of ``size`` requests or tokens that does not fit, following those of ``done``."""
    free, total = runtime_of(runner.device).module.mem_get_info(runner.device)
    caches = runner.pools.nbytes - (0 if runner.coordinator is None else runner.coordinator.host_nbytes)
    larger = f" after those of {', '.join(map(str, reversed(done)))}" if done else ""
    what, sizes, off = "requests", "cuda_graph_batch_sizes", "disable_cuda_graph"
    if prefill:
        what, sizes, off = "tokens", "cuda_graph_prefill_sizes", "disable_prefill_cuda_graph"
    return PoolError(
        f"the CUDA graph of {size} {what} does not fit into memory{larger}: {free / 2**20:.0f} MiB of "
        f"{total / 2**20:.0f} are free beside the weights and {caches / 2**20:.0f} MiB of caches; lower "
        f"`{sizes}`, `num_pages` or `max_batch`, or turn these graphs off by `{off}`",
        settings=[sizes, "num_pages", "max_batch", off],
    )
