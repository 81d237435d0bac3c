"""Start-up of an engine: capture of CUDA graphs, warm-up, scheduler and step loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from attnplug import GraphLevel, PoolError, UsageError
from attnplug.host import ForwardingBackend
from attnplug.machine.runtime import runtime_of
from attnplug_engine.execution.runner import ModelRunner
from attnplug_engine.graphs.capture import GraphCapture
from attnplug_engine.graphs.decode import DecodeGraphs, GraphReport
from attnplug_engine.graphs.prefill import PrefillGraphs, captures_extends, prefilling_child
from attnplug_engine.graphs.step_graphs import capture_steps
from attnplug_engine.options import EngineOptions
from attnplug_engine.request import Request
from attnplug_engine.scheduling.mixed_steps import MixedSteps, prefill_seconds, timed_prompts
from attnplug_engine.scheduling.prefix_cache import PrefixCache
from attnplug_engine.scheduling.scheduler import MAX_IN_FLIGHT, Scheduler
from attnplug_engine.scheduling.warm_up import warm_up_batches
from attnplug_engine.serving.step_loop import StepLoop
from attnplug_engine.settings.capture_sizes import PREFILL_SIZES, default_prefill_sizes, default_sizes
from attnplug_engine.speculation.round_graphs import RoundGraphs
from attnplug_engine.speculation.rounds import RoundRunner
from attnplug_engine.speculation.scheduler import RoundScheduler


def make_scheduler(
    runner: ModelRunner,
    rounds: RoundRunner | None,
    options: EngineOptions,
    cache: PrefixCache | None,
    mixed_steps: MixedSteps | None,
) -> Scheduler:
    """Return the scheduler of a runner's requests: of speculative rounds if there are ``rounds``."""
    room, held = runner.capacity, (runner.table, runner.allocator, cache)
    limits: dict[str, Any] = dict(
        max_batch=room.max_batch,
        max_step_tokens=room.max_step_tokens,
        context_length=room.context_length,
        whole_prompts=options.chunked_prefill_size == -1,
        mixed_steps=mixed_steps,
        states=runner.states,
        checkpoint=options.state_checkpoint,
        coordinator=runner.coordinator,
    )
    if rounds is None:
        return Scheduler(*held, **limits)
    return RoundScheduler(*held, rounds.speculation, short_hits=rounds.proposer.ahead, **limits)


def capture_graphs(
    runner: ModelRunner,
    rounds: RoundRunner | None,
    options: EngineOptions,
    progress: Callable[[int, int], None] | None = None,
) -> GraphReport:
    """Capture the steps that options request and backends can capture. Raises UsageError or PoolError."""
    level, limits = runner.attention.graph_level, limited_by(runner.backend, "cuda_graph")
    backend, target_limits = runner.backend, limits
    if rounds is not None and rounds.draft is not None and rounds.draft.attention.graph_level < level:
        backend = rounds.draft.backend
        level, limits = rounds.draft.attention.graph_level, (backend.backend_id.name,)
    runtime = runtime_of(runner.device)
    if runtime.graph is None:
        return GraphReport(level, limits, why_none=f"the device is {runner.device.type}")
    if not options.captures:
        why = "every layer is checked" if options.check_layers else "turned off"
        return GraphReport(level, limits, why_none=why)
    if level is GraphLevel.NEVER or (rounds is not None and level < GraphLevel.UNIFORM):
        names = " and ".join(limits) or backend.backend_id.name
        what = "cannot be captured" if level is GraphLevel.NEVER else "captures decode only, not verify"
        return GraphReport(level, limits, why_none=f"{names} {what}")
    sizes = options.cuda_graph_batch_sizes or default_sizes(runner.capacity.max_batch)
    before = runtime.module.mem_get_info(runner.device)[0]
    capture = GraphCapture(runner.device)
    prefills, why_no_prefill = _prefill_sizes(runner, rounds, options, target_limits)
    graphs: DecodeGraphs | RoundGraphs
    prefill_graphs: PrefillGraphs | None = None
    keep_all = options.cuda_graph_prefill_sizes is not None
    if rounds is None:
        steps = capture_steps(runner, sizes, capture, progress, prefills=prefills, keep_all=keep_all)
        graphs, prefill_graphs = steps.decode, steps.prefill
    else:
        graphs = rounds.capture(sizes, capture, progress, prefills=prefills, keep_all=keep_all)
        prefill_graphs = rounds.prefill_graphs
    if prefills and prefill_graphs is None:
        why_no_prefill = "the GPU needs longer for it than the host"
    taken = max(before - runtime.module.mem_get_info(runner.device)[0], 0)
    return GraphReport(
        level,
        limits,
        graphs.sizes,
        taken,
        backends=graphs.backends,
        prefill_sizes=() if prefill_graphs is None else prefill_graphs.sizes,
        why_no_prefill=why_no_prefill,
        why_no_draft_prefill="" if rounds is None or prefill_graphs is None else rounds.why_no_draft_prefill,
        prefill_by=prefilling_child(runner.backend),
    )


