"""Scheduling of rounds over a fake exact model. Its drafts are right with a given probability."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from exact_serving import FIRST, POISON, STOP, VOCAB, Serving, advance, alone

from attnplug import ForwardMode, PoolError
from attnplug_engine.request import FinishReason, Request, RequestState, SamplingParams
from attnplug_engine.scheduling.step import BAD_LOGITS, PENDING, Step
from attnplug_engine.settings.speculation import Algorithm, Speculation
from attnplug_engine.speculation.scheduler import RoundScheduler, lookahead_rows
from attnplug_testing.errors import having

JUNK = -5
CHAIN = Speculation(Algorithm.MTP, None, 3)
NGRAM = Speculation(Algorithm.NGRAM, None, 4)


class RoundServing(Serving):
    """Emulates a device: it verifies rounds, and the host learns their tokens when they are finished."""

    def __init__(self, speculation: Speculation = CHAIN, *, right: float = 0.6, seed: int = 0, **settings: Any) -> None:
        self.speculation, self.right, self.random = speculation, right, Random(seed)
        super().__init__(lookahead=lookahead_rows(speculation), **settings)
        self.lengths = [0] * self.table.max_requests  # committed, by rows of the table
        self.rounds = self.brought = 0

    def make_scheduler(self, **settings: Any) -> RoundScheduler:
        return RoundScheduler(self.table, self.allocator, self.cache, self.speculation, **settings)

    def compute(self, step: Step) -> list[list[int]]:
        for copy in step.copies:
            self.memory[copy.target] = list(self.memory[copy.source])
        sampled = []
        for number, (row, entry) in enumerate(zip(step.rows, step.entries, strict=True)):
            if number < step.rounds:
                sampled.append(self._round(row, entry))
                continue
            assert PENDING not in entry.token_ids
            end = entry.position + len(entry.token_ids)
            self._write(row, entry.position, list(entry.token_ids))
            if entry.sampled:
                assert end == entry.request.length
                self._write(row, end, [JUNK] * self.speculation.tail)
                sampled.append([self._choose(row, entry.request, end)])
                self.lengths[row], self.tokens[row] = end, max(sampled[-1][0], 0)
        return sampled

    def _round(self, row: int, entry: Any) -> list[int]:
        request, (known,) = entry.request, entry.token_ids
        if known != PENDING:
            self.lengths[row], self.tokens[row] = entry.position, known
        committed = self.lengths[row]
        assert committed <= entry.position, "the host's bound is none"
        new: list[int] = []
        nodes = [self.tokens[row]]
        self._write(row, committed, nodes + [JUNK] * (self.speculation.room - 1))
        while True:
            new.append(self._choose(row, request, committed + len(nodes)))
            if new[-1] == BAD_LOGITS or len(nodes) == self.speculation.nodes or self.random.random() >= self.right:
                break
            self._write(row, committed + len(nodes), [new[-1]])
            nodes.append(new[-1])
        self.lengths[row], self.tokens[row] = committed + len(new), max(new[-1], 0)
        self.rounds, self.brought = self.rounds + 1, self.brought + len(new)
        return new

    def _choose(self, row: int, request: Request, length: int) -> int:
        pages, size = self.table.pages(row), self.table.page_size
        if self.bad_at.get(request.id) == length - len(request.prompt):
            self._write(row, length - 1, [POISON])
            return BAD_LOGITS
        value = advance(FIRST, [self.memory[pages[place // size]][place % size] for place in range(length)])
        return value % VOCAB

    def _write(self, row: int, position: int, tokens: Sequence[int]) -> None:
        pages, size = self.table.pages(row), self.table.page_size
        for place, token in enumerate(tokens, position):
            assert self.allocator.references(pages[place // size]) == 1, "a shared page is written"
            self.memory[pages[place // size]][place % size] = token

    def launch(self) -> bool:
        step = self.scheduler.next_step()
        assert step is not None or self.launched or not self.scheduler.has_work
        if step is None:
            return False
        self.steps += 1
        queue = [request.id for request in self.scheduler.running + self.scheduler.waiting]
        assert queue == sorted(queue), "first come, first served"
        mixed = ForwardMode.MIXED if step.rounds else ForwardMode.EXTEND
        assert step.mode is (ForwardMode.DECODE if step.rounds == len(step.entries) else mixed)
        self.launched.append((step, self.compute(step)))
        return True

    def step(self, *, abort_in_flight: tuple[int, ...] = ()) -> Step | None:
        while len(self.launched) < self.depth and self.launch():
            pass
        assert bool(self.launched) >= self.scheduler.has_work
        if not self.launched:
            return None
        for request_id in abort_in_flight:
            self.scheduler.abort(request_id)
        step, tokens = self.launched.popleft()
        result = self.scheduler.finish_round(step, tokens)
        assert all(request.state is RequestState.FINISHED for request in result.finished)
        for page, row in enumerate(self.memory):
            if not self.allocator.references(page):
                row[:] = [-9] * len(row)
        return step

    def run(self) -> None:
        while self.step() is not None:
            assert self.steps < 5000, "it does not come to an end"


def request(number: int, prompt: Sequence[int], new: int, stop: bool = False) -> Request:
    return Request(number, tuple(prompt), SamplingParams(new, stop_token_ids=frozenset({STOP} if stop else ())))


@pytest.mark.parametrize("speculation", [CHAIN, NGRAM, Speculation(Algorithm.STANDALONE, "x", 3, 2, 6)])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.sample(24)
def test_every_request_gets_the_tokens_it_gets_alone(seed, depth, speculation):
    """The accepted tokens do not matter, nor do chunks, a prefix cache, too few pages, aborts, steps taken back and bad
    logits."""
    random = Random(seed)
    size = random.choice((1, 2, 4, 8))
    context = 48
    serving = RoundServing(
        speculation,
        right=random.choice((0.0, 0.5, 0.9, 1.0)),
        seed=seed,
        pages=-(-(context + 2 * lookahead_rows(speculation)) // size) + random.choice((0, 6, 60)),
        page_size=size,
        chunk=random.choice((None, 3, 16)),
        context=context,
        cached=random.random() < 0.7,
        depth=depth,
        bad_at={3: random.randrange(6)},
    )
    stem = [random.randrange(VOCAB) for _ in range(20)]
    requests, aborted = [], set()
    for number in range(10):
        prompt = stem[: random.randrange(20)] + [random.randrange(VOCAB) for _ in range(random.randint(1, 12))]
        requests.append(request(number, prompt, random.randint(1, 24), stop=random.random() < 0.5))
    todo = list(requests)
    while todo or serving.scheduler.has_work:
        for _ in range(min(random.randint(0, 3), len(todo))):
            serving.scheduler.add(todo.pop(0))
        if random.random() < 0.05:
            serving.fail()
        leaving = ()
        if random.random() < 0.03 and serving.scheduler.running:
            leaving = (random.choice(serving.scheduler.running).id,)
            aborted |= set(leaving)
        serving.step(abort_in_flight=leaving)
        assert serving.steps < 5000, "it does not come to an end"
    for one in requests:
        expected, reason = alone(one, context)
        if one.finish_reason is FinishReason.ERROR:
            assert one.id == 3 and one.output == expected[: serving.bad_at[3]]
        elif one.id in aborted:
            assert one.output == expected[: len(one.output)]
        else:
            assert (one.output, one.finish_reason) == (expected, reason)
    serving.check_all_returned()


def test_what_a_round_brings_is_taken_in_up_to_the_request_s_end():
    serving = RoundServing(right=1.0, pages=40, page_size=4)
    short = request(0, [1, 2, 3], 6)
    serving.scheduler.add(short)
    serving.run()
    assert len(short.output) == 6 and serving.brought == 8 and serving.rounds == 2
    serving.check_all_returned()


def test_a_request_ends_at_a_token_in_the_middle_of_a_round():
    serving = RoundServing(right=1.0, pages=40, page_size=4)
    one = request(0, [1, 2, 3], 12)
    serving.scheduler.add(one)
    serving.step()
    serving.launch()
    step, tokens = serving.launched.popleft()
    result = serving.scheduler.finish_round(step, tokens, lambda request, _: len(request.output) == 3)
    assert result.tokens == {0: tokens[0][:2]} and result.finished == (one,)
    assert one.finish_reason is FinishReason.STOP and len(one.output) == 3
    serving.check_all_returned()


def test_nobody_is_scheduled_who_may_have_all_tokens_in_flight():
    serving = RoundServing(right=0.0, pages=40, page_size=4, depth=2)
    one = request(0, [1, 2, 3], 3)
    serving.scheduler.add(one)
    while serving.step() is not None:
        pass
    assert serving.rounds == 2


def test_a_pool_without_room_for_what_is_proposed_is_refused_by_value():
    serving = RoundServing(pages=4, page_size=4)
    with pytest.raises(PoolError, check=having(6, 3, 9, 11, 4, settings=("max_tokens", "num_pages"))):
        serving.scheduler.add(request(0, [1, 2, 3], 9))


def test_a_draft_that_looks_one_token_ahead_computes_the_last_page_of_a_hit_again():
    serving = RoundServing(pages=60, page_size=4)
    serving.scheduler._short_hits = True
    for number in range(2):
        one = request(number, [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1], 4)
        serving.scheduler.add(one)
        serving.run()
    assert one.cached_tokens == 4
    serving.check_all_returned()
