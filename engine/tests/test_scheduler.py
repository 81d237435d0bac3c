"""Decisions of the scheduler, step by step; test_scheduler_tokens.py shows that tokens never depend on them."""

from __future__ import annotations

import pytest
from small_scheduler import Pool, finish, request, run_step, shape, start

from attnplug import ForwardMode
from attnplug_engine.request import FinishReason, Request, RequestState, SamplingParams


def test_without_work_there_is_no_step() -> None:
    scheduler = Pool().scheduler()
    assert not scheduler.has_work
    assert scheduler.next_step() is None


def test_a_prompt_runs_in_chunks_and_only_its_last_token_is_sampled() -> None:
    scheduler = Pool().scheduler(max_step_tokens=3)
    scheduler.add(request(0, length=7))
    steps = []
    for _ in range(4):
        steps.append(start(scheduler))
        finish(scheduler, steps[-1])
    assert [shape(step) for step in steps] == [
        [(0, 0, 3, False)],
        [(0, 3, 3, False)],
        [(0, 6, 1, True)],
        [(0, 7, 1, True)],
    ]
    assert [step.mode for step in steps] == [ForwardMode.EXTEND] * 3 + [ForwardMode.DECODE]
    assert [step.entries[0].token_ids for step in steps] == [(0, 1, 2), (3, 4, 5), (6,), (7,)]


def test_a_step_mixes_decoding_requests_with_what_prefill_the_chunk_leaves_room_for() -> None:
    scheduler = Pool().scheduler(max_step_tokens=8)
    scheduler.add(request(0))
    scheduler.add(request(1, length=2))
    run_step(scheduler)
    scheduler.add(request(2, length=20))
    step = start(scheduler)
    assert step.mode is ForwardMode.MIXED
    assert shape(step) == [(0, 5, 1, True), (1, 2, 1, True), (2, 0, 6, False)]
    assert step.num_tokens == 8
    assert [found.id for found in step.sampled_requests] == [0, 1]
    assert step.sampled_rows == [0, 1]
    assert step.rows == tuple(entry.request.row for entry in step.entries)


def test_requests_with_one_new_token_come_first_in_a_mixed_step() -> None:
    """Attention can run them separately from long chunks only if their rows are contiguous."""
    scheduler = Pool().scheduler(max_step_tokens=12)
    scheduler.add(request(0))
    run_step(scheduler)
    for number, length in ((1, 4), (2, 1), (3, 5), (4, 9)):
        scheduler.add(request(number, length=length))
    step = start(scheduler)
    assert shape(step) == [(0, 5, 1, True), (2, 0, 1, True), (4, 0, 1, False), (1, 0, 4, True), (3, 0, 5, True)]
    assert step.rows == tuple(entry.request.row for entry in step.entries)
    assert [found.id for found in step.sampled_requests] == [0, 2, 1, 3] and step.sampled_rows == [0, 1, 6, 11]
    finish(scheduler, step)
    assert shape(start(scheduler))[-1] == (4, 1, 8, True)


def test_a_prefill_gets_one_token_when_decoding_requests_fill_the_chunk() -> None:
    scheduler = Pool().scheduler(max_step_tokens=2)
    for number in range(3):
        scheduler.add(request(number, length=1))
    run_step(scheduler)
    assert shape(start(scheduler)) == [(0, 1, 1, True), (1, 1, 1, True), (2, 0, 1, True)]


def test_a_decoding_request_runs_in_every_step_of_a_long_prefill() -> None:
    scheduler = Pool().scheduler(max_step_tokens=4)
    first = request(0, max_tokens=8)
    scheduler.add(first)
    run_step(scheduler)
    run_step(scheduler)
    scheduler.add(request(1, length=40))
    for made in range(2, 6):
        step = start(scheduler)
        assert (step.entries[0].request, step.num_tokens) == (first, 4)
        finish(scheduler, step)
        assert len(first.output) == made


def test_whole_prompts_are_never_cut_beside_decoding_requests_nor_beside_each_other() -> None:
    """A6: backends rely on prompts that are never chunked."""
    scheduler = Pool().scheduler(max_batch=3, max_step_tokens=18, context_length=16, whole_prompts=True)
    for number, length in enumerate((5, 15, 15)):
        scheduler.add(request(number, length=length))
    steps = []
    for _ in range(3):
        steps.append(start(scheduler))
        finish(scheduler, steps[-1])
    assert [shape(step) for step in steps] == [
        [(0, 0, 5, True)],
        [(0, 5, 1, True), (1, 0, 15, True)],
        [(0, 6, 1, True), (2, 0, 15, True)],
    ]


