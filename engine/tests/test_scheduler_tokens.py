"""Every request gets the same tokens as when it is served alone.

The model of ``exact_serving`` is exact. A wrong page, a page written while others hold it, a missing copy, a wrong
prefix hit or a token computed twice changes the tokens. So does a state of another request, a state that is written
while the cache keeps it, or a state that went through a token twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from exact_serving import STOP, VOCAB, Serving, alone
from hypothesis import event, given, settings
from hypothesis import strategies as st

from attnplug import UsageError
from attnplug_engine.request import (
    FinishReason,
    Request,
    SamplingParams,
)
from attnplug_testing.errors import having


@dataclass(frozen=True)
class Arrival:
    request: Request
    step: int
    abort_at: int | None
    in_flight: bool
    bad_at: int | None


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    shared = draw(st.lists(st.integers(0, VOCAB - 1), min_size=30, max_size=30))
    found = []
    for number in range(draw(st.integers(1, 8))):
        own = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6))
        prompt = (*shared[: draw(st.integers(0, 8) | st.integers(0, 30))], *own)
        stops = draw(st.sampled_from([frozenset[int](), frozenset({STOP})]))
        params = SamplingParams(draw(st.integers(1, 6) | st.integers(10, 24)), stop_token_ids=stops)
        abort_at = draw(st.none() | st.none() | st.integers(0, 30))
        when = draw(st.just(0) | st.integers(0, 20))
        bad_at = draw(st.none() | st.none() | st.integers(0, 8))
        found.append(Arrival(Request(number, prompt, params), when, abort_at, draw(st.booleans()), bad_at))
    # Ids in the order of arrival, so that a queue in this order is a sorted one.
    found.sort(key=lambda arrival: arrival.step)
    for number, arrival in enumerate(found):
        arrival.request.id = number
    return found


@settings(max_examples=12, deadline=None)
@given(
    arrivals=arrivals(),
    page_size=st.integers(1, 8),
    chunk=st.none() | st.integers(1, 16),
    max_batch=st.sampled_from([6, 4, 3, 2, 1]),
    lookahead=st.integers(0, 4),
    context=st.integers(37, 60),
    cached=st.booleans(),
    snapshots=st.none() | st.integers(0, 6),
    checkpoint=st.integers(1, 20),
    failing=st.sets(st.integers(0, 30), max_size=3),
    depths=st.sampled_from([(1,), (2,), (1, 2), (2, 2, 1)]),
)
def test_every_request_gets_the_tokens_it_gets_alone(
    arrivals: list[Arrival],
    page_size: int,
    chunk: int | None,
    max_batch: int,
    lookahead: int,
    context: int,
    cached: bool,
    snapshots: int | None,
    checkpoint: int,
    failing: set[int],
    depths: tuple[int, ...],
) -> None:
    """A7's ground: state slots are counted, and never shared for writing."""
    longest = max(min(arrival.request.max_length, context) for arrival in arrivals)
    serving = Serving(
        pages=-(-(longest - 1) // page_size) + lookahead,
        page_size=page_size,
        max_batch=max_batch,
        chunk=chunk,
        context=context,
        cached=cached,
        slots=0 if snapshots is None else max_batch + 1 + snapshots,
        checkpoint=checkpoint,
        bad_at={arrival.request.id: arrival.bad_at for arrival in arrivals},
    )
    now, to_come = 0, list(arrivals)
    while to_come or serving.scheduler.has_work:
        while to_come and to_come[0].step <= now:
            serving.scheduler.add(to_come.pop(0).request)
        due = [arrival for arrival in arrivals if arrival.abort_at == now and arrival not in to_come]
        for arrival in due:
            if not arrival.in_flight:
                serving.scheduler.abort(arrival.request.id)
        if now in failing:
            serving.fail()
        serving.depth = depths[now % len(depths)]
        serving.step(abort_in_flight=tuple(arrival.request.id for arrival in due if arrival.in_flight))
        now += 1
        # The oldest request moves in every step, so each costs at most its own length, and one that it does not need.
        most = sum(arrival.request.max_length + 1 for arrival in arrivals)
        assert serving.steps <= (1 + len(failing)) * most
    for arrival in arrivals:
        request = arrival.request
        output, reason = alone(request, context)
        assert request.row is None
        if request.finish_reason is FinishReason.ABORTED:
            assert arrival.abort_at is not None
            assert request.output == output[: len(request.output)]
        elif arrival.bad_at is not None and arrival.bad_at < len(output):
            assert (request.output, request.finish_reason) == (output[: arrival.bad_at], FinishReason.ERROR)
        else:
            assert (request.output, request.finish_reason) == (output, reason)
    statistics = serving.cache.statistics if serving.cache is not None else None
    event(f"preempted: {serving.scheduler.preemptions > 0}")  # shown by --hypothesis-show-statistics
    event(f"prefix hit: {statistics is not None and statistics.hits > 0}")
    event(f"evicted: {statistics is not None and statistics.evicted_pages > 0}")
    serving.check_all_returned()


def run_all(serving: Serving, requests: list[Request]) -> None:
    for request in requests:
        serving.scheduler.add(request)
    while serving.step():
        pass
    for request in requests:
        assert request.output == alone(request, 64)[0]


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((position * position + salt * (position + 3)) % VOCAB for position in range(length))


def test_preempted_requests_lose_nothing_and_keep_their_place() -> None:
    for cached in (False, True):
        serving = Serving(pages=8, page_size=4, cached=cached)
        requests = [Request(number, prompt(6, number), SamplingParams(20)) for number in range(4)]
        run_all(serving, requests)
        assert serving.scheduler.preemptions > 0
        assert requests[0].preemptions == 0
        serving.check_all_returned()


def test_a_prefix_in_the_cache_is_not_computed_again() -> None:
    serving = Serving(pages=32, page_size=4)
    first, second = (Request(number, (*prompt(14), number), SamplingParams(3)) for number in range(2))
    run_all(serving, [first])
    serving.scheduler.add(second)
    step = serving.step()
    assert step is not None
    assert (step.entries[0].position, len(step.entries[0].token_ids)) == (12, 3)
    assert (first.cached_tokens, second.cached_tokens) == (0, 12)
    while serving.step():
        pass
    assert second.output == alone(second, 64)[0]


class TestLinearStates:
    def test_a_hit_goes_as_far_as_a_snapshot(self) -> None:
        """A7: at a checkpoint all before it is found; between checkpoints the tail is computed again."""
        serving = Serving(pages=64, page_size=2, context=64, slots=12, checkpoint=8, chunk=64)
        run_all(serving, [Request(0, prompt(21), SamplingParams(3))])
        for number, (length, found) in enumerate(
            ((21, 20), (20, 20), (19, 16), (17, 16), (15, 8), (9, 8), (7, 0)), start=1
        ):
            request = Request(number, (*prompt(length), 5), SamplingParams(2))
            run_all(serving, [request])
            assert request.cached_tokens == found, length
        serving.check_all_returned()

    def test_a_repeated_prompt_of_whole_pages_computes_its_last_page_alone(self) -> None:
        """Logits come from computing a token. Checkpoints are rounded up to whole pages, here from 7 to 8."""
        serving = Serving(pages=64, page_size=2, context=64, slots=12, checkpoint=7, chunk=64)
        for number, (length, found) in enumerate(((20, 0), (20, 18), (17, 16), (8, 0))):  # the last has one at its end
            request = Request(number, prompt(length), SamplingParams(1))
            run_all(serving, [request])
            assert request.cached_tokens == found, length
        serving.check_all_returned()

    def test_prefills_stop_at_checkpoints(self) -> None:
        serving = Serving(pages=64, page_size=4, slots=12, checkpoint=8, chunk=64)
        serving.scheduler.add(Request(0, prompt(21), SamplingParams(1)))
        lengths = []
        while (step := serving.step()) is not None:
            lengths.append(step.num_tokens)
        assert lengths == [8, 8, 4, 1]

    def test_without_a_cache_nothing_is_cut(self) -> None:
        serving = Serving(pages=64, page_size=4, slots=12, checkpoint=8, chunk=64, cached=False)
        serving.scheduler.add(Request(0, prompt(21), SamplingParams(1)))
        assert serving.step().num_tokens == 21

    def test_too_few_slots_say_how_many_are_needed(self) -> None:
        with pytest.raises(UsageError, check=having(4, 5, settings=("state_slots", "max_batch"))):
            Serving(pages=8, page_size=4, max_batch=4, slots=4)
        Serving(pages=8, page_size=4, max_batch=4, slots=4, cached=False)  # where nothing is kept, these are enough

    def test_short_prompts_run_together(self) -> None:
        """A stop past the last page would admit one request a step."""
        serving = Serving(pages=64, page_size=4, slots=12, checkpoint=32, chunk=64)
        for number in range(4):
            serving.scheduler.add(Request(number, prompt(13, number), SamplingParams(1)))
        assert serving.step().num_tokens == 4 * 13

    def test_a_state_that_is_not_finite_is_not_kept(self) -> None:
        """The request ends at a checkpoint, and others begin with the same tokens."""
        serving = Serving(pages=64, page_size=4, slots=12, checkpoint=8, chunk=64, bad_at={0: 0})
        bad, good = Request(0, prompt(8), SamplingParams(3)), Request(1, (*prompt(8), 5), SamplingParams(3))
        serving.scheduler.add(bad)
        serving.step()
        assert bad.finish_reason is FinishReason.ERROR
        run_all(serving, [good])
        assert good.cached_tokens == 0
        serving.check_all_returned()

    @pytest.mark.parametrize("ended", ["abort", "drop"])
    def test_a_snapshot_in_flight_is_lost_with_its_request(self, ended: str) -> None:
        serving = Serving(pages=64, page_size=4, slots=12, checkpoint=8, chunk=64, depth=2)
        serving.scheduler.add(Request(0, prompt(20), SamplingParams(3)))
        assert serving.launch() and serving.launch()
        assert [len(step.snapshots) for step, _ in serving.launched] == [1, 1]
        if ended == "drop":
            serving.fail()
        serving.scheduler.abort(0)
        while serving.launched:
            serving.step()
        assert serving.states is not None and serving.states.free_slots == 12
        serving.check_all_returned()

    def test_a_request_that_needs_the_slot_of_a_snapshot_in_flight_comes_in_when_that_is_finished(self) -> None:
        """Three slots: the first request's, one for the snapshot to be copied, and one of an older snapshot."""
        serving = Serving(pages=64, page_size=4, max_batch=2, slots=3, checkpoint=8, chunk=64, depth=2)
        run_all(serving, [Request(0, prompt(9), SamplingParams(1))])
        serving.scheduler.add(Request(1, prompt(9, 1), SamplingParams(6)))
        serving.launch()
        late = Request(2, (*prompt(8), 5), SamplingParams(2))
        serving.scheduler.add(late)
        serving.launch()
        assert late.row is None
        serving.step()
        serving.launch()
        assert (late.cached_tokens, late.row is None) == (8, False)
        while serving.step():
            pass
        assert late.output == alone(late, 64)[0]
        serving.check_all_returned()

    def test_the_least_recently_used_snapshot_makes_room(self) -> None:
        serving = Serving(pages=64, page_size=2, max_batch=1, slots=3, checkpoint=8, chunk=64)
        for number in range(4):
            run_all(serving, [Request(number, prompt(9, number), SamplingParams(1))])
        again, gone = Request(8, prompt(9, 3), SamplingParams(1)), Request(9, prompt(9, 0), SamplingParams(1))
        run_all(serving, [again])
        run_all(serving, [gone])
        assert (again.cached_tokens, gone.cached_tokens) == (8, 0)
        serving.check_all_returned()

    def test_a_hit_is_a_use_of_its_snapshot(self) -> None:
        """There is room for two: the third takes the place of the one that was not found again."""
        serving = Serving(pages=64, page_size=2, max_batch=1, slots=3, checkpoint=8, chunk=64)
        found = []
        for number, which in enumerate((0, 1, 0, 2, 0, 1)):
            request = Request(number, prompt(9, which), SamplingParams(1))
            run_all(serving, [request])
            found.append(request.cached_tokens)
        assert found == [0, 0, 8, 0, 8, 0]


def test_a_prompt_is_shared_as_soon_as_it_is_computed() -> None:
    serving = Serving(pages=32, page_size=4)
    first, second = (Request(number, prompt(14), SamplingParams(10)) for number in range(2))
    serving.scheduler.add(first)
    serving.step()
    run_all(serving, [second])
    assert second.cached_tokens == 12
    serving.check_all_returned()


def test_a_page_that_another_holder_refers_to_is_copied_before_it_is_written() -> None:
    serving = Serving(pages=8, page_size=4)
    request = Request(0, prompt(6), SamplingParams(6))
    serving.scheduler.add(request)
    serving.step()
    shared = serving.table.pages(request.row or 0)[-1]
    serving.allocator.share((shared,))  # as a fork of the row would
    step = serving.step()
    assert step is not None
    assert [copy.source for copy in step.copies] == [shared]
    serving.allocator.release((shared,))
    while serving.step():
        pass
    assert request.output == alone(request, 64)[0]
    serving.check_all_returned()


def test_duplicate_prompts_that_run_side_by_side_never_hold_back_a_page() -> None:
    # Both compute the same pages at once; only one of each can be cached, and the other must come back.
    serving = Serving(pages=7, page_size=2, max_batch=2, chunk=16)
    run_all(serving, [Request(number, prompt(6), SamplingParams(6)) for number in range(2)])
    serving.check_all_returned()


def test_a_dropped_step_is_made_again_with_the_same_tokens() -> None:
    serving = Serving(pages=16, page_size=2, chunk=5)
    requests = [Request(number, prompt(7, number), SamplingParams(6)) for number in range(3)]
    for request in requests:
        serving.scheduler.add(request)
    number = 0
    while serving.scheduler.has_work:
        number += 1
        if number % 2:
            assert serving.scheduler.next_step() is not None
            serving.scheduler.drop_steps()
        serving.step()
    assert [request.output for request in requests] == [alone(request, 64)[0] for request in requests]
    serving.check_all_returned()
