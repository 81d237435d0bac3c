"""Warm-up: it leaves no trace, covers every kind of step, and fits the pool."""

from __future__ import annotations

import pytest
import torch

from attnplug import PoolError, UsageError
from attnplug_engine import Engine
from attnplug_engine.memory.capacity import Capacity
from attnplug_engine.parallel.collectives import SINGLE
from attnplug_engine.scheduling.warm_up import warm_up_batches
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
    assert lengths == [[145], [17] * 8 + [34]]
    assert {request.params.temperature for request in batches[1]} == {0.0, 0.8}
    assert len({request.id for batch in batches for request in batch}) == 10


@pytest.mark.parametrize(("pages", "context"), [(1, 5), (1, 500), (2, 20)])
def test_warm_up_fits_a_small_pool(pages, context):
    for batch in warm_up_batches(Capacity(pages, 16, max_batch=8, max_step_tokens=64, context_length=context)):
        for request in batch:
            assert request.max_length <= min(context, 16 * pages)


def test_warm_up_counts_only_the_pages_that_all_ranks_have():
    """Under tensor parallelism, a rank with more memory has surplus pages, which are allocated before the warm-up."""
    engine = Engine("tiny:llama", device="cpu", num_pages=40, page_size=4, max_batch=2)
    engine.runner.allocator.allocate(30)
    limit = engine._warm_up(SINGLE)
    assert limit is not None and engine.runner.allocator.free_pages == 10


def test_ranks_agree_on_the_limit_of_the_slowest():
    class Ranks:
        size = 2

        def all_gather(self, seconds, dim):
            return torch.cat((seconds, torch.tensor([[0.05 / 1000, 0.0]], dtype=torch.float64)), dim)

    engine = Engine("tiny:llama", device="cpu", inter_token_latency=0.05, chunked_prefill_size=64)
    limit = engine._warm_up(Ranks())
    assert limit is not None and limit.tokens <= 896


def test_prompts_that_are_not_chunked_are_not_timed():
    assert Engine("tiny:llama", device="cpu", chunked_prefill_size=-1)._warm_up(SINGLE) is None


@pytest.mark.parametrize("latency", [0, -1.0, float("nan"), True, "fast"])
def test_a_latency_is_seconds_above_0(latency):
    with pytest.raises(UsageError, check=naming("inter_token_latency")):
        Engine("tiny:llama", device="cpu", inter_token_latency=latency)


def test_a_step_that_does_not_fit_is_refused_at_start_up(monkeypatch):
    """E1: with the setting to lower, before a request is accepted."""
    engine = Engine("tiny:llama", device="cpu", chunked_prefill_size=16)

    def exhausted(step):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(engine.runner, "launch", exhausted)
    with pytest.raises(PoolError, check=naming(16, "chunked_prefill_size")):
        engine._warm_up(SINGLE)
