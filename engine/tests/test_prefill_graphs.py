"""Captured prefills with a fake capture that runs the same calls again: everything but the CUDA graph itself.

Real graphs are tested on a GPU, in ``tests/test_engine_graphs.py``.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import refilled_native
import torch
from refilled_native import AnyBatch, AnyRagged, Recorded, RefilledDelta, RefilledNative, build, over
from thread_ranks import in_ranks

from attnplug import BackendError, ExtendPath, ForwardBatch, ForwardMode, GraphLevel, PoolError, Role, UsageError
from attnplug.auto.fastest import FastestBackend
from attnplug.auto.schedule import ExtendSchedule
from attnplug.host import ExtendPolicy, HostLengths, load_model
from attnplug.machine.runtime import runtime_of
from attnplug.torch_native.backend import TorchNativeBackend
from attnplug_engine import Engine, EngineOptions, SamplingParams
from attnplug_engine.execution.extend_times import ExtendTimes
from attnplug_engine.graphs.capture_check import CaptureMismatch
from attnplug_engine.graphs.prefill import PrefillGraphs, _seconds
from attnplug_engine.graphs.step_graphs import capture_steps
from attnplug_engine.request import Request
from attnplug_engine.scheduling.step import Step, StepEntry
from attnplug_engine.serving.start_up import _prefill_sizes, capture_graphs
from attnplug_engine.settings.capture_sizes import default_prefill_sizes
from attnplug_testing.errors import having, naming

MODELS = ["tiny:llama", "tiny:deepseek_v3", "tiny:glm_moe_dsa"]
HYBRIDS = ["tiny:qwen3_next", "tiny:minimax"]
"""Models with and without a convolution's state beside the recurrent one."""
FURTHER = [
    pytest.param(name, marks=pytest.mark.long) for name in ("tiny:kimi_linear", "tiny:mamba2", "tiny:nemotron_h")
]
SIZES = (2, 4)
PREFILLS = (4, 9, 22)


class AnyLinear(RefilledDelta):
    """Linear attention that captures extends, too."""

    def __init__(self, pool):
        super().__init__(pool)
        self.claims = replace(self.claims, cuda_graph=GraphLevel.ALWAYS)

    def _rows(self, batch):
        geometry = batch.geometry
        if geometry.host is None and geometry.new_lens is not None:
            lens = geometry.new_lens.tolist()
            assert sum(lens) <= geometry.rows
            geometry = replace(geometry, rows=sum(lens), host=HostLengths(lens, geometry.seq_lens.tolist()))
            batch = ForwardBatch(geometry)
        yield from super()._rows(batch)


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch):
    """Let every engine run on the backend that can be "captured" here."""

    def use(kind: Any = AnyBatch, linear: Any = AnyLinear) -> None:
        build_native = partial(build, kind=kind, linear=linear)
        monkeypatch.setattr("attnplug_engine.execution.runner.build_selection", build_native)

    use()
    return use


def engine(model: str = MODELS[0], **settings: Any) -> Engine:
    common = {"page_size": 4, "max_batch": 5, "prefix_cache": False, "ignore_eos": True, "chunked_prefill_size": 24}
    return Engine(model, device="cpu", **{**common, **settings})


def captured(one: Engine, prefills: tuple[int, ...] = PREFILLS) -> Engine:
    return refilled_native.captured(one, SIZES, prefills)


def prompts(count: int = 12, longest: int = 30) -> list[list[int]]:
    random = Random(5)
    return [[random.randrange(128) for _ in range(random.randint(1, longest))] for _ in range(count)]


def tokens(one: Engine, texts: list[list[int]], each: Any) -> list[list[int]]:
    return [completion.token_ids for completion in one.generate(texts, each)]


class TestMLAAsMHA:
    """C1, issue 39: prefills of MLA models without prefixes are captured as MHA, the others absorbed."""

    @pytest.mark.parametrize("model", ["tiny:deepseek_v3", "tiny:kimi_linear"])
    @pytest.mark.parametrize("overlap", [False, True], ids=["alone", "overlapped"])
    @pytest.mark.parametrize("fill", [0, 6])
    @pytest.mark.sample(2)
    def test_tokens_are_those_of_eager_prefills(self, model, overlap, fill, native):
        """Prompts of up to 30 tokens in steps of up to 23, beside requests that decode, padded by empty requests."""
        each = [SamplingParams(max_tokens=2 + number % 5) for number in range(12)]
        native(partial(AnyRagged, fill=fill))
        graphs = captured(engine(model, overlap=overlap, chunked_prefill_size=23))
        native()
        assert tokens(graphs, prompts(), each) == tokens(engine(model), prompts(), each)
        assert graphs.statistics.replayed_prefills > 2

    def test_steps_without_prefixes_run_as_mha_and_others_do_not(self, native):
        native(AnyRagged)
        one = captured(engine("tiny:deepseek_v3", prefix_cache=True))
        backend, layers, params = one.runner.backend, len(one.runner.spec.layers), SamplingParams(max_tokens=1)

        def calls(texts: list[list[int]]) -> int:
            before = backend.captured_calls
            one.generate(texts, params)
            return backend.captured_calls - before

        shared = list(range(16))
        assert calls([[*shared, 1, 2], [3, 4]]) == layers
        assert calls([[*shared, 5, 6], [7]]) == 0 and one.cache_statistics.hit_tokens == 16
        assert calls([[60, 61, 62]]) == layers
        assert one.statistics.eager_prefills == 0

    @pytest.mark.parametrize(
        "settings", [{"forced": "absorbed"}, {"disable_ragged": True}, {"forced": "one_shot"}], ids=str
    )
    @pytest.mark.sample(2)
    def test_a_policy_that_runs_them_otherwise_captures_no_mha(self, settings, native):
        native(AnyRagged)
        given = {**settings, **({"forced": ExtendPath.parse(settings["forced"])} if "forced" in settings else {})}
        one = captured(engine("tiny:deepseek_v3", extend_policy=ExtendPolicy(**given)))
        one.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
        assert one.runner.backend.captured_calls == 0

    @pytest.mark.parametrize(
        ("fault", "named"),
        [(lambda out: out * 1.5, "result"), (lambda out: out + (out == 0).all(2, keepdim=True), "padding")],
        ids=["result", "padding"],
    )
    def test_a_backend_that_claims_too_much_is_found_at_start(self, fault, named, native):
        """B2: a wrong result, and output of padded rows that is not zero."""

        class Faulty(AnyRagged):
            def forward_ragged(self, q, k, v, layer, call, plan=None, lse=None):
                out = super().forward_ragged(q, k, v, layer, call, plan, lse)
                return out if call.padded_rows is None else fault(out)

        native(Faulty)
        with pytest.raises(CaptureMismatch) as caught:
            captured(engine("tiny:deepseek_v3"))
        assert caught.value.fault == named


