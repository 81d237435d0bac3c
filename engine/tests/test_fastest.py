"""Engines on several backends that alternate: another one plans at every step, over one cache."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from refilled_native import NAME, RefilledNative, captured
from speculating import DEEPSEEK, LLAMA, NGRAM, engine, shaped
from thread_ranks import in_ranks

from attnplug import AttentionBackend, BackendError, ForwardMode, GraphLevel, Problem, Role
from attnplug.auto.fastest import FastestBackend
from attnplug.auto.schedule import BackendSchedule
from attnplug.auto.table_store import read_tables
from attnplug.host import BackendRequest, HostContext, Selection, TypicalLens, load_model, load_registry, select
from attnplug_engine import Engine, SamplingParams
from attnplug_engine.execution.backend_usage import BackendUsage
from attnplug_engine.graphs.decode import GraphReport
from attnplug_engine.graphs.dispatcher import GraphDispatcher
from attnplug_engine.graphs.length_ranges import EVERY_LENGTH, LengthRange
from attnplug_engine.prepare import check_same_choice
from attnplug_engine.request import Request
from attnplug_engine.scheduling.step import StepEntry
from attnplug_testing.command import Attnplug, Package
from attnplug_testing.errors import having
from attnplug_testing.sharing import LONGEST, TOYS, alternating, share, shared, tune

PROMPTS = [[5, 9, 2, 77, 31, 4, 8], [1], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]]


SPARSE_TOY = """
from dataclasses import replace
from attnplug import hookimpl
from attnplug_sparse import plugin
from attnplug_sparse.torch_sparse.backend import TorchSparseBackend


class Other(TorchSparseBackend):
    pass


@hookimpl
def attnplug_backends():
    return [replace(plugin.attnplug_backends()[0], name="other_sparse", factory=f"{__name__}:Other")]
"""


class TestThirdParties:
    """Backends of a plugin without schedules, in addition to the embedded one."""

    @pytest.mark.parametrize("model_type", ["llama", "deepseek_v3"])
    def test_alternating_steps_give_the_tokens_of_transformers(
        self, model_type, make_oracle, package: Package, monkeypatch
    ):
        """A9, B5: a change of backend between steps changes only rounding. One of the backends runs in float64."""
        package("toys", TOYS)
        share(monkeypatch, "double", "other", NAME)
        oracle = make_oracle(model_type)
        one = Engine(str(oracle.folder), device="cpu", page_size=4, max_batch=3, ignore_eos=True, random_weights=False)
        outputs = [done.token_ids for done in one.generate(PROMPTS, max_tokens=14)]
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert output == oracle.logits(prompt + output[:-1])[len(prompt) - 1 :].argmax(-1).tolist()
        served = one.statistics.backend_usage.by_backend()["decode"]
        assert served.keys() == {"double", "other", NAME} and min(served.values()) >= 3

    def test_sparse_layers_alternate_over_one_cache_of_index_keys(self, make_oracle, package: Package, monkeypatch):
        """A9, A10: the backend that plans a step selects its rows, too, from keys that the other one wrote."""
        package("sparse_toy", SPARSE_TOY)
        share(monkeypatch, "torch_sparse", "other_sparse")
        oracle = make_oracle("deepseek_v32")
        one = Engine(str(oracle.folder), device="cpu", page_size=4, max_batch=3, ignore_eos=True, random_weights=False)
        outputs = [done.token_ids for done in one.generate(PROMPTS, max_tokens=14)]
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert output == oracle.logits(prompt + output[:-1])[len(prompt) - 1 :].argmax(-1).tolist()
        served = one.statistics.backend_usage.by_backend()["decode"]
        assert served.keys() == {"torch_sparse", "other_sparse"} and min(served.values()) >= 3

    def test_the_command_runs_by_a_table_and_prints_the_steps_of_each_backend(
        self, attnplug: Attnplug, package: Package, tmp_path, monkeypatch
    ):
        """Third parties take part without doing anything: the user measured them. Without the table, one runs all."""
        monkeypatch.setenv("ATTNPLUG_CACHE_DIR", str(tmp_path / "cache"))
        package("toys", TOYS)
        run = ("run", "--model", LLAMA, "--device", "cpu", "--prompt", "hello", "--max-tokens", "9", "--ignore-eos")
        before = attnplug(*run)
        tune(LLAMA, "double", "other")
        after = attnplug(*run)
        assert after.out == before.out and "steps by backend" not in before.err
        assert "decode steps by backend: double 4, other 4" in after.err
        assert "prefill steps by backend" not in after.err
        (line,) = attnplug(*run, "--json").out.splitlines()
        assert json.loads(line)["steps"] == {"decode": {"double": 4, "other": 4}}

    def test_the_command_names_the_backends_left_out(self, attnplug: Attnplug, package: Package, monkeypatch):
        package("toys", TOYS)
        share(monkeypatch, NAME, "double")
        printed = attnplug("run", "--model", DEEPSEEK, "--device", "cpu", "--prompt", "hello", "--max-tokens", "3").err
        printed = " ".join(printed.split())  # the output is wrapped
        assert "without double: it cannot extend MLA by chunked or one_shot, so it does not share prefill" in printed

    def test_tables_are_read_once_while_an_engine_starts(self, package: Package, tmp_path, monkeypatch):
        """The same holds for a draft's model and its backend. The backends built are those selected."""
        monkeypatch.setenv("ATTNPLUG_CACHE_DIR", str(tmp_path / "cache"))
        package("toys", TOYS)
        tune(LLAMA, "double", "other")
        read: list[object] = []
        monkeypatch.setattr(
            "attnplug.auto.table_store.read_tables", lambda path: read.append(path) or read_tables(path)
        )
        engine(**{"speculative_algorithm": "standalone", "speculative_draft_model": LLAMA})
        assert len(read) == 1

    def test_one_backend_alone_is_not_counted(self):
        usage = BackendUsage()
        usage.add(object())  # type: ignore[arg-type] # the value is not read
        assert not usage.by_backend()

    def test_a_single_backend_is_not_listed(self, attnplug: Attnplug):
        run = ("run", "--model", LLAMA, "--device", "cpu", "--prompt", "hello", "--max-tokens", "4")
        assert "steps by backend" not in attnplug(*run).err
        assert "steps" not in json.loads(attnplug(*run, "--json").out)


