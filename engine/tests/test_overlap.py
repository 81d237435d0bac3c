"""Overlap: a step is launched while the one before is in flight. Forced on the CPU: the same tokens, and no leaks."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from thread_ranks import in_ranks

from attnplug import UsageError
from attnplug_engine import Engine, Request, SamplingParams
from attnplug_engine.scheduling.step import PENDING
from attnplug_testing.errors import having

pytestmark = pytest.mark.long

SETTINGS = {"device": "cpu", "page_size": 4, "max_batch": 3, "context_length": 64}


def make(model: str = "tiny:llama", **settings: Any) -> Engine:
    return Engine(model, **{**SETTINGS, "overlap": True, **settings})


def check_all_returned(engine: Engine) -> None:
    """No page, row or slot is held, and no step is in flight."""
    assert not engine.scheduler.has_work and not engine.scheduler.in_flight and not engine.scheduler.running
    if engine.cache is not None:
        engine.cache.clear()
    allocator, states, table = engine.runner.allocator, engine.runner.states, engine.runner.table
    assert allocator.free_pages == allocator.num_pages
    assert states is None or states.free_slots == states.num_slots
    for row in [table.admit() for _ in range(table.max_requests)]:
        table.release(row)


def prompts() -> list[list[int]]:
    """The second and third begin alike."""
    drawn = torch.Generator().manual_seed(5)
    found = [torch.randint(0, 128, (length,), generator=drawn).tolist() for length in (1, 30, 37, 17, 22, 9)]
    found[2][:26] = found[1][:26]
    return found


PARAMS = [
    SamplingParams(14),
    SamplingParams(10, temperature=0.9, top_k=40, top_p=0.95, seed=7),
    SamplingParams(1),
    SamplingParams(11, temperature=1.5),
    SamplingParams(9, logprobs=2),
    SamplingParams(12, temperature=0.7),
]


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("tiny:llama", {"num_pages": 13, "chunked_prefill_size": 7}),
        ("tiny:deepseek_v3", {"num_pages": 14, "prefix_cache": False}),
        ("tiny:llama", {"chunked_prefill_size": -1}),
        ("tiny:minimax", {"num_pages": 14, "state_checkpoint": 8, "state_slots": 5}),
        ("tiny:mamba2", {"state_checkpoint": 12, "chunked_prefill_size": 9}),
    ],
    ids=["preempted, in chunks", "MLA, preempted", "whole prompts", "hybrid, preempted", "states alone"],
)
def test_same_tokens_as_without_overlap(model: str, settings: dict[str, Any]) -> None:
    """Greedy and drawn, by the engine's seed and by their own; twice, so that prefixes are found again."""
    found = []
    for overlap in (False, True):
        engine = make(model, overlap=overlap, ignore_eos=True, **settings)
        found.append([engine.generate(prompts(), PARAMS) for _ in range(2)])
        assert "num_pages" not in settings or engine.scheduler.preemptions
        check_all_returned(engine)
    for without, with_overlap in zip(*found, strict=True):
        assert [one.token_ids for one in with_overlap] == [one.token_ids for one in without]
        assert [one.finish_reason for one in with_overlap] == [one.finish_reason for one in without]
        printed = [[one.logprob for one in each[4].logprobs] for each in (with_overlap, without)]
        assert printed[0] == pytest.approx(printed[1], abs=1e-4)