class TestTokens:
    @pytest.mark.parametrize("overlap", [False, True], ids=["alone", "overlapped"])
    @pytest.mark.parametrize("model", MODELS)
    @pytest.mark.sample(2)
    def test_replayed_prefills_give_the_tokens_of_eager_ones(self, model, overlap):
        """Prompts of up to 30 tokens, in chunks and beside requests that decode; steps of more than 22 run eagerly."""
        each = [SamplingParams(max_tokens=2 + number % 5) for number in range(12)]
        graphs, eager = captured(engine(model, overlap=overlap, chunked_prefill_size=23)), engine(model)
        assert tokens(graphs, prompts(), each) == tokens(eager, prompts(), each)
        counts = graphs.statistics
        assert counts.replayed_prefills > 2 and counts.eager_prefills > 2
        assert eager.statistics.replayed_prefills == 0 and eager.statistics.eager_prefills > 3

    @pytest.mark.parametrize("model", [*HYBRIDS, *FURTHER])
    def test_linear_states_move_on_in_replayed_prefills(self, model):
        """Prompts in chunks and beside requests that decode. Padded requests and tokens have no state."""
        each = [SamplingParams(max_tokens=2 + number % 5) for number in range(5)]
        graphs, eager = captured(engine(model, overlap=True, chunked_prefill_size=9)), engine(model)
        assert tokens(graphs, prompts(5, 15), each) == tokens(eager, prompts(5, 15), each)
        assert graphs.statistics.replayed_prefills > 3 and not graphs.statistics.eager_prefills
        states = graphs.runner.states
        assert states.free_slots == states.num_slots

    def test_rows_in_host_memory_are_brought_in_by_the_graph(self):
        """HiSparse: prompts in chunks, whose prefixes are staged, beside requests that decode from hot buffers. As many
        rows move as without graphs."""
        model, each = "tiny:deepseek_v32", [SamplingParams(max_tokens=2 + number % 3) for number in range(4)]
        buffers = {"enable_hisparse": True, "hisparse_config": {"device_buffer_size": 16}, "num_pages": 24}
        settings = {**buffers, "chunked_prefill_size": 9, "context_length": 64, "page_size": 16}
        found, moved = [], []
        for one in (engine(model, **settings), captured(engine(model, **settings), (4, 9))):
            one.runner.coordinator.reset_statistics()
            found.append(tokens(one, prompts(4, 20), each))
            moved.append(one.runner.coordinator.statistics())
        assert found[0] == found[1] and moved[0] == moved[1] and moved[0].staged and moved[0].loaded
        assert one.statistics.replayed_prefills > 3 and not one.statistics.eager_prefills

    def test_snapshots_of_linear_states_are_those_of_the_replay(self):
        """A prefix is found again at a checkpoint, whose state was copied behind a replayed prefill."""
        settings = {"prefix_cache": True, "state_checkpoint": 8, "chunked_prefill_size": 16}
        shared, each = prompts(1, 30)[0] * 2, SamplingParams(max_tokens=4)
        graphs, eager = captured(engine(HYBRIDS[0], **settings)), engine(HYBRIDS[0])
        for rest in prompts(4, 9):
            text = [[*shared[:20], *rest]]
            assert tokens(graphs, text, each) == tokens(eager, text, each)
        assert graphs.cache_statistics.hit_tokens >= 16 and not graphs.statistics.eager_prefills

    @pytest.mark.parametrize("overlap", [False, True], ids=["alone", "overlapped"])
    def test_a_prefix_that_is_cached_and_requests_that_lose_their_pages(self, overlap):
        shared, rest = prompts(1, 30)[0] * 2, prompts(10, 9)
        texts, each = [[*shared[:20], *one] for one in rest], SamplingParams(max_tokens=9)
        one = captured(engine(prefix_cache=True, overlap=overlap, num_pages=16))
        assert tokens(one, texts, each) == tokens(engine(), texts, each)
        assert one.scheduler.preemptions and one.statistics.replayed_prefills > 3
        assert one.cache_statistics.hit_tokens > 40

    def test_tokens_that_the_host_does_not_know_yet_are_the_newest(self):
        """A request arrives while others decode: their tokens of the step in flight are on the device alone."""
        one, eager = captured(engine(overlap=True)), engine()
        texts = prompts(3, 12)
        requests = [one.add(texts[0], SamplingParams(max_tokens=12))]
        for arriving in texts[1:]:
            for _ in range(3):
                one.step()
            requests.append(one.add(arriving, SamplingParams(max_tokens=6)))
        while one.step():
            pass
        expected = tokens(eager, texts, [SamplingParams(max_tokens=n) for n in (12, 6, 6)])
        assert [request.output for request in requests] == expected
        assert one.statistics.eager_prefills == 0

    def test_drawn_tokens_are_the_same(self):
        each = [
            SamplingParams(max_tokens=4, temperature=0.9 * (number % 3 > 0), top_k=20, top_p=0.95, seed=number)
            for number in range(12)
        ]
        graphs = captured(engine(overlap=True))
        assert tokens(graphs, prompts(), each) == tokens(engine(), prompts(), each)
        assert graphs.statistics.replayed_prefills > 2

    def test_log_probabilities_come_from_the_replayed_logits(self):
        each = SamplingParams(max_tokens=2, logprobs=2)
        graphs = captured(engine())
        mine, theirs = (one.generate(prompts(6, 9), each) for one in (graphs, engine()))
        assert graphs.statistics.replayed_prefills == 2 and not graphs.statistics.eager_prefills
        for found, expected in zip(mine, theirs, strict=True):
            assert [one.token_id for one in found.logprobs] == found.token_ids == expected.token_ids
            values = [[one.logprob for one in each.logprobs] for each in (found, expected)]
            assert values[0] == pytest.approx(values[1], abs=1e-4)

    def test_a_request_whose_logits_are_not_finite_ends_alone(self):
        graphs, eager = captured(engine(overlap=True)), engine()
        for one in (graphs, eager):
            one.runner.model.embedding[13] = float("nan")
        texts = [[1, 2, 3], [4, 13], [5, 6]]
        mine, theirs = (one.generate(texts, SamplingParams(max_tokens=3)) for one in (graphs, eager))
        assert [one.token_ids for one in mine] == [one.token_ids for one in theirs]
        assert [one.finish_reason for one in mine] == ["length", "error", "length"]
        assert graphs.statistics.replayed_prefills == 1 and not graphs.statistics.eager_prefills

    def test_a_chunk_that_is_not_sampled_gets_no_token_wherever_it_is(self):
        """The scheduler puts this chunk last, but a runner takes any order. The chunk's newest token must not
        change."""
        newest = []
        for one in (captured(engine()), engine()):
            runner = one.runner
            rows = [runner.table.admit([], 0) for _ in range(3)]
            for row in rows:
                runner.table.extend(row, 2)
            runner.tokens.fill_(77)
            each = [Request(number, (5 + number, 6, 7), SamplingParams(max_tokens=2)) for number in range(3)]
            entries = tuple(StepEntry(one, 0, one.prompt[:2], one.id > 0) for one in each)
            launched = runner.launch(Step(ForwardMode.EXTEND, entries, (), tuple(rows)))
            newest.append((launched.tokens(), runner.tokens[rows].tolist()))
            assert launched.replayed is (one.runner.graphs is not None)
        assert newest[0] == newest[1] and newest[0][1] == [77, *newest[0][0]]

    @pytest.mark.parametrize("fill", [0, 6])
    def test_padding_writes_to_no_requests_rows(self, fill, native):
        """Padded tokens belong to no request. Padded requests have no new tokens, even if they have a length."""
        native(partial(AnyBatch, fill=fill))
        one = captured(engine(num_pages=24))
        pool = one.runner.pools.mha
        for layer in pool.layer_ids:
            pool.keys(layer).fill_(7.0)
        one.generate([[1, 2, 3, 4, 5], [6]], SamplingParams(max_tokens=1))
        assert one.statistics.replayed_prefills == 1
        for layer in pool.layer_ids:
            assert int((pool.keys(layer).flatten(2) != 7.0).any(-1).sum()) == 6


