"""Limits of mixed steps: prefill in steps with decoding requests takes at most the inter-token latency, at every
position."""

from __future__ import annotations

import pytest
from small_scheduler import Pool, finish, request, run_step, shape, start

from attnplug_engine.memory.capacity import Capacity
from attnplug_engine.scheduling.mixed_steps import MixedSteps, PrefillBudget, prefill_seconds, timed_prompts


def seconds(tokens: int, position: int, per_token: float, per_position: float) -> float:
    """Seconds of a chunk, token by token."""
    return sum(per_token + per_position * (position + number) for number in range(tokens))


@pytest.mark.parametrize(("per_token", "per_position"), [(4e-6, 4e-10), (2e-5, 1e-10), (4e-6, 0.0), (1e-6, 1e-9)])
def test_times_of_two_prompts_give_the_seconds_per_token_and_position(per_token, per_position):
    times = [(tokens, seconds(tokens, 0, per_token, per_position)) for tokens in (1024, 2048)]
    assert prefill_seconds(times) == pytest.approx((per_token, per_position), rel=1e-2, abs=1e-14)


@pytest.mark.parametrize("second", [0.001, 0.5, 100.0])
def test_a_disturbed_time_does_not_make_layers_free(second):
    per_token, per_position = prefill_seconds([(1000, 0.25), (2000, second)])
    assert 0.25 / 4 <= 1000 * per_token <= 0.25 and per_position >= 0


@pytest.mark.parametrize("position", [0, 8192, 32768, 131072])
def test_a_chunk_takes_the_latency_at_every_position(position):
    """Attention over a long context counts: the chunk gets smaller."""
    per_token, per_position = 4e-6, 4e-6 / 8192
    budget = PrefillBudget(1 << 20, MixedSteps.of(per_token, per_position, 0.05))
    assert 0.04 < seconds(budget.chunk(position), position, per_token, per_position) < 0.0501


def test_chunks_of_several_prompts_take_the_latency_together():
    per_token, per_position = 4e-6, 4e-6 / 8192
    budget, took = PrefillBudget(1 << 20, MixedSteps.of(per_token, per_position, 0.05)), 0.0
    for tokens in (100, 3000, 2000):
        assert budget.chunk(0) >= tokens
        budget.spend(tokens, 0)
        took += seconds(tokens, 0, per_token, per_position)
    took += seconds(budget.chunk(16384), 16384, per_token, per_position)
    assert 0.04 < took < 0.0501
    budget.spend(budget.chunk(16384) + 1, 16384)
    assert budget.chunk(0) == 0


def test_without_decoding_requests_a_step_is_filled():
    budget = PrefillBudget(8192, None)
    assert budget.chunk(100_000) == 8192
    budget.spend(192, 0)
    assert budget.chunk(100_000) == 8000


@pytest.mark.parametrize(
    ("per_token", "latency", "tokens"),
    [(5e-6, 0.05, 8192), (1e-4, 0.05, 448), (0.1, 0.05, 128), (1e-30, 1e9, 1 << 30), (1e-4, float("inf"), 1 << 30)],
)
def test_limits_are_rounded_to_three_bits_and_not_tiny(per_token, latency, tokens):
    """Runs that are timed alike chunk prompts alike. A slow GPU still prefills."""
    limit = MixedSteps.of(per_token, 0.0, latency)
    assert limit == MixedSteps(tokens) and limit == MixedSteps.of(0.99 * per_token, 0.0, latency)


def test_a_long_prompt_is_never_starved():
    budget = PrefillBudget(8192, MixedSteps.of(0.1, 1.0, 0.05))
    assert budget.chunk(1 << 20) == 128


@pytest.mark.parametrize(
    ("pages", "context", "lengths"), [(100, 500, [64, 128]), (100, 70, [64, 69]), (2, 500, [31]), (100, 1, [])]
)
def test_timed_prompts_fit_context_and_pool(pages, context, lengths):
    prompts = list(timed_prompts(Capacity(pages, 16, max_batch=8, max_step_tokens=64, context_length=context), 1000))
    assert [len(each.prompt) for each in prompts] == lengths
    for each in prompts:
        assert len(set(each.prompt)) == len(each.prompt) and each.max_length <= min(context, 16 * pages)


def test_prefill_beside_decoding_requests_is_limited() -> None:
    """Requests that decode wait for the prefill of their step; without them, a step is filled."""
    scheduler = Pool().scheduler(max_step_tokens=12, mixed_steps=MixedSteps(4))
    scheduler.add(request(0, length=3, max_tokens=2))
    run_step(scheduler)
    scheduler.add(request(1, length=20))
    step = start(scheduler)
    assert shape(step) == [(0, 3, 1, True), (1, 0, 4, False)]
    finish(scheduler, step)
    assert shape(start(scheduler)) == [(1, 4, 12, False)]


def test_a_chunk_beside_decoding_requests_shrinks_with_its_position() -> None:
    """Attention over the context is part of the delay. Prompts that wait share a step."""
    pool = Pool(page_size=64)
    scheduler = pool.scheduler(max_step_tokens=4096, context_length=4096, mixed_steps=MixedSteps(1024, doubling=512))
    scheduler.add(request(0, length=3, max_tokens=20))
    run_step(scheduler)
    scheduler.add(request(1, length=1700, max_tokens=1))
    chunks = []
    while len((step := start(scheduler)).entries) > 1:
        chunks.append(len(step.entries[1].token_ids))
        finish(scheduler, step)
    assert chunks == [632, 391, 310, 265, 102]
    finish(scheduler, step)
    for number in (2, 3, 4):
        scheduler.add(request(number, length=300, max_tokens=1))
    assert [tokens for _, _, tokens, _ in shape(start(scheduler))] == [1, 300, 300, 206]
