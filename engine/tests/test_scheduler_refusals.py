"""Refusals of the scheduler: requests that never fit, limits, misuse of steps, and sampling parameters."""

from __future__ import annotations

import pytest
from small_scheduler import Pool, finish, request, run_step, start

from attnplug import PoolError, UsageError
from attnplug_engine.request import SamplingParams
from attnplug_engine.scheduling.prefix_cache import PrefixCache
from attnplug_engine.scheduling.scheduler import StepError
from attnplug_engine.text.errors import PromptError
from attnplug_testing.errors import having, naming


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(PromptError, check=naming("empty")):
        Pool().scheduler().add(request(3, length=0))


def test_a_prompt_longer_than_the_context_is_refused_with_both_lengths() -> None:
    scheduler = Pool().scheduler(context_length=8)
    with pytest.raises(PromptError, check=naming("8 tokens", 8, 7)):
        scheduler.add(request(0, length=8))
    scheduler.add(request(0, length=7))


def test_a_row_of_the_table_limits_the_context_too() -> None:
    with pytest.raises(PromptError, check=naming(10, 8)):
        Pool(page_size=4, max_pages=2).scheduler(context_length=64).add(request(0, length=10))


def test_a_request_that_never_fits_is_refused_with_the_pages_it_needs() -> None:
    scheduler = Pool(pages=3).scheduler()
    with pytest.raises(PoolError, check=having(4, 5, 9, 3, settings=("max_tokens", "num_pages"))):
        scheduler.add(request(0, length=5, max_tokens=9))
    assert not scheduler.has_work
    scheduler.add(request(0, length=5, max_tokens=8))  # its last token is never computed


def test_pages_that_were_held_before_are_not_counted_on() -> None:
    pool = Pool(pages=3)
    pool.allocator.allocate(1)
    with pytest.raises(PoolError, check=having(3, 2, settings=("max_tokens", "num_pages"))):
        pool.scheduler().add(request(0, length=5, max_tokens=8))


def test_pages_held_outside_are_an_error_and_not_an_endless_wait() -> None:
    pool = Pool(pages=2)
    scheduler = pool.scheduler()
    scheduler.add(request(0, length=4, max_tokens=4))
    taken = pool.allocator.allocate(2)
    with pytest.raises(PoolError, check=naming("request 0", 0, 1, 2)):
        scheduler.next_step()
    pool.allocator.release(taken[:1])
    run_step(scheduler)
    with pytest.raises(PoolError, check=naming("request 0", 1, 2)):
        scheduler.next_step()
    pool.allocator.release(taken[1:])
    while scheduler.has_work:
        run_step(scheduler)


def test_an_id_is_used_once() -> None:
    scheduler = Pool().scheduler()
    added = request(0)
    scheduler.add(added)
    with pytest.raises(UsageError, check=naming("request 0")):
        scheduler.add(request(0))
    scheduler.abort(0)
    with pytest.raises(UsageError, check=naming("request 0")):
        scheduler.add(added)


def test_at_most_two_steps_are_in_flight_and_they_are_finished_in_order() -> None:
    scheduler = Pool().scheduler()
    scheduler.add(request(0))
    first, second = start(scheduler), start(scheduler)
    assert scheduler.in_flight == 2
    with pytest.raises(StepError, check=naming(2)):
        scheduler.next_step()
    with pytest.raises(StepError):
        finish(scheduler, second)
    finish(scheduler, first)
    with pytest.raises(StepError):
        finish(scheduler, first)
    finish(scheduler, second)
    assert scheduler.in_flight == 0


def test_a_step_is_finished_with_exactly_the_tokens_it_samples() -> None:
    scheduler = Pool().scheduler()
    scheduler.add(request(0))
    scheduler.add(request(1, length=20))
    step = start(scheduler)
    with pytest.raises(StepError, check=naming(1, 2)):
        scheduler.finish_step(step, [1, 1])
    assert finish(scheduler, step) == ()


@pytest.mark.parametrize("name", ["max_batch", "max_step_tokens", "context_length"])
def test_a_limit_of_0_is_refused(name: str) -> None:
    with pytest.raises(UsageError, check=naming(f"{name}=0")):
        Pool().scheduler(**{name: 0})


def test_whole_prompts_need_room_for_the_longest_beside_all_that_decode() -> None:
    with pytest.raises(UsageError, check=naming("max_step_tokens=17", 18)):
        Pool().scheduler(max_batch=3, max_step_tokens=17, context_length=16, whole_prompts=True)


def test_limits_must_fit_the_table_and_the_cache() -> None:
    with pytest.raises(UsageError, check=naming("max_batch=9", 8)):
        Pool().scheduler(max_batch=9)
    pool = Pool()
    pool.cache = PrefixCache(pool.allocator, 8)
    with pytest.raises(UsageError, check=naming(8, 4)):
        pool.scheduler(cached=True)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("max_tokens", 0, 1),
        ("max_tokens", True, 1),
        ("max_tokens", "5", 1),
        ("temperature", -0.5, 0),
        ("temperature", float("nan"), 0),
        ("temperature", None, 0),
        ("top_k", -1, 0),
        ("top_p", 0.0, 1),
        ("top_p", 1.5, 1),
        ("seed", -1, 2**63 - 1),
        ("seed", 2**63, 2**63 - 1),
        ("stop_token_ids", [1], "frozenset"),
        ("stop_token_ids", frozenset({-1}), 0),
    ],
)
def test_a_wrong_sampling_parameter_is_refused_with_what_is_allowed(name: str, value: object, allowed: object) -> None:
    shown = -1 if isinstance(value, frozenset) else repr(value)
    with pytest.raises(UsageError, check=having(f"{name} {shown}", allowed, settings=(name,))):
        SamplingParams(**{"max_tokens": 4, name: value})