EAGLE = {"speculative_algorithm": "eagle", "speculative_draft_model": "tiny:llama", "speculative_num_steps": 3}
MTP = {"speculative_algorithm": "mtp", "speculative_num_steps": 2}
DRAFT = {"speculative_algorithm": "standalone", "speculative_draft_model": "tiny:qwen3"}
NGRAM = {"speculative_algorithm": "ngram", "speculative_num_steps": 3}


class TestSpeculation:
    """The target's prefills are replayed beside rounds; a draft follows each."""

    @pytest.fixture(autouse=True)
    def both(self, monkeypatch: pytest.MonkeyPatch):
        for module in ("execution.runner", "speculation.draft_runner"):
            build_native = partial(build, kind=AnyBatch, linear=AnyLinear)
            monkeypatch.setattr(f"attnplug_engine.{module}.build_selection", build_native)

    @pytest.mark.parametrize(
        ("model", "settings", "overlap"),
        [
            ("tiny:llama", NGRAM, True),
            ("tiny:llama", EAGLE, True),
            ("tiny:deepseek_v3", MTP, False),
            pytest.param("tiny:llama", DRAFT, True, marks=pytest.mark.long),
            pytest.param("tiny:llama", {**EAGLE, "speculative_algorithm": "eagle3"}, False, marks=pytest.mark.long),
            pytest.param("tiny:llama", {**NGRAM, "speculative_topk": 2}, False, marks=pytest.mark.long),
            pytest.param("tiny:deepseek_v3", {**MTP, "speculative_topk": 2}, True, marks=pytest.mark.long),
            pytest.param("tiny:llama", {**DRAFT, "speculative_topk": 2}, False, marks=pytest.mark.long),
        ],
    )
    def test_tokens_are_those_of_eager_prefills(self, model, settings, overlap):
        """Greedy and drawn ones, and of an engine that does not speculate."""
        each = [SamplingParams(6, temperature=0.9 * (number % 2), seed=3) for number in range(6)]
        settings = {**settings, "chunked_prefill_size": 20}
        eager, graphs = engine(model, **settings), captured(engine(model, overlap=overlap, **settings))
        found = [tokens(one, prompts(6, 20), each) for one in (eager, graphs)]
        assert found[0] == found[1] == tokens(engine(model), prompts(6, 20), each)
        assert graphs.statistics.replayed_prefills > 1 and not graphs.statistics.eager_prefills
        assert eager.statistics.eager_prefills > 1 and not eager.statistics.replayed_prefills

    @pytest.mark.parametrize(
        ("model", "settings", "draft"),
        [
            ("tiny:llama", EAGLE, AnyBatch),
            ("tiny:llama", EAGLE, RefilledNative),
            ("tiny:deepseek_v3", MTP, AnyBatch),
            pytest.param("tiny:llama", DRAFT, AnyBatch, marks=pytest.mark.long),
        ],
    )
    def test_drafts_read_and_propose_the_same(self, model, settings, draft, monkeypatch):
        """Prompts run in chunks, the last of which ends several requests at once. A draft whose backend captures no
        extends runs eagerly behind the target's graph."""
        own = partial(build, kind=draft)
        monkeypatch.setattr("attnplug_engine.speculation.draft_runner.build_selection", own)
        eager, graphs = (engine(model, chunked_prefill_size=20, **settings) for _ in range(2))
        captured(graphs)
        drafts, replayed = graphs.rounds.draft_prefills, []
        assert (drafts is not None) is (draft is AnyBatch)
        assert graphs.rounds.why_no_draft_prefill == ("" if drafts else "torch_native cannot capture it")
        if drafts is not None:
            run = drafts.run
            drafts.run = lambda *step: replayed.append(run(*step)) or replayed[-1]
        texts, each = prompts(5, 25), SamplingParams(1)
        assert tokens(eager, texts, each) == tokens(graphs, texts, each)
        mine, theirs = (one.rounds.state.proposed.tokens[:5] for one in (graphs, eager))
        assert torch.equal(mine, theirs) and (mine >= 0).any()
        count = graphs.statistics.replayed_prefills
        assert count > 1 and len(replayed) == count * (drafts is not None)

    def test_a_draft_with_the_targets_weights_is_accepted_always(self):
        settings = {**DRAFT, "speculative_draft_model": "tiny:llama"}
        one, each = captured(engine(**settings)), SamplingParams(8)
        assert tokens(one, prompts(5, 20), each) == tokens(engine(), prompts(5, 20), each)
        assert one.statistics.rounds.acceptance == 1 and one.statistics.replayed_prefills

    def test_log_probabilities_come_from_the_replayed_logits(self):
        mine, theirs = (
            one.generate(prompts(4, 9), SamplingParams(2, logprobs=2))
            for one in (captured(engine(**NGRAM)), engine(**NGRAM))
        )
        for found, expected in zip(mine, theirs, strict=True):
            values = [[one.logprob for one in each.logprobs] for each in (found, expected)]
            assert found.token_ids == expected.token_ids and values[0] == pytest.approx(values[1], abs=1e-4)

    @pytest.mark.parametrize(
        ("settings", "fragment"),
        [
            (EAGLE, "tokens, 7 MiB (level UNIFORM, by torch_native); no prefill of the draft: torch_native cannot"),
            (NGRAM, "prefill of up to 16, 20 tokens, 7 MiB (level ALWAYS)"),
            ({**NGRAM, "disable_prefill_cuda_graph": True}, "7 MiB (level ALWAYS); no prefill: turned off"),
        ],
        ids=["eagle", "ngram", "off"],
    )
    def test_an_engine_says_what_it_captured(self, settings, fragment, monkeypatch):
        own = partial(build, kind=RefilledNative)
        monkeypatch.setattr("attnplug_engine.speculation.draft_runner.build_selection", own)
        one, free = engine(chunked_prefill_size=20, **settings), iter([9 << 20, 2 << 20])
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (next(free), 0))
        monkeypatch.setattr("attnplug_engine.serving.start_up.GraphCapture", lambda device: Recorded())
        for module in ("graphs.step_graphs", "speculation.rounds"):
            check = SimpleNamespace(run=lambda *given: None)
            monkeypatch.setattr(f"attnplug_engine.{module}.CaptureCheck", lambda *given, check=check: check)
        monkeypatch.setattr("attnplug_engine.graphs.prefill._seconds", lambda *given, waits: not waits)
        monkeypatch.setattr("attnplug_engine.graphs.step_graphs._min_over_ranks", lambda runner, value: value)
        here, capture = one.runner.device, one.rounds.capture

        def on_a_cpu(*given: Any, **named: Any) -> Any:
            one.runner.device = here
            return capture(*given, **named)

        one.rounds.capture, one.runner.device = on_a_cpu, torch.device("cuda")
        assert fragment in str(capture_graphs(one.runner, one.rounds, one.options))

    def test_prefills_count_as_progress_and_only_those_that_save_time_are_kept(self, monkeypatch):
        times, events = iter([1.0, 1.6, *[1.0] * 3, 1.0, 1.0, 0.2]), list[tuple[int, int]]()
        monkeypatch.setattr("attnplug_engine.graphs.prefill._seconds", lambda *given, **how: next(times))
        one = engine(**NGRAM)
        one.rounds.capture(SIZES, Recorded(), lambda *event: events.append(event), prefills=PREFILLS, keep_all=False)
        assert one.rounds.prefill_graphs.sizes == PREFILLS[:2]
        assert events == [(number, 5) for number in range(1, 6)]


