"""One engine with several users at a time: alternating iterators, and threads. Each gets all of its tokens."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from attnplug import UsageError
from attnplug_engine import Engine, Request, SamplingParams, Update
from attnplug_testing.errors import naming

PROMPTS = ["one", "another prompt", "x", "a third of them", "more"]
PARAMS = [SamplingParams(max_tokens=tokens) for tokens in (20, 7, 13, 1, 9)]


@pytest.fixture(scope="module", params=[False, True], ids=["step by step", "overlap"])
def engine(request: pytest.FixtureRequest) -> Engine:
    settings = {"device": "cpu", "page_size": 4, "num_pages": 64, "max_batch": 3, "overlap": request.param}
    return Engine("tiny:llama", attention_backend="torch_native", **settings)


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[list[int]]:
    """Tokens of each prompt on an engine without other users."""
    return [engine.generate([prompt], params)[0].token_ids for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(engine: Engine) -> Iterator[None]:
    yield
    assert not engine.scheduler.has_work
    engine.cache.clear()
    assert engine.runner.allocator.free_pages == 64


def add(engine: Engine, numbers: Sequence[int]) -> list[Request]:
    return [engine.add(PROMPTS[number], PARAMS[number]) for number in numbers]


def stream(engine: Engine, numbers: Sequence[int]) -> Iterator[Update]:
    return engine.stream([PROMPTS[number] for number in numbers], [PARAMS[number] for number in numbers])


def tokens(updates: Sequence[Update]) -> list[list[int]]:
    """Tokens of each prompt. Each must have ended exactly once, after its last token."""
    found: dict[int, list[int]] = {}
    ended = set()
    for update in updates:
        assert update.index not in ended
        if update.token is None:
            ended.add(update.index)
        else:
            found.setdefault(update.index, []).append(update.token)
    assert ended == found.keys()
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize("turns", ["ab", "aab", "abbbbb", "b" * 20 + "a", "abc", "cccba", "acab"])
@pytest.mark.sample(6)
def test_alternating_iterators_lose_nothing(engine, alone, turns):
    numbers = {"a": [0, 1], "b": [2], "c": [3, 4, 0]}
    streams = {name: stream(engine, numbers[name]) for name in numbers if name in turns}
    got: dict[str, list[Update]] = {name: [] for name in streams}
    place = 0
    while streams:
        name = turns[place % len(turns)]
        place += 1
        if name in streams:
            update = next(streams[name], None)
            if update is None:
                del streams[name]
            else:
                got[name].append(update)
    for name, updates in got.items():
        assert tokens(updates) == [alone[number] for number in numbers[name]]


def test_generating_inside_the_loop_over_a_stream(engine, alone):
    updates = []
    for place, update in enumerate(stream(engine, [0, 2])):
        updates.append(update)
        if place in (0, 5):
            (inner,) = engine.generate([PROMPTS[1]], PARAMS[1])
            assert inner.token_ids == alone[1]
    assert tokens(updates) == [alone[0], alone[2]]


def test_a_request_may_be_followed_late(engine, alone):
    requests = add(engine, [0, 1])
    for _ in range(10):  # the second is finished by now
        engine.step()
    assert requests[1].finish_reason is not None and len(requests[0].output) > 3
    assert tokens(list(engine.follow(requests))) == [alone[0], alone[1]]
    assert tokens(list(engine.follow(requests))) == [alone[0], alone[1]]


def test_a_request_may_be_followed_twice(engine, alone):
    requests = add(engine, [0])
    first, second = engine.follow(requests), engine.follow([*requests, *requests])
    some = [next(first) for _ in range(4)]
    assert tokens(list(second)) == [alone[0], alone[0]]
    assert tokens(some + list(first)) == [alone[0]]


def test_the_follower_of_an_aborted_request_sees_its_end(engine, alone):
    requests = add(engine, [0, 2])
    following = engine.follow(requests)
    some = [next(following) for _ in range(3)]
    engine.abort(requests[0])
    first, second = tokens(some + list(following))
    assert requests[0].finish_reason == "aborted"
    assert (first, second) == (alone[0][: len(first)], alone[2])


def test_an_iterator_that_is_left_aborts_its_own_requests_alone(engine, alone):
    mine, shared, others = add(engine, [0, 2, 4])
    kept = engine.follow([shared, others])
    updates = [next(kept)]
    left = engine.follow([mine, shared])
    next(left)
    left.close()
    assert mine.finish_reason == "aborted" and shared.finish_reason is None
    assert tokens(updates + list(kept)) == [alone[2], alone[4]]


def test_a_request_of_another_engine_is_refused(engine, alone):
    (own,) = add(engine, [2])
    with pytest.raises(UsageError, check=naming(f"request {own.id}")):
        next(engine.follow([own, Request(own.id, (1, 2), PARAMS[0])]))
    assert tokens(list(engine.follow([own]))) == [alone[2]]


def test_aborting_a_request_that_is_not_there_ends_nobody(engine, alone):
    """Neither a finished request, whose end is reported once, nor another engine's request with the same id ends
    anything."""
    own, finished = add(engine, [2, 3])
    following = engine.follow([finished])
    some = [next(following)]
    engine.abort(finished)
    engine.abort(Request(own.id, (1, 2), PARAMS[0]))
    assert tokens(some + list(following)) == [alone[3]]
    assert tokens(list(engine.follow([own]))) == [alone[2]]


def test_a_step_that_fails_is_dropped_and_may_be_tried_again(engine, alone, monkeypatch):
    requests = add(engine, [0, 2])
    for _ in range(3):
        engine.step()
    with monkeypatch.context() as broken:
        broken.setattr(engine.runner, "launch", lambda step: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert tokens(list(engine.follow(requests))) == [alone[0], alone[2]]


def test_threads_may_share_an_engine(engine, alone):
    results: dict[int, list[list[int]]] = {}

    def work(number: int) -> None:
        results[number] = [
            completion.token_ids for _ in range(3) for completion in engine.generate(PROMPTS[number:], PARAMS[number:])
        ]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: alone[number:] * 3 for number in range(4)}


@pytest.mark.parametrize("step_too", [False, True])
@pytest.mark.sample(1)
def test_other_threads_neither_add_nor_step_in_the_middle_of_a_step(engine, alone, monkeypatch, step_too):
    """Other threads wait until the step is done."""
    added: list[Request] = []
    other = threading.Thread(target=lambda: engine.step() if step_too else added.extend(add(engine, [2])))
    waited: list[bool] = []
    original = engine.runner.launch

    def launch(step):
        if not waited:
            other.start()
            other.join(timeout=0.2)
            waited.append(other.is_alive())
        return original(step)

    monkeypatch.setattr(engine.runner, "launch", launch)
    assert tokens(list(engine.follow(add(engine, [0])))) == [alone[0]]
    other.join()
    assert waited == [True]
    assert tokens(list(engine.follow(added))) == ([] if step_too else [alone[2]])