@pytest.fixture
def refilled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine runs on two alternating backends that can be "captured" here."""

    def build(selection: Selection, context: HostContext) -> AttentionBackend:
        role = Role.DRAFT if selection.problem.is_draft else Role.DECODE
        can, roles = selection.chosen(role).spec.capabilities, frozenset({role, Role.PREFILL})
        children = {name: RefilledNative(context.for_backend(name, can, roles=roles)) for name in ("odd", "even")}
        return FastestBackend(children, {role: alternating("even", "odd")})

    for module in ("execution.runner", "speculation.draft_runner"):
        monkeypatch.setattr(f"attnplug_engine.{module}.build_selection", build)


class TestCaptured:
    def test_a_step_is_captured_once_for_each_backend(self, refilled):
        graphs = captured(engine(), (1, 4)).runner.graphs.decode
        assert graphs.sizes == (1, 4) and graphs.backends == {("odd",): (1, 4), ("even",): (1, 4)}
        found = [graphs.fitting(3, entries(*lengths)) for lengths in ((3, 3, 3), (4, 4, 4), (1, 1, 10), (5, 5, 7))]
        assert [step.size for step in found] == [4] * 4
        makers = [step.batch.plan.attention.planner_names() for step in found]
        assert makers == [["odd"], ["even"], ["even"], ["odd"]]

    def test_alternating_replayed_steps_give_the_tokens_of_eager_ones(self, refilled):
        """B2: the step that is replayed is planned by the backend that is the fastest for its requests' lengths."""
        each = [SamplingParams(12), SamplingParams(9), SamplingParams(5)]
        expected = [done.token_ids for done in engine().generate(PROMPTS, each)]
        one = captured(engine(overlap=True), (2, 4))
        assert [done.token_ids for done in one.generate(PROMPTS, each)] == expected
        assert one.statistics.replayed_steps and not one.statistics.eager_steps
        assert min(one.statistics.backend_usage.by_backend()["decode"].values()) >= 4

    def test_requests_that_differ_in_length_are_replayed_by_the_backend_that_is_the_fastest_for_them(self, monkeypatch):
        """B2: equal ones by the other, over the same cache, with the same tokens."""
        times = {"alike": (1.0, 3.0), "apart": (2.0, 2.0)}
        schedule = BackendSchedule(
            {name: {(4, 8, 1): one, (4, 8, 1, True): other} for name, (one, other) in times.items()}
        )

        def build(selection: Selection, context: HostContext) -> AttentionBackend:
            can, roles = selection.chosen(Role.DECODE).spec.capabilities, frozenset({Role.PREFILL, Role.DECODE})
            children = {name: RefilledNative(context.for_backend(name, can, roles=roles)) for name in times}
            return FastestBackend(children, {Role.DECODE: schedule})

        monkeypatch.setattr("attnplug_engine.execution.runner.build_selection", build)
        one = captured(engine(), (4,))
        assert one.runner.graphs.decode.backends == {("alike",): (4,), ("apart",): (4,)}
        for prompts, steps in (([[5, 6, 7], [8, 9, 10]], 4), ([[5], [6] * 9], 6)):
            expected = [done.token_ids for done in engine().generate(prompts, max_tokens=steps + 1)]
            assert [done.token_ids for done in one.generate(prompts, max_tokens=steps + 1)] == expected
        assert one.statistics.backend_usage.by_backend()["decode"] == {"apart": 6, "alike": 4}

    def test_alternating_replayed_rounds_give_the_tokens_of_plain_steps(self, refilled):
        """B2: verify and the draft's own batches, each by the backend that is the fastest for it."""
        for draft in (NGRAM | shaped(2), {"speculative_algorithm": "standalone", "speculative_draft_model": LLAMA}):
            expected = [done.token_ids for done in engine().generate(PROMPTS, max_tokens=12)]
            one = captured(engine(**draft), (4,))
            assert [done.token_ids for done in one.generate(PROMPTS, max_tokens=12)] == expected
            assert one.statistics.replayed_steps and len(one.rounds.graphs.backends) > 1

    def test_a_backend_that_cannot_be_captured_as_it_claims_is_found_whoever_is_the_fastest(self, monkeypatch):
        """Each is compared with its own eager attention: here the two differ by more than any rounding."""

        class Doubled(RefilledNative):
            def attend(self, *given: Any) -> torch.Tensor:
                return 2 * super().attend(*given)

        class Stale(RefilledNative):
            def refill(self, plan: Any, geometry: Any) -> None:
                if not plan.metadata.rows:
                    super().refill(plan, geometry)

        def sharing_with(kind: type[RefilledNative]) -> None:
            def build(selection: Selection, context: HostContext) -> AttentionBackend:
                can, roles = selection.chosen(Role.DECODE).spec.capabilities, frozenset({Role.PREFILL, Role.DECODE})
                children: dict[str, AttentionBackend] = {
                    name: each(context.for_backend(name, can, roles=roles))
                    for name, each in (("odd", RefilledNative), ("even", kind))
                }
                return FastestBackend(children, {Role.DECODE: alternating("even", "odd")})

            monkeypatch.setattr("attnplug_engine.execution.runner.build_selection", build)

        sharing_with(Doubled)
        assert captured(engine(), (4,)).runner.graphs.decode.sizes == (4,)
        sharing_with(Stale)
        with pytest.raises(BackendError, check=having("even", "differs", settings=("disable_cuda_graph",))):
            captured(engine(), (4,))

    def test_the_report_says_which_sizes_were_captured_for_whom(self):
        report = GraphReport(GraphLevel.UNIFORM, (), (1, 4), 3 << 20, backends={("a",): (1, 4), ("b", "fla"): (4,)})
        printed = "decode with 1, 4 requests, 3 MiB (level UNIFORM); 3 graphs: a with 1, 4; b and fla with 4"
        assert str(report) == printed