class TestCapture:
    def test_the_smallest_graph_that_holds_all_tokens_is_replayed(self):
        graphs = captured(engine()).runner.graphs.prefill

        def fitting(*counts):
            entries = tuple(StepEntry(None, 0, (1,) * count, True) for count in counts)
            found = graphs.fitting(Step(ForwardMode.EXTEND, entries, (), ()))
            return found and found.size

        assert [fitting(1), fitting(4), fitting(2, 3), fitting(22), fitting(23)] == [4, 4, 9, 22, None]

    def test_a_step_of_more_requests_than_were_captured_runs_eagerly(self, monkeypatch):
        """Chunk kernels of linear layers read and write a state for every captured request, so few are captured."""
        monkeypatch.setattr("attnplug_engine.graphs.prefill._MAX_STATES", 2)
        graphs, each = captured(engine(HYBRIDS[0])), SamplingParams(max_tokens=2)
        prefill = graphs.runner.graphs.prefill
        assert prefill.requests == 2 and captured(engine()).runner.graphs.prefill.requests == 5
        assert tokens(graphs, prompts(3, 4), each) == tokens(engine(HYBRIDS[0]), prompts(3, 4), each)
        assert graphs.statistics.eager_prefills == 1 and not graphs.statistics.replayed_prefills
        tokens(graphs, prompts(2, 4), each)
        assert graphs.statistics.replayed_prefills == 1

    def test_prefills_come_first_and_all_count_as_progress(self):
        events: list[tuple[int, int]] = []
        order: list[tuple[str, int]] = []
        one = engine()
        original = one.runner.backend.capture

        def capture(geometry, memory):
            order.append((str(geometry.mode), geometry.rows))
            return original(geometry, memory)

        one.runner.backend.capture = capture
        capture_steps(one.runner, SIZES, Recorded(), lambda done, total: events.append((done, total)), prefills=(4, 9))
        assert order == [("extend", 9), ("extend", 4), ("decode", 4), ("decode", 2)]
        assert events == [(number, 4) for number in (1, 2, 3, 4)]
        assert one.runner.graphs.prefill.sizes == (4, 9)

    def test_a_batch_is_marked_and_planned_before_every_replay(self):
        """B2: a forward plans no captured prefill."""
        one = captured(engine())
        planned, calls = one.runner.backend.planned, []
        plan = one.runner.attention.capture
        one.runner.attention.capture = lambda batch: calls.append(batch.forward_mode) or plan(batch)
        one.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
        assert [str(mode) for mode in calls] == ["extend"] and one.runner.backend.planned == planned

    def test_what_saves_no_time_is_not_kept(self, monkeypatch):
        """Above some size the device takes longer than the host. Much longer prefills are not even captured."""
        times, captures = iter([1.0, 1.6, 1.0, 1.4, 1.3, 1.0, 1.0, 0.2]), list[Any]()
        monkeypatch.setattr("attnplug_engine.graphs.prefill._seconds", lambda *given, **how: next(times))
        one = engine()

        def record(run):
            captures.append(run)
            return Recorded()(run)

        capture_steps(one.runner, SIZES, record, prefills=PREFILLS, keep_all=False)
        assert one.runner.graphs.prefill.sizes == PREFILLS[:1]
        assert len(captures) == 3 + 2 * len(SIZES)  # two prefills, one of which is checked, and decode steps
        each = SamplingParams(max_tokens=3)
        assert tokens(one, [[1, 2, 3]], each) == tokens(engine(), [[1, 2, 3]], each)
        assert one.statistics.replayed_prefills

    def test_ranks_go_by_the_one_that_saves_least(self, monkeypatch):
        """Each rank times its own steps. All keep the same sizes and replay the same steps."""
        here = threading.local()

        def seconds(run, device, *, waits):
            here.timed += waits
            return 1.6 if waits and here.rank and here.timed == 1 else 1.0 - 0.5 * waits  # the first is the largest

        monkeypatch.setattr("attnplug_engine.graphs.prefill._seconds", seconds)

        def serve(parallel):
            here.rank, here.timed = parallel.rank, 0
            one = engine(parallel=parallel)
            capture_steps(one.runner, SIZES, Recorded(), prefills=PREFILLS, keep_all=False)
            found = tokens(one, prompts(6), SamplingParams(max_tokens=3))
            return one.runner.graphs.prefill.sizes, found, one.statistics.replayed_prefills

        first, second = in_ranks(2, serve)
        assert first == second and first[0] == PREFILLS[:2] and first[2] > 0
        assert first[1] == tokens(engine(), prompts(6), SamplingParams(max_tokens=3))

    def test_the_host_s_newest_pages_are_those_of_the_replay(self, monkeypatch):
        """On a GPU the table's mirror is separate memory, which is updated only when it is requested."""
        one, texts, each = engine(), prompts(3, 9), SamplingParams(max_tokens=1)
        table, apart = one.runner.table, torch.zeros(0)

        def mirror():
            nonlocal apart
            whole = torch.from_numpy(table._page_table)
            apart = apart if len(apart) else whole.clone()
            return apart.copy_(whole)

        monkeypatch.setattr(table, "mirror", mirror)
        captured(one)
        assert tokens(one, texts, each) == tokens(engine(), texts, each)
        assert one.statistics.replayed_prefills and not one.statistics.eager_prefills

    def test_padding_is_a_token_that_there_is(self):
        """An earlier step, in which the host did not know a token, may have left -1 in its place."""
        one = captured(engine())
        inputs, row = one.runner.graphs.prefill.inputs, one.runner.table.max_requests
        request = Request(0, (1, 2, 3), SamplingParams(max_tokens=2))
        for ids in ((-1, 5, 6), (4,)):
            step = Step(ForwardMode.EXTEND, (StepEntry(request, 0, ids, True),), (), (row,))
            for _ in range(2):  # both copies of the host's side
                with torch.inference_mode():
                    inputs.fill(step, 4, one.runner.sampler)
        assert inputs.ids.tolist() == [4] + [0] * (PREFILLS[-1] - 1)

    def test_times_are_the_host_s_own_or_until_the_device_is_done(self, monkeypatch):
        clock, busy = [0.0], [0.0]
        monkeypatch.setattr("time.perf_counter", lambda: clock[0])

        def wait(device):
            clock[0], busy[0] = clock[0] + busy[0], 0.0

        monkeypatch.setattr("torch.cuda.synchronize", wait)

        def run():
            clock[0] += 2
            busy[0] += 5

        device = torch.device("cuda")
        assert (_seconds(run, device, waits=False), _seconds(run, device, waits=True)) == (2, 7)

    @pytest.mark.parametrize("keep_all", [True, False], ids=["demanded", "by default"])
    def test_a_graph_that_does_not_fit_is_an_error_or_left_out(self, keep_all, monkeypatch):
        """Sizes that the user asked for are an error. Default sizes are left out."""
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (3 << 20, 9 << 20))
        monkeypatch.setattr("attnplug_engine.graphs.step_graphs.runtime_of", lambda _: runtime_of(torch.device("cuda")))
        monkeypatch.setattr("attnplug_engine.graphs.prefill._seconds", lambda *given, waits: float(not waits))
        one, capture = engine(), PrefillGraphs.capture

        def full(graphs, size, how):
            if size == 9:
                raise torch.OutOfMemoryError
            return capture(graphs, size, how)

        monkeypatch.setattr(PrefillGraphs, "capture", full)
        if keep_all:
            with pytest.raises(PoolError, check=naming(9, 22, "3 MiB")) as caught:
                capture_steps(one.runner, SIZES, Recorded(), prefills=PREFILLS)
            assert {"cuda_graph_prefill_sizes", "disable_prefill_cuda_graph"} <= set(caught.value.settings)
        else:
            capture_steps(one.runner, SIZES, Recorded(), prefills=PREFILLS, keep_all=False)
            assert one.runner.graphs.prefill.sizes == (4, 22) and one.runner.graphs.decode.sizes == SIZES


