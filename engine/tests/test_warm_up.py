"""Warm-up: it leaves no trace, and the time of its last prefill bounds prefill beside decoding requests."""

from __future__ import annotations

import pytest

from attnplug import PoolError, UsageError
from attnplug_engine import Engine
from attnplug_engine.memory.capacity import Capacity
from attnplug_engine.parallel.collectives import SINGLE
from attnplug_engine.scheduling.warm_up import mixed_step_tokens, warm_up_batches
from attnplug_testing.errors import naming

PROMPTS = [[5, 6, 7], list(range(20)), [9] * 11]


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("tiny:llama", {"max_batch": 4, "chunked_prefill_size": 16}),
        ("tiny:deepseek_v3", {"speculative_algorithm": "mtp", "max_batch": 2}),
        ("tiny:kimi_linear", {"prefix_cache": False, "num_pages": 3, "page_size": 16, "max_batch": 2}),
        ("tiny:deepseek_v32", {"enable_hisparse": True, "page_size": 16, "max_batch": 2}),
    ],
)
@pytest.mark.sample(1)
def test_a_warm_engine_answers_like_a_cold_one(model, settings):
    """E1: rows, pages, states, statistics and prefix cache are those of an engine that ran nothing."""
    cold, warm = (Engine(model, device="cpu", context_length=48, **settings) for _ in range(2))
    free = warm.runner.allocator.free_pages
    warm._warm_up(SINGLE)
    warm.scheduler = warm._scheduler(warm.cache, None)
    assert warm.runner.allocator.free_pages == free
    assert (warm.statistics.prefill_tokens, warm.statistics.decode_tokens) == (0, 0)
    assert warm.statistics.backend_usage.by_backend() == {} and not warm._observed
    if warm.runner.states is not None:
        assert warm.runner.states.free_slots == cold.runner.states.free_slots
    for engine in (cold, warm):
        engine.generate([PROMPTS[1]], max_tokens=1)  # the second time it is a prefix hit
    answers = [[each.token_ids for each in engine.generate(PROMPTS, max_tokens=6)] for engine in (cold, warm)]
    assert answers[0] == answers[1]


def test_warm_up_covers_every_kind_of_step():
    """E1: a full step, a prefix, many requests that decode, greedy and sampled, beside a prefill."""
    batches = list(warm_up_batches(Capacity(100, 16, max_batch=8, max_step_tokens=64, context_length=500)))
    lengths = [[len(request.prompt) for request in batch] for batch in batches]
    assert lengths == [[64], [81], [17] * 8 + [34], [64]]
    assert {request.params.temperature for request in batches[2]} == {0.0, 0.8}
    assert len({request.id for batch in batches for request in batch}) == 12


@pytest.mark.parametrize(("pages", "context"), [(1, 5), (1, 500), (2, 20)])
def test_warm_up_fits_a_small_pool(pages, context):
    for batch in warm_up_batches(Capacity(pages, 16, max_batch=8, max_step_tokens=64, context_length=context)):
        for request in batch:
            assert request.max_length <= min(context, 16 * pages)


@pytest.mark.parametrize(
    ("rate", "latency", "tokens"), [(200_000, 0.05, 8192), (10_000, 0.05, 256), (10, 0.05, 128), (1e30, 1e9, 1 << 30)]
)
def test_prefill_beside_decoding_takes_the_latency_asked_for(rate, latency, tokens):
    assert mixed_step_tokens(rate, latency) == tokens


@pytest.mark.parametrize("latency", [0, -1.0, float("nan"), True, "fast"])
def test_a_latency_is_seconds_above_0(latency):
    with pytest.raises(UsageError, check=naming("inter_token_latency")):
        Engine("tiny:llama", device="cpu", inter_token_latency=latency)


def test_a_step_that_does_not_fit_is_refused_at_start_up(monkeypatch):
    """E1: with the setting to lower, before a request is accepted."""
    import torch

    engine = Engine("tiny:llama", device="cpu", chunked_prefill_size=16)

    def exhausted(step):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(engine.runner, "launch", exhausted)
    with pytest.raises(PoolError, check=naming(16, "chunked_prefill_size")):
        engine._warm_up(SINGLE)