def entries(*lengths: int) -> list[StepEntry]:
    """Entries of decoding requests with these numbers of cache rows, the new one included."""
    return [StepEntry(Request(0, (1,), SamplingParams(4)), length - 1, (7,), True) for length in lengths]


class TestByLength:
    RANGES = (
        LengthRange(4, ("a",)),
        LengthRange(9, ("b",)),
        LengthRange(30, ("a",)),
        LengthRange(EVERY_LENGTH, ("c",)),
    )

    RAGGED = (LengthRange(9, ("a",)), LengthRange(EVERY_LENGTH, ("d",)))

    def captured(
        self, context: int, *, ragged: tuple[LengthRange, ...] = RANGES
    ) -> tuple[GraphDispatcher[int | None], list[TypicalLens | None]]:
        asked: list[TypicalLens | None] = []

        def capture(typical: TypicalLens | None) -> int | None:
            asked.append(typical)
            return None if typical is None else typical.mean

        return GraphDispatcher(lambda kind: ragged if kind else self.RANGES, context, capture), asked

    def test_each_backend_is_captured_once_for_a_length_at_which_it_is_the_fastest(self):
        found, asked = self.captured(100)
        assert list(found.captured) == [("a",), ("b",), ("c",)] and asked == [(2, 2), (6, 6), (55, 55)]

    def test_requests_that_differ_are_captured_for_their_own_backends(self):
        found, asked = self.captured(100, ragged=self.RAGGED)
        assert list(found.captured) == [("a",), ("b",), ("c",), ("d",)] and asked[-1] == (31, 47)
        lengths = ((50, 50), (20, 80), (2, 4), (6, 6))
        assert [found.fitting(entries(*each)) for each in lengths] == [55, 31, 2, 6]

    def test_one_backend_for_equal_and_another_for_ragged_requests_is_a_choice(self):
        found, asked = self.captured(4, ragged=(LengthRange(EVERY_LENGTH, ("d",)),))
        assert list(found.captured) == [("a",), ("d",)] and asked == [(2, 2), (2, 3)]

    def test_ranges_beyond_the_context_are_not_captured(self):
        assert [len(self.captured(context)[1]) for context in (4, 5, 30, 31)] == [1, 2, 2, 3]

    def test_one_backend_for_all_lengths_gets_no_typical_lengths(self):
        assert self.captured(4)[1] == [None]

    def test_the_mean_length_decides(self):
        found, _ = self.captured(100)
        lengths = ((4,), (5,), (2, 8), (9, 10), (10, 10), (30,), (31,), (99, 99))
        assert [found.fitting(entries(*each)) for each in lengths] == [2, 6, 6, 6, 2, 2, 55, 55]