def _prefill_sizes(
    runner: ModelRunner, rounds: RoundRunner | None, options: EngineOptions, limits: Sequence[str]
) -> tuple[tuple[int, ...], str]:
    """Return the token counts for which prefills are captured, and the reason if there are none."""
    capacity = runner.capacity
    most = capacity.max_rows if rounds is None else capacity.max_step_tokens
    asked = options.cuda_graph_prefill_sizes
    if options.disable_prefill_cuda_graph:
        return (), "turned off"
    if captures_extends(runner.backend):
        # The chunk size was checked before the model was known; its context may be shorter.
        sizes = default_prefill_sizes(most) if asked is None else PREFILL_SIZES.check(asked, most, "context_length")
        return sizes, ""
    names = " and ".join(limits) or runner.backend.backend_id.name
    if asked is not None:
        raise UsageError(
            f"`{PREFILL_SIZES.name}` requests CUDA graphs of prefills, and {names} cannot capture them; leave it "
            "out, or choose backends that capture any batch: `attnplug backends` lists these with graphs always",
            settings=[PREFILL_SIZES.name, "attention_backend"],
        )
    return (), f"{names} cannot capture it"


def limited_by(backend: object, claim: str) -> tuple[str, ...]:
    """Return the names of the backends that weakened a claim of a wrapper; empty for other backends."""
    if not isinstance(backend, ForwardingBackend):
        return ()
    children = [backend.children[label] for label in backend.limiting_children.get(claim, ())]
    return tuple(name for child in children for name in limited_by(child, claim) or (child.backend_id.name,))


def equalize_pages(runner: ModelRunner) -> None:
    """Allocate surplus pages. Ranks run one schedule, so each uses as many pages as the rank with the least memory."""
    allocator = runner.allocator
    free = torch.tensor([allocator.free_pages], device=runner.device)
    allocator.allocate(allocator.free_pages - min(runner.parallel.all_gather(free, 0).tolist()))


def start_loop(
    runner: ModelRunner,
    rounds: RoundRunner | None,
    options: EngineOptions,
    cache: PrefixCache | None,
    on_warm_up: Callable[[int, int], None] | None = None,
) -> StepLoop:
    """Warm up on a GPU, then return the loop that runs an engine's steps."""
    on_gpu = runtime_of(runner.device).module is not None
    overlap = on_gpu if options.overlap is None else options.overlap
    depth = MAX_IN_FLIGHT if overlap else 1
    mixed = warm_up(runner, rounds, options, runner.model.vocab_size, depth, on_warm_up) if on_gpu else None
    return StepLoop(runner, rounds, make_scheduler(runner, rounds, options, cache, mixed), depth)


def warm_up(
    runner: ModelRunner,
    rounds: RoundRunner | None,
    options: EngineOptions,
    vocab_size: int,
    depth: int,
    progress: Callable[[int, int], None] | None = None,
) -> MixedSteps | None:
    """Run requests of every kind once, so that the first request compiles nothing (E1).

    Returns the limit of mixed steps, the same on all ranks; None if prompts are not chunked.
    """
    # Ranks run the same requests, so they count the pages that all of them have.
    capacity = replace(runner.capacity, num_pages=runner.allocator.free_pages)
    loop = StepLoop(runner, rounds, make_scheduler(runner, rounds, options, None, None), depth)
    batches = list(warm_up_batches(capacity))
    for done, batch in enumerate(batches):
        if progress is not None:
            progress(done, len(batches))
        _run_to_end(loop, batch)
    prompts = () if options.chunked_prefill_size == -1 else timed_prompts(capacity, vocab_size)
    times = [(len(request.prompt), _run_to_end(loop, [request])) for request in prompts]
    runner.backend_usage.clear()
    if runner.coordinator is not None:
        runner.coordinator.reset_statistics()
    if not times:
        return None
    seconds = torch.tensor([prefill_seconds(times)], dtype=torch.float64, device=runner.device)
    if runner.parallel.size > 1:  # ranks run one schedule: that of the slowest
        seconds = runner.parallel.all_gather(seconds, 0)
    per_token, per_position = seconds.amax(0).tolist()
    return MixedSteps.of(per_token, per_position, options.inter_token_latency)


def _run_to_end(loop: StepLoop, batch: Sequence[Request]) -> float:
    """Run requests to their ends; return the seconds until the first one has a token."""
    started = time.perf_counter()
    for request in batch:
        loop.add(request)
    try:
        while loop.step() is not None and not batch[0].output:
            pass
        seconds = time.perf_counter() - started
        while loop.step() is not None:
            pass
    except torch.OutOfMemoryError as error:
        most = loop.runner.capacity.max_step_tokens
        raise PoolError(
            f"a step of {most} tokens does not fit into the memory beside weights and caches; lower "
            "`chunked_prefill_size` or `num_pages`",
            settings=["chunked_prefill_size", "num_pages"],
        ) from error
    return seconds
