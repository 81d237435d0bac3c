"""``decode_h200.py`` for attnplug's own engine: steady-state decode steps, a trace of some of them, and prefill.

Contexts are not computed. A request's prompt is put into the prefix cache as separate pages with random contents, and
so are linear states; only its last page is prefilled. Decode steps read as many bytes as with real contexts, and 256
requests of 8192 tokens are ready in seconds. Requests share no page: shared ones would be read from the L2 cache.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import torch
from decode_models import Config, prefill_flops
from decode_points import SHORT, Clock, Point, Settings, steps_for
from decode_trace import traced

from attnplug import Role
from attnplug_engine import Engine
from attnplug_engine.models.experts import Experts
from attnplug_engine.options import EngineOptions
from attnplug_engine.request import Request, SamplingParams

_WARM = 8
_TRACED_CONTEXT, _TRACED_BATCH = 512, 64
"""Largest traced point: a trace takes longer than the rest of the point."""
_TRACED = 30
_PREFILLS = 3


def measure(model: str, config: Config, folder: str, points: Sequence[Point], settings: Settings, clock: Clock) -> None:
    """Measure a model's points within the time budget."""
    started = time.perf_counter()
    engine = build(folder, points, settings)
    randomise(engine)
    seconds, page = time.perf_counter() - started, engine.runner.capacity.page_size
    clock.note(model, start_s=seconds, page_size=page, backends=_backends(engine))
    clock.lock.acquire()
    if model in settings.prefill_models:
        clock.record_prefill(model, settings.prefill, partial(prefill, engine, config, settings.prefill))
    for point in points:
        clock.record(point, partial(decode, engine, point, settings))
    del engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def build(folder: str, points: Sequence[Point], settings: Settings) -> Engine:
    batch, context = max(point.batch for point in points), max(point.context for point in points)
    linear = settings.is_linear
    given: dict[str, Any] = {
        "random_weights": True,
        "attention_backend": settings.attention_backend,
        "role_backends": {} if settings.prefill_backend is None else {Role.PREFILL: settings.prefill_backend},
        "device": settings.device,
        "max_batch": batch,
        "context_length": max(context, settings.prefill) + settings.max_new_tokens,
        "chunked_prefill_size": max(8192, batch),
        "ignore_eos": True,
        # One for a request, one for its initial snapshot, one at the end of its prompt: with fewer, a snapshot that
        # another request waits for would be evicted.
        "state_slots": 3 * batch + 2 if linear else None,
        # Options that engine versions without CUDA graphs lack.
        "cuda_graph_batch_sizes": None if settings.eager else tuple(sorted({point.batch for point in points})),
        "disable_cuda_graph": settings.eager,
        "overlap": False if settings.no_overlap else None,
    }
    known = {field.name for field in fields(EngineOptions)}
    return Engine(folder, **{name: value for name, value in given.items() if name in known and value is not None})


def decode(engine: Engine, point: Point, settings: Settings) -> dict[str, Any]:
    with _running(engine, point, settings) as (requests, touched):
        for _ in range(_WARM):
            engine.step()
        guess = _run(engine, _WARM) / _WARM
        steps = steps_for(guess, settings.max_new_tokens - 4 * _WARM - _TRACED)
        times = _timed(engine, steps)
        found: dict[str, Any] = {"step_us": 1e6 * sum(times) / steps, "steps": steps, **touched}
        found["distinct_tokens"] = len({request.output[-1] for request in requests})
        found["median_step_us"] = 1e6 * statistics.median(times)
        found["most_step_us"] = 1e6 * max(times)
        if settings.trace and point.context <= _TRACED_CONTEXT and point.batch <= _TRACED_BATCH:
            is_cuda = engine.runner.device.type == "cuda"
            found |= traced(lambda count: _run(engine, count), _TRACED, is_cuda=is_cuda)
        if ended := [request.finish_reason for request in requests if request.finish_reason is not None]:
            raise RuntimeError(f"{len(ended)} of {len(requests)} requests ended while they were measured: {ended[0]}")
    return found


def prefill(engine: Engine, config: Config, tokens: int) -> dict[str, Any]:
    """Seconds of one prompt's prefill and first token; the first run is a warm-up.

    Short prefills are traced: the device's idle time is an upper bound of the gain by CUDA graphs.
    """
    best = statistics.median(_prefilled(engine, tokens, 1 + _PREFILLS)[1:])
    found: dict[str, Any] = {"seconds": best, "tflops": prefill_flops(config, tokens) / best / 1e12}
    found["short"] = [_short_prefill(engine, length) for length in SHORT if length <= tokens]
    return found