def test_no_more_than_max_batch_requests_run() -> None:
    scheduler = Pool().scheduler(max_batch=2)
    for number in range(3):
        scheduler.add(request(number, length=2, max_tokens=2))
    step = start(scheduler)
    assert [found[0] for found in shape(step)] == [0, 1]
    finish(scheduler, step)
    assert [found.id for found in run_step(scheduler)] == [0, 1]
    assert [found[0] for found in shape(start(scheduler))] == [2]


def test_a_request_that_does_not_fit_waits_and_nobody_overtakes_it() -> None:
    scheduler = Pool(pages=6).scheduler()
    for number, length in enumerate((12, 14, 1)):
        scheduler.add(request(number, length, max_tokens=2))
    step = start(scheduler)
    assert [found[0] for found in shape(step)] == [0]
    finish(scheduler, step)
    run_step(scheduler)
    assert [found[0] for found in shape(start(scheduler))] == [1, 2]


@pytest.mark.parametrize(("length", "admitted"), [(12, [0, 1]), (13, [0])])
def test_admission_leaves_a_page_for_each_request_that_runs(length: int, admitted: list[int]) -> None:
    """The first request holds 2 of 6 pages: one that needs 3 is admitted, one that needs all 4 waits."""
    scheduler = Pool(pages=6).scheduler(max_step_tokens=64)
    scheduler.add(request(0, length=7))
    run_step(scheduler)
    scheduler.add(request(1, length=length))
    assert [found[0] for found in shape(start(scheduler))] == admitted


def test_the_latest_admitted_is_preempted_and_waits_at_the_front() -> None:
    scheduler = Pool(pages=5, page_size=2).scheduler()
    first, second = request(0, length=3, max_tokens=7), request(1, length=3, max_tokens=3)
    for added in (first, second, request(2)):
        scheduler.add(added)
    run_step(scheduler, token=50)
    for token in (51, 52):
        step = start(scheduler)
        finish(scheduler, step, token)
    assert [found[0] for found in shape(step)] == [0]
    assert (second.state, second.row, second.computed, second.preemptions) == (RequestState.WAITING, None, 0, 1)
    assert second.output == [50, 51]
    assert [found.id for found in scheduler.waiting] == [1, 2]
    while first.state is not RequestState.FINISHED:
        run_step(scheduler)
    step = start(scheduler)
    assert step.entries[0].token_ids == (*second.prompt, 50, 51)
    assert finish(scheduler, step, 53) == (second,)
    assert second.output == [50, 51, 53]


def test_a_prefill_without_a_page_keeps_those_it_has_and_goes_on_later() -> None:
    scheduler = Pool(pages=9, page_size=2).scheduler(max_step_tokens=3)
    scheduler.add(request(0, length=2, max_tokens=7))
    run_step(scheduler)
    scheduler.add(request(1, length=12, max_tokens=1))
    prefill = []
    while scheduler.has_work:
        step = start(scheduler)
        prefill.append([found[1:3] for found in shape(step) if found[0] == 1])
        finish(scheduler, step)
    assert prefill == [[(0, 2)], [(2, 2)], [(4, 2)], [(6, 2)], [(8, 2)], [], [(10, 2)]]
    assert scheduler.preemptions == 0


def test_cached_pages_are_evicted_for_a_request_that_needs_them() -> None:
    pool = Pool(pages=4)
    scheduler = pool.scheduler(cached=True)
    scheduler.add(request(0, length=12, max_tokens=1))
    run_step(scheduler)
    assert len(pool.cache) == 3
    scheduler.add(request(1, length=9, max_tokens=4))
    run_step(scheduler)
    assert pool.cache.statistics.evicted_pages == 2
    assert pool.allocator.free_pages == 0


def test_the_cached_prefix_of_a_request_is_not_evicted_to_admit_it() -> None:
    pool = Pool(pages=6)
    scheduler = pool.scheduler(cached=True)
    first = request(0, length=12, max_tokens=1)
    scheduler.add(first)
    run_step(scheduler)
    scheduler.add(request(1, length=5))
    run_step(scheduler)
    assert (len(pool.cache), pool.allocator.free_pages) == (4, 1)
    scheduler.add(Request(2, (*first.prompt, 1, 2, 3, 4, 5), SamplingParams(1)))  # 2 pages more, and one to lookahead
    run_step(scheduler)
    assert [found.id for found in scheduler.waiting] == [2]