def test_a_step_is_launched_before_the_one_before_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its token is not known yet and is read on the device. No further step is launched after the last token."""
    engine = make(prefix_cache=False)
    events: list[str] = []
    launch, finish = engine.runner.launch, engine.scheduler.finish_step

    def launching(step):
        events.append("launch" + " pending" * (step.entries[0].token_ids == (PENDING,)))
        return launch(step)

    def finishing(step, tokens):
        events.append("finish")
        return finish(step, tokens)

    monkeypatch.setattr(engine.runner, "launch", launching)
    monkeypatch.setattr(engine.scheduler, "finish_step", finishing)
    engine.generate([[1, 2, 3]], max_tokens=3)
    assert events == ["launch", "launch pending", "finish", "launch pending", "finish", "finish"]


def test_a_step_whose_requests_have_all_ended_is_not_waited_for() -> None:
    """A stop token is known one step late. The row that was wasted is no token of the statistics."""
    free = make().generate([[5, 6, 7]], max_tokens=9)[0].token_ids
    engine = make()
    (ended,) = engine.generate([[5, 6, 7]], max_tokens=9, stop_token_ids=frozenset({free[4]}))
    made = free.index(free[4]) + 1
    assert (ended.token_ids, ended.finish_reason) == (free[:made], "stop")
    assert (engine.statistics.prefill_tokens, engine.statistics.decode_tokens) == (3, made - 1)
    check_all_returned(engine)


def test_a_stop_text_ends_a_request_and_no_other() -> None:
    engine = make()
    free = engine.generate(["one", "two"], max_tokens=12)
    stopping = SamplingParams(12, stop=(free[0].text[3:5],), logprobs=0)
    stopped, other = engine.generate(["one", "two"], [stopping, SamplingParams(12)])
    assert (stopped.text, stopped.finish_reason) == (free[0].text[: free[0].text.index(free[0].text[3:5])], "stop")
    assert len(stopped.logprobs) == len(stopped.token_ids) < 12
    assert other.token_ids == free[1].token_ids
    check_all_returned(engine)


@pytest.mark.parametrize(
    ("model", "where"), [("tiny:llama", "launch"), ("tiny:llama", "tokens"), ("tiny:minimax", "tokens")]
)
def test_a_failure_takes_back_all_that_is_in_flight(model: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure at each step in turn. Afterwards, requests continue with the same tokens."""
    engine = make(model, state_checkpoint=8, chunked_prefill_size=16)
    requests, params = prompts()[1:4], [SamplingParams(7), *PARAMS[1:3]]
    expected = [one.token_ids for one in engine.generate(requests, params)]
    added = [engine.add(prompt, one) for prompt, one in zip(requests, params, strict=True)]
    launch = engine.runner.launch

    class Lost:
        def tokens(self) -> list[int]:
            raise RuntimeError("lost")

    def failing(step):
        launched = launch(step)
        if where == "launch":
            raise RuntimeError("lost")
        return Lost() if engine.scheduler.in_flight == 2 else launched

    failures = 0
    while engine.scheduler.has_work:
        with monkeypatch.context() as broken:
            broken.setattr(engine.runner, "launch", failing)
            try:
                for _ in range(2):
                    engine.step()
            except RuntimeError:
                failures += 1
                assert not engine.scheduler.in_flight
        engine.step()
    assert failures > 3 and [request.output for request in added] == expected
    check_all_returned(engine)