class StaleLengths(AnyBatch):
    """Keeps the new lengths of its first batch."""

    def refill(self, plan, geometry):
        if geometry.new_lens is None or not plan.metadata.rows:
            super().refill(plan, geometry)


class EqualLengths(AnyBatch):
    """Faulty backend that assumes equally many new tokens in all requests."""

    def refill(self, plan, geometry):
        if geometry.new_lens is not None:
            live = int((geometry.new_lens > 0).sum())
            news = geometry.new_lens.clone()
            news[:live] = news[:live].sum() // max(live, 1)
            geometry = replace(geometry, new_lens=torch.minimum(news, geometry.seq_lens))
        super().refill(plan, geometry)


class WritesPadding(AnyBatch):
    """Padded tokens are written to the first row of all."""

    def refill(self, plan, geometry):
        super().refill(plan, geometry)
        plan.new_slots.clamp_(min=0)


class StaleStateLengths(AnyLinear):
    """Keeps the new lengths of its first batch."""

    def _rows(self, batch):
        geometry = batch.geometry
        if geometry.captured and geometry.new_lens is not None and geometry.new_lens.any():
            self.first = getattr(self, "first", geometry.new_lens.clone())
            batch = ForwardBatch(replace(geometry, new_lens=self.first))
        yield from super()._rows(batch)