def _short_prefill(engine: Engine, tokens: int) -> dict[str, Any]:
    _prefilled(engine, tokens, 2)
    found = {"tokens": tokens, "us": 1e6 * statistics.median(_prefilled(engine, tokens, _TRACED))}
    is_cuda = engine.runner.device.type == "cuda"
    trace = traced(lambda count: sum(_prefilled(engine, tokens, count)), _TRACED, is_cuda=is_cuda)
    if parts := trace.get("parts_us"):
        found |= {"busy_us": sum(parts.values()) - parts["idle"], "launches": trace["launches"]}
    return found


def _prefilled(engine: Engine, tokens: int, count: int) -> list[float]:
    """Seconds of each of ``count`` prompts, one after the other, without cache hits between them."""
    seconds = []
    for number in range(count):
        request = engine.add(_prompt(engine, 10_000 + number, tokens), SamplingParams(max_tokens=1))
        started = time.perf_counter()
        while request.finish_reason is None:
            engine.step()
        seconds.append(time.perf_counter() - started)
        _empty(engine)
    return seconds


def _timed(engine: Engine, steps: int) -> list[float]:
    """Seconds from the return of one step to that of the next: with steps in flight, each call finishes one."""
    times, before = [], time.perf_counter()
    for _ in range(steps):
        engine.step()
        now = time.perf_counter()
        times.append(now - before)
        before = now
    return times


def _run(engine: Engine, steps: int) -> float:
    return sum(_timed(engine, steps))


@contextmanager
def _running(engine: Engine, point: Point, settings: Settings) -> Iterator[tuple[list[Request], dict[str, float]]]:
    """Start all requests of a point, up to their first tokens; remove them on exit."""
    requests: list[Request] = []
    touched: dict[str, float] = {}
    try:
        for number in range(point.batch):
            prompt = _prompt(engine, number, point.context)
            if settings.fill_cache:
                _cache(engine, prompt)
            requests.append(engine.add(prompt, SamplingParams(max_tokens=settings.max_new_tokens)))
        with _distinct_experts(engine, point.batch) as seen:
            while not all(request.output or request.finish_reason for request in requests):
                engine.step()
        if seen:
            touched["experts_seen"] = statistics.mean(seen)
        touched["cached_tokens"] = statistics.mean(request.cached_tokens for request in requests)
        yield requests, touched
    finally:
        for request in requests:
            engine.abort(request)
        _empty(engine)


def _empty(engine: Engine) -> None:
    """Finish the steps in flight, then free all pages of the cache."""
    while engine.step() is not None:
        pass
    if engine.cache is not None:
        engine.cache.clear()


def _prompt(engine: Engine, number: int, tokens: int) -> list[int]:
    found: list[int] = np.random.default_rng(number).integers(engine.vocab_size, size=tokens).tolist()
    return found


def _cache(engine: Engine, prompt: Sequence[int]) -> None:
    """Add all of a prompt but its last page to the prefix cache, with the pool's contents."""
    size, allocator, states = engine.runner.capacity.page_size, engine.runner.allocator, engine.runner.pools.linear
    count = (len(prompt) - 1) // size
    if engine.cache is None or not count:
        return
    pages = allocator.allocate(count)
    tokens = prompt[: count * size]
    engine.cache.insert(tokens, pages)
    allocator.release(pages)  # the cache has its own reference
    if states is not None:
        slot = engine.runner.states.allocate()
        for layer in states.layer_ids:
            for state in (states.recurrent(layer), states.conv(layer)):
                if state is not None:
                    state[slot].normal_(std=0.1)
        engine.cache.add_snapshot(tokens, slot)


def randomise(engine: Engine) -> None:
    pools = engine.runner.pools
    buffers = [pools.mla.rows(layer) for layer in pools.mla.layer_ids] if pools.mla is not None else []
    if pools.mha is not None:
        buffers += [part(layer) for part in (pools.mha.keys, pools.mha.values) for layer in pools.mha.layer_ids]
    for buffer in buffers:
        buffer.normal_()


@contextmanager
def _distinct_experts(engine: Engine, batch: int) -> Iterator[list[int]]:
    """Yield a list that collects the number of distinct experts per layer of prefills of at least ``batch`` tokens."""
    seen: list[int] = []

    def look(_module: object, inputs: tuple[Any, ...]) -> None:
        chosen = inputs[1]
        if chosen.shape[0] >= batch:
            rows = torch.linspace(0, chosen.shape[0] - 1, batch, device=chosen.device).long()
            seen.append(int(chosen[rows].unique().numel()))

    experts = [module for module in engine.runner.model.modules() if isinstance(module, Experts)]
    handles = [module.register_forward_pre_hook(look) for module in experts]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _backends(engine: Engine) -> dict[str, str | None]:
    return {str(role): choice.chosen_name for role, choice in engine.selection.choices.items()}
