"""The plan stream: which batches of a round are planned ahead, how streams wait for each other, and that no stale plan
is used."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_native import DeviceNative, on_device_lengths
from refilled_native import captured
from speculating import DEEPSEEK, LLAMA, MTP, NGRAM, PROMPTS, engine, plain, shaped, standalone, tokens
from test_draft_prediction import saved_deepseek

from attnplug import ForwardMode, UsageError
from attnplug_engine import Engine, SamplingParams
from attnplug_engine.options import EngineOptions
from attnplug_engine.request import FinishReason, Request
from attnplug_engine.scheduling.step import PENDING
from attnplug_engine.speculation.batches import EagerBatches
from attnplug_engine.speculation.plan_stream import PlanStream
from attnplug_testing.command import Attnplug
from attnplug_testing.errors import having, missing_values

pytestmark = pytest.mark.long

VERIFY, EXTEND, DECODE = "target_verify", "draft_extend", "decode"
CHAIN, TREE = standalone(LLAMA) | shaped(3), standalone(LLAMA) | shaped(3, 2, 5)


@pytest.fixture(autouse=True)
def device_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device_lengths(monkeypatch)


def ahead(model: str = LLAMA, **settings: Any) -> Engine:
    """Pages hold many rounds, so that most verifies can be planned ahead."""
    one = engine(model, **{"page_size": 64, "plan_stream": True, **settings})
    assert one.rounds is not None and one.rounds.plan_stream is not None
    return one


class Watch:
    """Batches planned ahead, and those used, by mode."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.planned: list[str] = []
        self.used: list[str] = []
        plan_ahead, make = EagerBatches.plan_ahead, EagerBatches.make

        def planned(batches, *args):
            found = plan_ahead(batches, *args)
            self.planned += [str(one.batch.forward_mode) for one in found]
            return found

        def made(batches, mode, seq_lens, positions, *, tree=None, step=0):
            given = batches._ahead.get((mode, positions.shape[1], step))
            batch = make(batches, mode, seq_lens, positions, tree=tree, step=step)
            if given is not None:
                assert given.batch is batch
                assert batch.geometry.seq_lens.tolist() == seq_lens.tolist(), "planned for other lengths"
                pages = -(-batch.geometry.seq_lens // batch.geometry.page_size)
                for mine, theirs, count in zip(
                    batch.geometry.page_table, batches.members.page_table, pages.tolist(), strict=True
                ):
                    assert mine[:count].tolist() == theirs[:count].tolist(), "planned for other pages"
                assert (tree is None) == (batch.geometry.tree is None)
                assert tree is None or bool((tree == batch.geometry.tree).all())
                self.used.append(str(mode))
            return batch

        monkeypatch.setattr(EagerBatches, "plan_ahead", planned)
        monkeypatch.setattr(EagerBatches, "make", made)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


class TestTokens:
    @pytest.mark.parametrize(
        ("model", "settings", "overlap"),
        [
            (LLAMA, NGRAM | shaped(4, 2), True),
            (LLAMA, CHAIN, False),
            (LLAMA, CHAIN, True),
            (LLAMA, TREE, True),
            (LLAMA, {"speculative_algorithm": "eagle3", "speculative_draft_model": LLAMA} | shaped(2), False),
            (DEEPSEEK, MTP | shaped(3), True),
            (DEEPSEEK, MTP | shaped(3, 2, 5), False),
        ],
    )
    def test_they_are_those_without_speculation(self, model, settings, overlap, watch):
        """B1, B2: every batch planned ahead had the lengths, pages and trees with which it ran later."""
        assert tokens(ahead(model, overlap=overlap, **settings)) == plain(model)
        assert VERIFY in watch.used

    @pytest.mark.parametrize(("settings", "overlap"), [(CHAIN, True), (TREE, False)], ids=["chain", "tree"])
    def test_they_are_the_same_over_arrivals_ends_aborts_and_preemption(self, settings, overlap, watch):
        random = Random(5)
        script = [(random.choice(PROMPTS), random.randrange(2, 40), random.random() < 0.2) for _ in range(14)]
        options = {"page_size": 16, "max_batch": 4, "overlap": overlap, "num_pages": 6, "context_length": 96}
        one, other = ahead(**settings, **options), engine(**options | {"num_pages": 64})
        outputs = []
        for each in (one, other):
            pace, requests = Random(1), []
            for prompt, new, leaves in script:
                requests.append(each.add(prompt, SamplingParams(new, seed=7, temperature=0.7)))
                for _ in range(pace.randrange(3)):
                    each.step()
                if leaves:
                    each.abort(requests[pace.randrange(len(requests))])
            while each.step() is not None:
                pass
            outputs.append([(request.output, request.finish_reason) for request in requests])
        for (mine, why), (theirs, reason) in zip(*outputs, strict=True):
            shared = min(len(mine), len(theirs))  # an aborted request has as many as its steps brought
            assert mine[:shared] == theirs[:shared]
            assert mine == theirs or FinishReason.ABORTED in (why, reason)
        assert one.scheduler.preemptions
        assert {VERIFY, EXTEND} <= set(watch.used) and watch.planned.count(VERIFY) > watch.used.count(VERIFY)

    def test_replayed_rounds_are_not_touched(self, watch):
        """Rounds of 4 and fewer plan inside their graphs; nothing is planned ahead for them."""
        one = captured(ahead(**CHAIN, overlap=True), (2, 4))
        del watch.planned[:]
        assert tokens(one) == plain(LLAMA) and one.statistics.replayed_steps and watch.used.count(EXTEND)
        del watch.planned[:]
        one.generate(PROMPTS[:2], SamplingParams(12))
        assert watch.planned == []


def stepped(one: Engine, new: int = 40, prompts: int = 1) -> list[list[str]]:
    """An engine after its prefill and first round. The backends' lists of plans, the target's first, are empty."""
    for prompt in PROMPTS[:prompts]:
        one.add(prompt, SamplingParams(new))
    one.step()
    one.step()
    assert one.rounds is not None
    found = [one.runner.backend.seen] + ([] if one.rounds.draft is None else [one.rounds.draft.backend.seen])
    for seen in found:
        seen.clear()
    return found


class TestPlanning:
    """With a plan stream, each backend plans each batch once, and ahead of its use (B1, B2)."""

    @pytest.mark.parametrize(
        ("settings", "draft"),
        [
            (NGRAM, None),
            (CHAIN, [EXTEND, DECODE, DECODE]),
            (standalone(LLAMA) | shaped(1), [EXTEND]),
            (TREE, [EXTEND, VERIFY, VERIFY]),
        ],
    )
    def test_a_round_plans_its_draft_and_the_next_verify(self, settings, draft, watch):
        one = ahead(overlap=False, **settings)
        planned = stepped(one)
        del watch.planned[:], watch.used[:]
        for _ in range(3):
            one.step()
        assert planned == [[VERIFY] * 3, (draft or []) * 3][: len(planned)]
        own, *further = draft or [None]
        order = [mode for mode in (own, *further, VERIFY) if mode]
        assert watch.planned == order * 3, "all of it ahead"
        assert watch.used == [VERIFY, *(draft or [])] * 3

    def test_a_draft_with_a_model_for_each_step_plans_once(self, tmp_path, watch):
        folder, _ = saved_deepseek(tmp_path, 3)
        one = ahead(str(folder), overlap=False, **MTP, **shaped(3))
        _, draft = stepped(one)
        del watch.planned[:]
        one.step()
        assert draft == [EXTEND] and watch.planned == [EXTEND, VERIFY]

    def test_a_backend_that_needs_lengths_on_the_host_plans_in_order(self, monkeypatch, watch):
        class Exact(DeviceNative):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                self.claims = replace(self.claims, needs_cpu_seq_lens=True)

        on_device_lengths(monkeypatch, Exact)
        one = engine(plan_stream=True, **CHAIN)
        assert one.rounds.plan_stream is None and one.rounds.planned_in_order == ["torch_native"] * 2
        assert tokens(one) == plain(LLAMA) and watch.planned == []

    def test_nothing_is_planned_for_a_round_that_is_known_to_be_another(self, watch):
        """A request ends by then, one arrives, or one has no page for another round."""
        one = ahead(overlap=False, page_size=16, **CHAIN)
        request = one.add([1, 2, 3], SamplingParams(7))
        one.step()
        one.step()
        assert len(request.output) == 5 and VERIFY in watch.planned
        del watch.planned[:]
        one.add([4], SamplingParams(40))
        one.step()  # the round ends with the last token, and the prefill ends
        assert VERIFY not in watch.planned
        lacking = []
        for _ in range(8):
            del watch.planned[:]
            one.step()
            lacking.append(VERIFY not in watch.planned)
        assert True in lacking and False in lacking


class TestStale:
    """A verify that was planned for another round is dropped, and the round plans its own."""

    def drops(self, one: Engine, watch: Watch) -> None:
        del watch.used[:]
        target = one.runner.backend.seen
        target.clear()
        one.step()
        assert VERIFY not in watch.used and target.count(VERIFY) >= 1

    @pytest.fixture
    def one(self, watch) -> Engine:
        one = ahead(overlap=False, **CHAIN)
        stepped(one, prompts=3)
        assert watch.planned[-1] == VERIFY
        return one

    def test_after_an_abort(self, one, watch):
        one.abort(one.scheduler.running[1])
        self.drops(one, watch)

    def test_after_an_arrival(self, one, watch):
        one.add([7, 8], SamplingParams(1))
        one.step()
        one.add([7, 8], SamplingParams(9))
        one.step()
        self.drops(one, watch)

    def test_in_another_order(self, one, watch):
        one.scheduler._running.reverse()
        self.drops(one, watch)

    def test_with_other_pages(self, one, watch):
        table = one.runner.table
        request = one.scheduler.running[0]
        pages, length = table.pages(request.row), table.length(request.row)
        table.truncate(request.row, 0)
        other = one.runner.allocator.allocate(1)
        assert table.extend(request.row, length) == () and table.pages(request.row) != pages
        one.runner.allocator.release(other)
        self.drops(one, watch)

    def test_with_lengths_that_were_taken_back(self, watch):
        """After an error, the host has lengths from before the round that was taken back."""
        one = ahead(overlap=True, **CHAIN)
        stepped(one)
        request = one.scheduler.running[0]
        assert request.steps_in_flight and one.rounds._next_verify._waiting is not None
        one.loop._drop()
        assert not request.steps_in_flight
        one.loop._depth = 1
        self.drops(one, watch)
        while one.step() is not None:
            pass
        assert request.output == engine().generate([PROMPTS[0]], SamplingParams(40))[0].token_ids

    def test_with_lengths_that_the_host_changed(self, one, watch):
        request = one.scheduler.running[0]
        del request.output[-1]
        request.computed -= 1
        self.drops(one, watch)

    def test_after_a_replayed_round(self, watch):
        one = captured(ahead(overlap=False, **CHAIN), (1,))
        graphs, one.rounds.graphs = one.rounds.graphs, None
        stepped(one)
        one.rounds.graphs = graphs
        one.step()
        one.rounds.graphs = None
        assert one.statistics.replayed_steps == 1 and one.rounds._next_verify._waiting is None
        self.drops(one, watch)

    @pytest.mark.parametrize(
        "change", [None, "request", "order", "rows", "slots", "pages", "bound", "newest token told", "told elsewhere"]
    )
    def test_one_difference_is_enough(self, change):
        """The newest tokens of the round are on the device only, unless that is the change."""
        one = ahead(overlap=True, **CHAIN)
        stepped(one, prompts=2)
        keeps, (step, running) = one.rounds._next_verify, one.loop.in_flight[-1]
        entries, rows, slots, longest = list(step.entries), list(step.rows), step.state_slots, keeps._waiting.longest
        assert entries[0].token_ids == (PENDING,)
        keeps._waiting = replace(keeps._waiting, rows=rows)
        if change == "request":
            other = Request(99, entries[0].request.prompt, entries[0].request.params)
            entries[0] = entries[0]._replace(request=other)
        elif change == "order":
            entries.reverse()
        elif change == "rows":
            rows = rows[::-1]
        elif change == "slots":
            slots = [0, 1]
        elif change == "pages":
            one.runner.table.extend(rows[1], 64)
        elif change == "bound":
            longest += 1
        elif change == "newest token told":  # cannot happen: the host has not read it
            entries[1] = entries[1]._replace(token_ids=(5,))
        elif change == "told elsewhere":
            running.tokens()
            place = keeps._waiting.output.committed[1]
            entries[1] = entries[1]._replace(token_ids=(5,), position=place)
            waiting = keeps._waiting
            assert keeps.take(entries, rows, slots, longest), "it is where the device is"
            keeps._waiting = waiting
            entries[1] = entries[1]._replace(position=place - 1)
        assert bool(keeps.take(entries, rows, slots, longest)) is (change is None)
        assert not keeps.take(list(step.entries), rows, slots, longest), "it is given once"

    def test_a_prefill_that_ends_in_the_same_row(self, one, watch):
        """A preempted request may come back to its row and its pages."""
        for request in list(one.scheduler.running):
            one.abort(request)
        one.rounds.plan_stream.join()
        waiting = one.rounds._next_verify._waiting
        one.add([5, 6], SamplingParams(9))
        one.step()
        assert waiting is not None and one.rounds._next_verify._waiting is None


class Streams:
    """Fake CUDA streams that record their events in a list."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.current = "main"
        main = SimpleNamespace(wait_event=lambda event: self.log.append(f"main waits for {event.number}"))
        self.side = SimpleNamespace(wait_stream=lambda other: self.log.append("side waits for main"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: main)
        monkeypatch.setattr(torch.cuda, "stream", self._on_side)
        log, events = self.log, itertools.count(1)

        class Event:
            def __init__(self) -> None:
                self.number = next(events)

            def record(self, stream: object) -> None:
                log.append(f"side ends {self.number}")

        monkeypatch.setattr(torch.cuda, "Event", Event)

    @contextmanager
    def _on_side(self, stream: object) -> Iterator[None]:
        assert stream is self.side
        self.current = "side"
        try:
            yield
        finally:
            self.current = "main"


class TestStreams:
    @pytest.fixture
    def streams(self, monkeypatch) -> Streams:
        return Streams(monkeypatch)

    @pytest.fixture
    def one(self, streams, monkeypatch) -> Engine:
        one = ahead(overlap=False, **CHAIN)
        one.rounds.plan_stream._module, one.rounds.plan_stream._stream = torch.cuda, streams.side
        stepped(one)
        log = streams.log
        for who, backend in (("target", one.runner.backend), ("draft", one.rounds.draft.backend)):
            plan = backend.plan

            def planned(geometry, who=who, plan=plan):
                log.append(f"{streams.current} plans {who} {geometry.mode}")
                return plan(geometry)

            monkeypatch.setattr(backend, "plan", planned)
        for who, model in (("target", one.runner.model), ("draft", one.rounds.draft.model)):
            forward = model.forward

            def run(*args, who=who, forward=forward):
                mode = next(arg.forward_mode for arg in args if hasattr(arg, "forward_mode"))
                log.append(f"{streams.current} runs {who} {mode}")
                return forward(*args)

            monkeypatch.setattr(model, "forward", run)
        log.clear()
        return one

    def test_plans_are_made_beside_what_runs_before_and_waited_for_where_they_are_used(self, one, streams):
        one.step()
        last = streams.log[0].split()[-1]
        extend, steps, verify = (str(int(last) + number) for number in (1, 2, 3))
        assert streams.log == [
            f"main waits for {last}",  # this round's verify, planned in the one before
            "side waits for main",
            "side plans draft draft_extend",
            f"side ends {extend}",
            "main runs target target_verify",
            "side waits for main",
            "side plans draft decode",
            "side plans draft decode",
            f"side ends {steps}",
            "side waits for main",
            "side plans target target_verify",
            f"side ends {verify}",
            f"main waits for {extend}",
            "main runs draft draft_extend",
            f"main waits for {steps}",
            "main runs draft decode",
            "main runs draft decode",
        ]

    def test_after_an_error_the_next_step_waits_for_what_was_left(self, one, streams, monkeypatch):
        """Tensors that the side stream may still read are held until then."""
        with monkeypatch.context() as broken:
            broken.setattr(one.runner.model, "forward", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                one.step()
        (left,) = one.rounds.plan_stream._sections
        lengths, members = left.read
        assert isinstance(lengths, torch.Tensor) and members.page_table is not None
        streams.log.clear()
        one.step()
        assert streams.log[0] == f"main waits for {left.done.number}" and left.read == ()
        assert "main plans target target_verify" in streams.log

    def test_a_section_that_fails_ends_and_is_waited_for(self, streams):
        stream = PlanStream(torch.device("cpu"))
        stream._module, stream._stream = torch.cuda, streams.side
        with suppress(ZeroDivisionError), stream.section("lengths"):
            raise ZeroDivisionError
        assert streams.current == "main"
        stream.join()
        stream.join()
        assert streams.log == ["side waits for main", "side ends 1", "main waits for 1"]

    def test_a_later_section_is_waited_for_once_for_all_before_it(self, streams):
        stream = PlanStream(torch.device("cpu"))
        stream._module, stream._stream = torch.cuda, streams.side
        sections = []
        for number in range(3):
            with stream.section(number) as section:
                sections.append(section)
        streams.log.clear()
        stream.wait(sections[1])
        stream.wait(sections[0])
        assert [section.read for section in sections] == [(), (), (2,)]
        stream.join()
        assert streams.log == ["main waits for 2", "main waits for 3"]


def test_it_is_refused_without_rounds():
    with pytest.raises(UsageError, check=having(settings=("plan_stream", "speculative_algorithm"))):
        EngineOptions(plan_stream=True)


def test_the_option_is_true_or_false():
    with pytest.raises(UsageError, check=having("yes", settings=("plan_stream",))):
        EngineOptions(plan_stream="yes", **NGRAM)


def test_run_says_why_there_is_none(attnplug: Attnplug, monkeypatch):
    monkeypatch.undo()
    options = ("--device", "cpu", "--max-tokens", "4", "--speculative-algorithm", "ngram", "--enable-plan-stream")
    outcome = attnplug("run", "--model", LLAMA, "--prompt", "hello", *options)
    assert outcome.code == 0
    assert not missing_values(outcome.err, "plan stream: none", "torch_native")


def test_it_is_off_unless_asked_for():
    one = engine(**NGRAM)
    assert one.rounds.plan_stream is None and one.rounds._next_verify.take([], [], (), 0) == ()


def test_a_shape_is_what_its_drafter_makes(watch):
    """Every batch of a round except its first verify was planned ahead. None is planned with one shape and made with
    another."""
    one = ahead(overlap=False, **TREE)
    one.add(PROMPTS[0], SamplingParams(30))
    one.step()
    del watch.planned[:], watch.used[:]
    one.step()
    assert watch.used == [EXTEND, VERIFY, VERIFY] and watch.planned == [*watch.used, VERIFY]
    assert ForwardMode.TARGET_VERIFY.value == VERIFY