class KeepsPaddedStates(AnyLinear):
    """Advances the last slot by padded tokens."""

    def forward_linear(self, inputs, layer, batch):
        if batch.geometry.captured and batch.geometry.new_lens is not None:
            self._pool.recurrent(layer.layer_id)[-1] += 1
        return super().forward_linear(inputs, layer, batch)


@pytest.mark.parametrize(("linear", "fault"), [(StaleStateLengths, "result"), (KeepsPaddedStates, "writes")])
def test_a_linear_backend_that_claims_too_much_is_found_out(linear, fault, native):
    native(linear=linear)
    with pytest.raises(CaptureMismatch, check=having("naive_linear", "extend")) as caught:
        captured(engine(HYBRIDS[0], state_slots=9))
    assert caught.value.fault == fault and caught.value.kind.is_linear


class WritesBefore(AnyBatch):
    """Also writes the row before the new ones of the request that has the fewest."""

    def refill(self, plan, geometry):
        super().refill(plan, geometry)
        if geometry.new_lens is not None and (live := int((geometry.new_lens > 0).sum())):
            one = int(geometry.new_lens[:live].argmin())
            row = int(geometry.seq_lens[one] - geometry.new_lens[one]) - 1
            if row >= 0:
                page = int(geometry.page_table[one, row // geometry.page_size])
                self.context.pools.mha.keys(0)[page, row % geometry.page_size] = 3.0


def test_a_row_before_the_new_ones_is_not_the_captured_extends_to_write(native):
    native(WritesBefore)
    with pytest.raises(BackendError, check=having("22 tokens", "writes", settings=("disable_cuda_graph",))):
        captured(engine(), (22,))


@pytest.mark.parametrize(
    ("kind", "faults"),
    [(StaleLengths, {"result"}), (EqualLengths, {"result", "writes"}), (WritesPadding, {"writes"})],
)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.sample(3)
def test_a_backend_that_claims_too_much_is_found_out(model, kind, faults, native):
    native(kind)
    with pytest.raises(CaptureMismatch, check=having("cuda_graph ALWAYS", "extend")) as caught:
        captured(engine(model))
    assert caught.value.fault in faults


class TestOptions:
    def test_a_default_pads_by_half_at_most_and_holds_no_more_than_a_step(self):
        for most in (3, 16, 100, 512, 9000):
            sizes = default_prefill_sizes(most)
            assert sizes[-1] == min(most, 8192) and len(sizes) < 18
            assert all(size <= 2 * before for before, size in pairwise(sizes))

    @pytest.mark.parametrize(
        ("sizes", "named"),
        [
            ((), ["disable_prefill_cuda_graph"]),
            ((0,), [0]),
            ((99,), [99, 24, "chunked_prefill_size"]),
            ((8, 8), ["8, 8"]),
            ("8", ["'8'"]),
        ],
    )
    def test_an_invalid_list_is_refused(self, sizes, named):
        with pytest.raises(UsageError, check=naming(*named)):
            EngineOptions(max_batch=8, chunked_prefill_size=24, cuda_graph_prefill_sizes=sizes)

    @pytest.mark.parametrize(
        "other",
        [
            {"disable_cuda_graph": True},
            {"disable_prefill_cuda_graph": True},
            {"check_layers": True},
        ],
        ids=lambda given: next(iter(given)),
    )
    def test_they_cannot_be_demanded_of_what_does_without(self, other):
        with pytest.raises(UsageError, check=having(settings=("cuda_graph_prefill_sizes", next(iter(other))))):
            EngineOptions(cuda_graph_prefill_sizes=(16,), **other)

    def test_they_cannot_be_demanded_of_a_cpu(self):
        with pytest.raises(UsageError, check=having("cpu", settings=("cuda_graph_prefill_sizes", "device"))):
            engine(cuda_graph_prefill_sizes=(16,))

    @pytest.mark.parametrize(
        ("kind", "sizes", "named", "setting"),
        [
            (RefilledNative, (16,), "torch_native", "attention_backend"),
            (AnyBatch, (16, 64), 64, "context_length"),
        ],
    )
    def test_what_cannot_be_captured_as_demanded_is_refused(self, kind, sizes, named, setting, native):
        native(kind)
        one = engine()
        one.options = replace(one.options, chunked_prefill_size=64, cuda_graph_prefill_sizes=sizes)
        with pytest.raises(UsageError, check=having(named, settings=("cuda_graph_prefill_sizes", setting))):
            _prefill_sizes(one.runner, one.rounds, one.options, ())

    @pytest.mark.parametrize(
        ("settings", "keeps", "fragment"),
        [
            ({}, True, "prefill of up to 16, 24 tokens, 7 MiB (level ALWAYS)"),
            ({}, False, "7 MiB (level ALWAYS); no prefill: the GPU needs longer for it than the host"),
            ({"cuda_graph_prefill_sizes": (8, 16)}, False, "prefill of up to 8, 16 tokens, 7 MiB (level ALWAYS)"),
            ({"disable_prefill_cuda_graph": True}, True, "7 MiB (level ALWAYS); no prefill: turned off"),
        ],
    )
    def test_an_engine_says_what_it_captured(self, settings, keeps, fragment, monkeypatch):
        one, free = engine(), iter([9 << 20, 2 << 20])
        one.options = replace(one.options, **settings)
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (next(free), 0))
        monkeypatch.setattr("attnplug_engine.serving.start_up.GraphCapture", lambda device: Recorded())
        monkeypatch.setattr(
            "attnplug_engine.graphs.step_graphs.CaptureCheck", lambda *a: SimpleNamespace(run=lambda *b: None)
        )
        monkeypatch.setattr("attnplug_engine.graphs.prefill._seconds", lambda *given, waits: waits != keeps)
        one.runner.device = torch.device("cuda")
        monkeypatch.setattr("attnplug_engine.graphs.step_graphs._min_over_ranks", lambda runner, value: value)
        assert (
            str(capture_graphs(one.runner, one.rounds, one.options)) == f"decode with 1, 2, 4, 5 requests, {fragment}"
        )
        assert (one.runner.graphs.prefill is None) is ("no prefill" in fragment)


class TestAside:
    """A backend that prefills and cannot be captured, beside one that decodes and can."""

    @pytest.fixture(autouse=True)
    def both(self, monkeypatch: pytest.MonkeyPatch):
        def build(selection, context):
            can, roles = selection.chosen(Role.DECODE).spec.capabilities, frozenset({Role.PREFILL, Role.DECODE})
            made = {
                name: kind(context.for_backend(name, can, roles=roles))
                for name, kind in (("eager", TorchNativeBackend), ("captured", over(AnyBatch)))
            }
            serving = {Role.PREFILL: "eager", Role.DECODE: "captured"}
            return FastestBackend(made, serving, captured_extends="captured")

        monkeypatch.setattr("attnplug_engine.execution.runner.build_selection", build)

    @pytest.mark.parametrize("model", MODELS[:2])
    def test_short_prefills_are_replayed_on_the_one_that_can(self, model):
        """MLA extends absorbed there, and as MHA where it runs eagerly."""
        each = [SamplingParams(max_tokens=2 + number % 5) for number in range(12)]
        graphs, eager = captured(engine(model, overlap=True)), engine(model)
        assert tokens(graphs, prompts(), each) == tokens(eager, prompts(), each)
        counts = graphs.statistics
        assert counts.replayed_prefills > 2 and counts.eager_prefills > 2
        served = {"eager": counts.eager_prefills, "captured": counts.replayed_prefills}
        assert counts.backend_usage.by_backend()["prefill"] == served

    @pytest.mark.parametrize("model", [0, 1])
    def test_attention_that_takes_longer_than_the_graph_saves_is_left_to_who_prefills(self, model, monkeypatch):
        """Pairs of a new row and one that it may attend to, at 90 TFLOP/s in all layers. Launches are four fifths of an
        eager step."""
        spec = load_model(MODELS[model])
        layer = spec.full_layers[0]
        width = 2 * layer.head_dim if layer.mla is None else layer.mla.row_dim + layer.mla.kv_lora_rank
        saved = 40.5 * 2 * layer.num_heads * width * len(spec.layers) / 9e13
        monkeypatch.setattr("attnplug_engine.graphs.prefill._seconds", lambda *given, waits: 0.8 * saved * (not waits))
        one = engine(MODELS[model])
        capture_steps(one.runner, SIZES, Recorded(), prefills=PREFILLS, keep_all=False)
        graphs = one.runner.graphs.prefill

        def fits(*requests: tuple[int, int]) -> bool:
            entries = tuple(StepEntry(None, before, (1,) * new, True) for before, new in requests)
            return graphs.fitting(Step(ForwardMode.EXTEND, entries, (), ())) is not None

        assert fits((18, 2)) and not fits((19, 2)) and fits((15, 2), (5, 1)) and not fits((15, 2), (6, 1))

    @pytest.mark.parametrize(
        ("captured_us", "eager_us", "saved_us", "replayed"),
        [(30, 20, 10, False), (30, 20, 40, True), (30, 31, 10, True), (30, 20, 29, False)],
    )
    @pytest.mark.sample(2)
    def test_measured_times_are_compared_with_each_other_and_with_what_the_graph_saves(
        self, captured_us, eager_us, saved_us, replayed, monkeypatch
    ):
        """Microseconds of all layers."""
        monkeypatch.setattr("attnplug_engine.graphs.prefill._seconds", lambda *_, waits: 8e-7 * saved_us * (not waits))
        one = engine()
        layers = len(one.runner.spec.full_layers)
        captured, eager = (ExtendSchedule({"measured": {(1, 4, 4): us / layers}}) for us in (captured_us, eager_us))
        one.runner.extend_times = ExtendTimes(captured, eager, layers, one.runner.attention.decodes_apart)
        capture_steps(one.runner, SIZES, Recorded(), prefills=PREFILLS, keep_all=False)
        step = Step(ForwardMode.EXTEND, (StepEntry(None, 0, (1,) * 4, True),), (), ())
        assert (one.runner.graphs.prefill.fitting(step) is not None) is replayed

    @pytest.mark.parametrize("alone", [False, True])
    def test_without_times_too_unless_the_captured_one_prefills_alone(self, alone, native):
        if alone:
            native()
        graphs = captured(engine()).runner.graphs.prefill
        step = Step(ForwardMode.EXTEND, (StepEntry(None, 2**40, (1,), True),), (), ())
        assert (graphs.fitting(step) is not None) is alone