def test_statistics_count_no_second_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock ticks when it is read. The seconds of all steps add up to those of all calls."""
    now = iter(range(10**6))
    monkeypatch.setattr("attnplug_engine.serving.step_loop.time.perf_counter", lambda: next(now))
    engine = make(prefix_cache=False)
    engine.add([1, 2, 3], SamplingParams(max_tokens=5))
    calls = 0
    while engine.step() is not None:
        calls += 1
    assert engine.statistics.prefill_seconds + engine.statistics.decode_seconds == calls == 5


def test_ranks_run_one_schedule() -> None:
    def run(parallel):
        engine = make("tiny:llama", parallel=parallel, num_pages=20)
        return [one.token_ids for one in engine.generate(prompts(), PARAMS)]

    (alone,), both = in_ranks(1, run), in_ranks(2, run)
    assert both == [alone, alone]


def test_overlap_is_for_gpus_unless_it_is_asked_for() -> None:
    for overlap, left in ((None, 0), (False, 0), (True, 1)):
        engine = make(overlap=overlap)
        engine.add([1, 2, 3], SamplingParams(max_tokens=5))
        engine.step()
        assert engine.scheduler.in_flight == left
    with pytest.raises(UsageError, check=having("yes", settings=("overlap",))):
        make(overlap="yes")


@pytest.fixture(scope="module", params=["tiny:llama", "tiny:minimax"])
def walked(request: pytest.FixtureRequest) -> tuple[Engine, Callable[[int], list[int]]]:
    """An engine with too few pages, and what each prompt gives without overlap and alone."""
    settings = {"num_pages": 18, "chunked_prefill_size": 12, "state_checkpoint": 8}
    without, known = make(request.param, overlap=False, **settings), dict[int, list[int]]()

    def expected(number: int) -> list[int]:
        if number not in known:
            known[number] = without.generate([prompts()[number]], WALK_PARAMS[number])[0].token_ids
        return known[number]

    return make(request.param, **settings), expected


WALK_PARAMS = [
    SamplingParams(20, stop_token_ids=frozenset(range(0, 128, 9))),
    SamplingParams(14, temperature=0.9, top_k=40, seed=7),
    SamplingParams(1),
    SamplingParams(17, temperature=1.5, seed=8, stop=("a", "x")),
    SamplingParams(9),
    SamplingParams(12, temperature=0.7, seed=9, stop_token_ids=frozenset(range(0, 128, 5))),
]


@pytest.mark.parametrize("seed", range(2))
def test_a_random_walk_of_arrivals_aborts_and_failures_changes_no_tokens(walked, seed, monkeypatch) -> None:
    engine, expected = walked
    chance = random.Random(seed)
    added: list[tuple[int, Request]] = []
    launch = engine.runner.launch

    def launching(step):
        launched = launch(step)
        if chance.random() < 0.05:
            raise RuntimeError("lost")
        if chance.random() < 0.1:  # in the middle of a step, as by an iterator that is collected
            engine.abort(chance.choice(added)[1])
        return launched

    monkeypatch.setattr(engine.runner, "launch", launching)
    while len(added) < 12 or engine.scheduler.has_work:
        what = chance.random()
        if what < 0.3 and len(added) < 12:
            number = chance.randrange(len(WALK_PARAMS))
            added.append((number, engine.add(prompts()[number], WALK_PARAMS[number])))
        elif what < 0.35 and added:
            engine.abort(chance.choice(added)[1])
        else:
            try:
                engine.step()
            except RuntimeError:
                assert not engine.scheduler.in_flight
    for number, request in added:
        tokens = expected(number)
        assert request.output == (tokens[: len(request.output)] if request.finish_reason == "aborted" else tokens)
    check_all_returned(engine)


def test_ranks_with_more_memory_than_others_run_the_same_schedule() -> None:
    """By default a pool is as large as the free memory of a rank allows; the rank with the least memory decides."""
    prompts = [[start, *range(18)] for start in range(4)]
    expected = [one.token_ids for one in make(ignore_eos=True).generate(prompts, max_tokens=12)]

    def run(parallel):
        engine = make(parallel=parallel, num_pages=13 + 2 * parallel.rank, ignore_eos=True, prefix_cache=False)
        found = [one.token_ids for one in engine.generate(prompts, max_tokens=12)]
        return found, engine.scheduler.preemptions, engine.runner.allocator.free_pages

    first, second = in_ranks(2, run)
    assert first == second and first[0] == expected and first[1] and first[2] == 13


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("where", ["admit", "extend", "release"])
def test_an_interrupt_in_the_middle_of_a_schedule_leaves_it_whole(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt comes between two changes. It is raised when the step is over."""
    engine = make(chunked_prefill_size=16)
    expected = [one.token_ids for one in engine.generate(prompts()[1:4], max_tokens=7)]
    table = engine.runner.table
    original = getattr(table, where)

    def interrupted(*given: Any) -> Any:
        monkeypatch.setattr(table, where, original)
        made = original(*given)
        signal.raise_signal(signal.SIGINT)
        return made

    monkeypatch.setattr(table, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts()[1:4], max_tokens=7)
    check_all_returned(engine)
    assert [one.token_ids for one in engine.generate(prompts()[1:4], max_tokens=7)] == expected
