"""Captured prefills with a fake capture that runs the same calls again: everything but the CUDA graph itself.

Real graphs are tested on a GPU, in ``tests/test_engine_graphs.py``.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from captured_prefills import FURTHER, HYBRIDS, MODELS, PREFILLS, SIZES, captured, engine, prompts, tokens
from refilled_native import AnyBatch, AnyRagged, Recorded, RefilledNative, over
from thread_ranks import in_ranks

from attnplug import ExtendPath, ForwardMode, PoolError, Role
from attnplug.auto.fastest import FastestBackend
from attnplug.host import ExtendPolicy
from attnplug.machine.runtime import runtime_of
from attnplug_engine import SamplingParams
from attnplug_engine.graphs.capture_check import CaptureMismatch
from attnplug_engine.graphs.prefill import PrefillGraphs, _seconds
from attnplug_engine.graphs.step_graphs import capture_steps
from attnplug_engine.request import Request
from attnplug_engine.scheduling.step import Step, StepEntry
from attnplug_testing.errors import naming

pytestmark = pytest.mark.usefixtures("native")


class TestMLAAsMHA:
    """C1, issue 39: prefills of MLA models without prefixes are captured as MHA, the others absorbed."""

    @pytest.mark.parametrize("model", ["tiny:deepseek_v3", "tiny:kimi_linear"])
    @pytest.mark.parametrize("overlap", [False, True], ids=["alone", "overlapped"])
    @pytest.mark.parametrize("fill", [0, 6])
    @pytest.mark.sample(2)
    def test_tokens_are_those_of_eager_prefills(self, model, overlap, fill, native):
        """Prompts of up to 30 tokens in steps of up to 23, with decoding requests, padded by empty requests."""
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

    def test_a_backend_that_takes_captured_prefills_alone_runs_them_so(self, monkeypatch):
        """A9: the others run on the backend that prefills, which cannot be captured."""

        def build(selection, context):
            can, roles = selection.chosen(Role.DECODE).spec.capabilities, frozenset({Role.PREFILL, Role.DECODE})
            children = {
                name: kind(context.for_backend(name, can, roles=roles, options=None))
                for name, kind in (("prefill", RefilledNative), ("decode", over(AnyRagged, RefilledNative)))
            }
            return FastestBackend(children, {Role.PREFILL: "prefill", Role.DECODE: "decode"}, captured_extends="decode")

        params = SamplingParams(max_tokens=3)
        eager = tokens(engine("tiny:deepseek_v3"), prompts(), params)
        monkeypatch.setattr("attnplug_engine.execution.runner.build_selection", build)
        graphs = captured(engine("tiny:deepseek_v3", chunked_prefill_size=23))
        assert tokens(graphs, prompts(), params) == eager
        counts, runner = graphs.statistics, graphs.runner
        assert counts.replayed_prefills and counts.eager_prefills
        assert runner.backend.children["decode"].captured_calls >= len(runner.spec.layers)

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
        """Prompts of up to 30 tokens, in chunks and with decoding requests; steps above 22 tokens run eagerly."""
        each = [SamplingParams(max_tokens=2 + number % 5) for number in range(12)]
        graphs, eager = captured(engine(model, overlap=overlap, chunked_prefill_size=23)), engine(model)
        assert tokens(graphs, prompts(), each) == tokens(eager, prompts(), each)
        counts = graphs.statistics
        assert counts.replayed_prefills > 2 and counts.eager_prefills > 2
        assert eager.statistics.replayed_prefills == 0 and eager.statistics.eager_prefills > 3

    @pytest.mark.parametrize("model", [*HYBRIDS, *FURTHER])
    def test_linear_states_move_on_in_replayed_prefills(self, model):
        """Prompts in chunks and with decoding requests. Padded requests and tokens have no state."""
        each = [SamplingParams(max_tokens=2 + number % 5) for number in range(5)]
        graphs, eager = captured(engine(model, overlap=True, chunked_prefill_size=9)), engine(model)
        assert tokens(graphs, prompts(5, 15), each) == tokens(eager, prompts(5, 15), each)
        assert graphs.statistics.replayed_prefills > 3 and not graphs.statistics.eager_prefills
        states = graphs.runner.states
        assert states.free_slots == states.num_slots

    def test_rows_in_host_memory_are_brought_in_by_the_graph(self):
        """HiSparse: prompts in chunks with staged prefixes, and requests that decode from hot buffers. The number of
        moved rows equals that without graphs."""
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
        """A prefix hit ends at a checkpoint; its state was copied after a replayed prefill."""
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
        """An earlier step may have left -1 for a token that the host did not know."""
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
        """A requested size is an error. Default sizes are left out."""
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