def test_a_stop_token_ends_the_request_and_is_its_last_token() -> None:
    scheduler = Pool().scheduler()
    ended = request(0, stop_token_ids=frozenset({9}))
    scheduler.add(ended)
    assert run_step(scheduler, 8) == ()
    result = scheduler.finish_step(start(scheduler), [9])
    assert (result.tokens, result.finished) == ({0: 9}, (ended,))
    assert (ended.output, ended.finish_reason, ended.row) == ([8, 9], FinishReason.STOP, None)


def test_max_tokens_and_the_context_end_a_request() -> None:
    scheduler = Pool().scheduler(context_length=8)
    by_count, by_context = request(0, length=3, max_tokens=2), request(1, length=6, max_tokens=9)
    scheduler.add(by_count)
    scheduler.add(by_context)
    run_step(scheduler)
    assert run_step(scheduler) == (by_count, by_context)
    assert (by_count.finish_reason, by_context.finish_reason) == (FinishReason.LENGTH, FinishReason.LENGTH)
    assert by_context.length == 8


def test_a_stop_token_counts_before_the_length() -> None:
    scheduler = Pool().scheduler()
    scheduler.add(request(0, max_tokens=1, stop_token_ids=frozenset({7})))
    (ended,) = run_step(scheduler)
    assert ended.finish_reason is FinishReason.STOP


def test_an_abort_ends_a_waiting_and_a_running_request_and_frees_its_pages() -> None:
    pool = Pool()
    scheduler = pool.scheduler(max_batch=1)
    running, waiting = request(0), request(1)
    scheduler.add(running)
    scheduler.add(waiting)
    run_step(scheduler)
    assert scheduler.abort(1) is waiting
    assert scheduler.abort(0) is running
    assert scheduler.abort(0) is None
    assert (running.finish_reason, waiting.finish_reason) == (FinishReason.ABORTED, FinishReason.ABORTED)
    assert not scheduler.has_work
    assert pool.allocator.free_pages == 64


def test_an_abort_of_the_first_that_waits_lets_the_next_in() -> None:
    scheduler = Pool(pages=6).scheduler()
    for number, length in enumerate((9, 20, 1)):
        scheduler.add(request(number, length))
    run_step(scheduler)
    scheduler.abort(1)
    assert [found[0] for found in shape(start(scheduler))] == [0, 2]


def test_an_abort_in_flight_keeps_the_row_until_the_step_is_finished() -> None:
    pool = Pool()
    scheduler = pool.scheduler()
    aborted, other = request(0), request(1)
    scheduler.add(aborted)
    scheduler.add(other)
    step = start(scheduler)
    assert scheduler.abort(0) is aborted
    assert aborted.row == step.rows[0]
    result = scheduler.finish_step(step, [7, 7])
    assert (result.tokens, result.finished) == ({1: 7}, ())
    assert (aborted.output, scheduler.running) == ([], (other,))
    assert pool.allocator.free_pages == 62


def test_a_request_that_ends_by_an_error_leaves_nothing_in_the_cache() -> None:
    """Two of its pages are whole when it ends; of a request that ends otherwise they are cached."""
    for reason, cached in ((FinishReason.ABORTED, 2), (FinishReason.ERROR, 0)):
        pool = Pool()
        scheduler = pool.scheduler(max_step_tokens=9, cached=True)
        ended = request(0, length=20)
        scheduler.add(ended)
        run_step(scheduler)
        start(scheduler)
        scheduler.abort(0, reason)
        scheduler.drop_steps()
        assert ended.finish_reason is reason
        assert (len(pool.cache), pool.allocator.free_pages) == (cached, 64 - cached)


def test_only_the_first_admission_of_a_request_counts_in_the_cache_statistics() -> None:
    pool = Pool(pages=5, page_size=2)
    scheduler = pool.scheduler(cached=True)
    for number in range(2):
        scheduler.add(request(number, length=3, max_tokens=6))
    while scheduler.has_work:
        run_step(scheduler)
    assert scheduler.preemptions > 0
    statistics = pool.cache.statistics
    assert (statistics.lookups, statistics.hits, statistics.tokens, statistics.hit_tokens) == (2, 0, 6, 0)


def test_a_dropped_step_gives_its_room_back() -> None:
    """A prefill returns its pages and waits again; a decoding request returns its new page and continues."""
    pool = Pool()
    scheduler = pool.scheduler()
    decoding = request(0, length=8)
    scheduler.add(decoding)
    for free in (64, 62):
        step = start(scheduler)
        scheduler.drop_steps()
        assert pool.allocator.free_pages == free
        repeated = start(scheduler)
        assert shape(repeated) == shape(step)
        finish(scheduler, repeated)
    assert pool.table.length(decoding.row or 0) == 9