class TestRanks:
    def selection(self, *names: str) -> Selection:
        problem = Problem(load_model(LLAMA), "cpu")
        return shared(select(load_registry(), BackendRequest(), problem), *names)

    def test_all_serve_a_batch_by_the_same_backend(self, package: Package):
        """Ranks that read other measured times would choose otherwise, and be as slow as the slowest."""
        package("toys", TOYS)
        alike, other = self.selection("double", "other"), self.selection("double", "other")
        choice = other.choices[Role.DECODE]
        times = {**alternating("double", "other").times, "double": {(1, 5, 1): 3.0}}
        other.choices[Role.DECODE] = replace(choice, schedule=type(choice.schedule)(times))
        cpu = torch.device("cpu")
        in_ranks(2, lambda parallel: check_same_choice(alike, parallel, cpu))
        with pytest.raises(BackendError, check=having("double", "other", settings=("attention_backend",))):
            in_ranks(2, lambda parallel: check_same_choice((alike, other)[parallel.rank], parallel, cpu))


def test_batches_say_how_long_their_requests_are_about(monkeypatch):
    """Batches carry typical lengths in every mode of an engine, also of a draft, and if lengths are on the device
    only."""
    seen: dict[ForwardMode, list[TypicalLens | None]] = {}

    class Watching(FastestBackend):
        def fastest(self, geometry: Any) -> str:
            seen.setdefault(geometry.mode, []).append(geometry.typical)
            return super().fastest(geometry)

    monkeypatch.setattr("attnplug.registry.assembly.FastestBackend", Watching)
    share(monkeypatch, NAME)
    one = engine(speculative_algorithm="standalone", speculative_draft_model=LLAMA, **shaped(2), overlap=False)
    one.generate(PROMPTS[:1], max_tokens=8)
    engine().generate(PROMPTS[:1], max_tokens=3)
    assert seen.keys() >= {ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND, ForwardMode.DECODE}
    assert all(7 <= lens.mean <= lens.longest <= LONGEST for each in seen.values() for lens in each)
