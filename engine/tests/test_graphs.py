"""Captured decode steps with a fake capture that runs the same calls again: everything but the CUDA graph itself.

Real graphs are tested on a GPU, in ``tests/test_engine_graphs.py``.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from overclaiming_native import (
    EarlyLengths,
    EarlyPages,
    EarlySlots,
    LoudPadding,
    NotANumber,
    StaleLengths,
    StalePages,
    StaleSlots,
    WritesPadding,
)
from refilled_native import Recorded, RefilledDelta, RefilledNative, build, captured

from attnplug import BackendError, Claims, DType, GraphLevel, PlanError, PoolError, UsageError, WorkspaceKind
from attnplug.contract.batch import BackendId
from attnplug.declare.errors import WorkspaceError
from attnplug.host import TINY_CONFIGS
from attnplug.machine.runtime import runtime_of
from attnplug.wrappers.forwarding import SplitBackend
from attnplug_engine import Engine, EngineOptions, SamplingParams
from attnplug_engine.execution.runner import Phase
from attnplug_engine.graphs.capture_check import CaptureMismatch
from attnplug_engine.graphs.step_graphs import capture_steps
from attnplug_engine.serving.start_up import capture_graphs, limited_by
from attnplug_engine.settings.capture_sizes import default_sizes
from attnplug_testing.errors import having, missing_values, naming

MODELS = ["tiny:llama", "tiny:deepseek_v3", "tiny:glm_moe_dsa"]
HYBRIDS = ["tiny:qwen3_next", "tiny:kimi_linear"]
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11], [3, 1, 4, 1, 5], [9, 2, 6]]
SIZES = (1, 2, 4)


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch):
    """Let every engine run on the backend that can be "captured" here."""

    def use(kind: type[RefilledNative] = RefilledNative, linear: type[RefilledDelta] = RefilledDelta) -> None:
        monkeypatch.setattr(
            "attnplug_engine.execution.runner.build_selection", partial(build, kind=kind, linear=linear)
        )

    use()
    return use


def engine(model: str = MODELS[0], **settings: Any) -> Engine:
    return Engine(model, device="cpu", **{"page_size": 4, "max_batch": 5, "prefix_cache": False, **settings})


def params(new: int = 12, **sampling: Any) -> list[SamplingParams]:
    """For each prompt, of different lengths, so that batches shrink."""
    return [SamplingParams(max_tokens=max(new - 2 * number, 2), **sampling) for number in range(len(PROMPTS))]


def tokens(one: Engine, each: list[SamplingParams]) -> list[list[int]]:
    return [completion.token_ids for completion in one.generate(PROMPTS, each)]


class TestTokens:
    @pytest.mark.parametrize("overlap", [False, True], ids=["alone", "overlapped"])
    @pytest.mark.parametrize("model", MODELS)
    @pytest.mark.sample(2)
    def test_replayed_steps_give_the_tokens_of_eager_ones(self, model, overlap, native):
        """Batches of 5 run eagerly, of 4 and 2 as captured, of 3 and 1 padded or not."""
        eager, graphs = engine(model), captured(engine(model, overlap=overlap), (2, 4))
        assert tokens(graphs, params()) == tokens(eager, params())
        counts = graphs.statistics
        assert counts.eager_steps and counts.replayed_steps > counts.eager_steps
        assert eager.statistics.replayed_steps == 0

    @pytest.mark.parametrize("kv_dtype", [DType.FLOAT32, "fp8_ds_mla"])
    def test_rows_with_scales_of_their_own_are_captured_as_others_are(self, kv_dtype, native, tmp_path):
        """A page of fp8 index keys has its scales after all keys: a key is not one row of its bytes."""
        (tmp_path / "config.json").write_text(json.dumps({**TINY_CONFIGS["glm_moe_dsa"], "kv_lora_rank": 128}))
        types = {"kv_dtype": kv_dtype, "index_dtype": DType.FLOAT8_E4M3, "random_weights": True}
        eager, graphs = engine(str(tmp_path), **types), captured(engine(str(tmp_path), **types), (2, 4))
        assert tokens(graphs, params(6)) == tokens(eager, params(6))
        assert graphs.statistics.replayed_steps

    @pytest.mark.parametrize("model", HYBRIDS)
    def test_linear_states_move_on_in_replayed_steps(self, model, native):
        """Padded requests have no state: those of the others are as in eager steps."""
        eager, graphs = engine(model), captured(engine(model, overlap=True), (2, 4))
        assert tokens(graphs, params(8)) == tokens(eager, params(8))
        assert graphs.statistics.replayed_steps > 3
        assert graphs.runner.states.free_slots == graphs.runner.states.num_slots

    def test_drawn_tokens_are_the_same(self, native):
        drawn = params(temperature=0.9, top_k=20, top_p=0.95, seed=3)
        mixed = [replace(one, temperature=0.0) if number % 2 else one for number, one in enumerate(drawn)]
        assert tokens(captured(engine(overlap=True), SIZES), mixed) == tokens(engine(), mixed)

    @pytest.mark.parametrize("fill", [0, 1, 6])
    def test_padding_writes_to_no_requests_pages(self, fill, native):
        """Padded requests write to no request's pages. If they have a length, pages are reserved for them."""
        native(partial(RefilledNative, fill=fill))
        graphs, eager = captured(engine(num_pages=24), (4,)), engine(num_pages=24)
        reserved = -(-fill // 4)
        assert graphs.runner.allocator.free_pages == 24 - reserved
        caches = []
        for one in (graphs, eager):
            pool = one.runner.pools.mha
            for layer in pool.layer_ids:
                pool.keys(layer).fill_(7.0)
                pool.values(layer).fill_(7.0)
            assert one.generate(PROMPTS[:3], params(6)[:3])
            rows = torch.stack([pool.keys(layer).flatten(1) for layer in pool.layer_ids])
            caches.append((rows != 7.0).any(-1).sum(-1))
        touched = min(reserved, 1)  # a padded request writes its last row
        assert caches[0].tolist() == [count + touched for count in caches[1].tolist()]

    @pytest.mark.parametrize(
        ("settings", "fragment"),
        [
            ({"num_pages": 2}, "take 2 of 2 free pages, and none is left for others; give `num_pages` of 3 or more"),
            ({"context_length": 5}, "have 6 tokens, and the context holds 5; give a `context_length` of 6 or more"),
        ],
    )
    def test_padding_that_does_not_fit_is_refused(self, settings, fragment, native):
        native(partial(RefilledNative, fill=6))
        with pytest.raises(PoolError) as caught:
            captured(engine(**settings), (4,))
        assert fragment in caught.value.message and caught.value.settings == (*settings, "disable_cuda_graph")

    def test_log_probabilities_come_from_the_replayed_logits(self, native):
        asked = params(6, logprobs=2)
        results = [one.generate(PROMPTS, asked) for one in (captured(engine(), (4,)), engine())]
        for mine, theirs in zip(*results, strict=True):
            assert [one.token_id for one in mine.logprobs] == mine.token_ids == theirs.token_ids
            found, expected = ([one.logprob for one in each.logprobs] for each in (mine, theirs))
            assert found == pytest.approx(expected, abs=1e-4)

    @pytest.mark.parametrize("replayed", [False, True], ids=["prefill", "replay"])
    def test_a_request_whose_logits_are_not_finite_ends_alone(self, replayed, native):
        graphs, eager = captured(engine(overlap=True), (4,)), engine()
        bad = 13  # its embedding is NaN, and so are all later states of a request with this token
        if replayed:
            bad = tokens(eager, params())[1][1]
        for one in (graphs, eager):
            one.runner.model.embedding[bad] = float("nan")
        prompts = [PROMPTS[0], PROMPTS[1] if replayed else [*PROMPTS[1], bad], PROMPTS[2], PROMPTS[3]]
        mine, theirs = (one.generate(prompts, SamplingParams(max_tokens=5)) for one in (graphs, eager))
        assert [one.token_ids for one in mine] == [one.token_ids for one in theirs]
        assert [one.finish_reason for one in mine] == [one.finish_reason for one in theirs]
        assert mine[1].finish_reason == "error" and mine[0].finish_reason == "length"
        assert len(mine[1].token_ids) == 2 * replayed

    def test_the_smallest_step_that_holds_a_batch_is_replayed(self, native):
        graphs = captured(engine(), (2, 4)).runner.graphs.decode
        found = [graphs.fitting(requests) for requests in (1, 2, 3, 4, 5)]
        assert [step and step.size for step in found] == [2, 2, 4, 4, None]

    @pytest.mark.parametrize("overlap", [False, True], ids=["alone", "overlapped"])
    def test_a_preempted_request_that_decodes_at_once_runs_its_own_token(self, overlap, native):
        """The prefix cache may hold all but its newest token, and another request may have used its row meanwhile."""
        eager = engine(prefix_cache=True, ignore_eos=True)
        graphs = captured(engine(prefix_cache=True, ignore_eos=True, overlap=overlap, num_pages=13), SIZES)
        drawn = Random(45)
        prompts = [[drawn.randrange(128) for _ in range(drawn.randint(1, 20))] for _ in range(6)]
        each = [SamplingParams(drawn.randint(4, 20)) for _ in prompts]
        found, expected = ([one.token_ids for one in each_of.generate(prompts, each)] for each_of in (graphs, eager))
        assert graphs.scheduler.preemptions and found == expected

    @pytest.mark.parametrize("overlap", [False, True], ids=["alone", "overlapped"])
    def test_a_step_that_was_dropped_leaves_no_token(self, overlap, native, monkeypatch):
        """It ran, and its tokens were lost on the way to the host: its requests run their newest known tokens."""
        graphs = captured(engine(overlap=overlap), (4,))
        requests = [graphs.add(prompt, SamplingParams(8)) for prompt in PROMPTS[:3]]
        for number in range(100):
            if not graphs.scheduler.has_work:
                break
            with monkeypatch.context() as broken:
                if number % 3 == 2:
                    broken.setattr("attnplug_engine.execution.in_flight.StepInFlight.tokens", lambda _: 1 / 0)
                with suppress(ZeroDivisionError):
                    graphs.step()
        assert [request.output for request in requests] == [
            one.token_ids for one in engine().generate(PROMPTS[:3], SamplingParams(8))
        ]


class TestPhases:
    def test_a_capture_marks_its_batch_so_that_no_forward_plans_it(self, native):
        """B2: nothing but the capture's own hooks plans, neither then nor at a replay."""
        one = captured(engine(), SIZES)
        for size in SIZES:
            assert not one.runner.graphs.decode.fitting(size).batch.needs_forward_metadata_init()
        planned = one.runner.backend.planned
        request = one.add(PROMPTS[0], SamplingParams(max_tokens=4))
        one.step()
        prefills = one.runner.backend.planned - planned
        while one.step():
            pass
        assert len(request.output) == 4 and one.runner.backend.planned == planned + prefills

    def test_a_captured_batch_is_marked_and_has_a_bound_of_its_length(self, native):
        geometry = captured(engine(context_length=10), (1,)).runner.graphs.decode.fitting(1).batch.geometry
        assert geometry.captured and geometry.max_seq_len == 10

    def test_every_replay_is_planned_by_the_backend_before_it(self, native):
        """This includes the replays of the check before serving."""
        one, planned = engine(), []
        plan = one.runner.attention.capture

        def capture(batch, *, in_capture=False):
            planned.append(in_capture)
            return plan(batch, in_capture=in_capture)

        one.runner.attention.capture = capture
        captured(one, (1,))
        assert planned == [True, False, False], "the capture, and two rounds of one kind of layer"
        one.generate(PROMPTS[:1], SamplingParams(max_tokens=4))
        assert planned[3:] == [False] * 3 == [False] * one.statistics.replayed_steps

    def test_padded_requests_are_at_a_position_that_there_is(self, native):
        one = captured(engine(), (4,))
        one.generate(PROMPTS[:1], SamplingParams(max_tokens=2))
        assert one.runner.graphs.decode.fitting(1).batch.positions.tolist() == [3, 0, 0, 0]

    def test_an_unmarked_capture_would_be_planned_again(self, native, monkeypatch):
        """B2: without the mark, a capture plans again and fails, so the test above would notice."""
        monkeypatch.setattr("attnplug.ForwardBatch.mark_forward_metadata_ready", lambda self: None)
        with pytest.raises(PlanError, check=naming("claims.needs_cpu_seq_lens")):  # captured: no host lengths
            captured(engine(), SIZES)

    def test_largest_first_with_progress(self, native):
        events: list[tuple[int, int]] = []
        order: list[int] = []
        one = engine()
        original = one.runner.backend.capture

        def capture(geometry, memory):
            order.append(geometry.requests)
            return original(geometry, memory)

        one.runner.backend.capture = capture
        capture_steps(one.runner, SIZES, Recorded(), lambda done, total: events.append((done, total)))
        assert order == [4, 2, 1] and events == [(1, 3), (2, 3), (3, 3)]
        assert one.runner.graphs.decode.sizes == (1, 2, 4)

    def test_a_graph_that_does_not_fit_is_named_with_those_before_it_and_what_to_lower(self, native, monkeypatch):
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (3 << 20, 9 << 20))
        monkeypatch.setattr("attnplug_engine.graphs.step_graphs.runtime_of", lambda _: runtime_of(torch.device("cuda")))
        one, capture = engine(), Recorded()

        def full(done, total):
            if done == 2:
                raise torch.OutOfMemoryError

        with pytest.raises(PoolError, check=naming(2, "4, 2", "3 MiB", 9)) as caught:
            capture_steps(one.runner, SIZES, capture, full)
        assert "cuda_graph_batch_sizes" in caught.value.settings

    def test_phases_follow_each_other_once(self, native):
        one = engine()
        assert one.runner.phase is Phase.BUILD
        captured(one, SIZES)
        assert one.runner.phase is Phase.SERVE
        with pytest.raises(BackendError, check=naming("serve", "warm up")):
            captured(one, SIZES)

    def test_nothing_is_captured_after_the_first_step(self, native):
        one = engine()
        one.generate(PROMPTS[:1], SamplingParams(max_tokens=1))
        with pytest.raises(BackendError, check=naming("serve", "warm up")):
            captured(one, SIZES)

    def test_the_workspace_does_not_grow_after_a_capture(self, native):
        one, kind = engine(), WorkspaceKind("scratch")
        one.runner.workspace.request("early", "cpu", kind, 8)
        captured(one, SIZES)
        with pytest.raises(WorkspaceError, check=naming("late", 16, 8)):
            one.runner.workspace.request("late", "cpu", kind, 16)

    def test_inputs_and_outputs_stay_where_they_are(self, native):
        one = captured(engine(), SIZES)
        graphs, runner = one.runner.graphs.decode, one.runner

        def addresses() -> list[int]:
            held = (graphs.inputs.rows, graphs.inputs.seq_lens, graphs.sampled, runner.tokens, runner.table.mirror())
            return [tensor.data_ptr() for tensor in held]

        before = addresses()
        tokens(one, params())
        assert addresses() == before


class TestOverclaims:
    @pytest.mark.parametrize("kind", [StaleLengths, StalePages, EarlyPages, EarlyLengths])
    @pytest.mark.parametrize("model", MODELS)
    @pytest.mark.sample(5)
    def test_a_backend_that_keeps_what_was_captured_is_found_out(self, model, kind, native):
        native(kind)
        with pytest.raises(BackendError) as caught:
            captured(engine(model), (3,))
        assert not missing_values(str(caught.value), "cuda_graph UNIFORM", "3 requests", "layer")
        assert "disable_cuda_graph" in caught.value.settings

    @pytest.mark.parametrize("kind", [StaleSlots, EarlySlots])
    @pytest.mark.parametrize("whole", [True, False], ids=["whole", "by parts"])
    @pytest.mark.parametrize("model", HYBRIDS)
    @pytest.mark.sample(3)
    def test_a_linear_backend_that_keeps_the_slots_of_the_capture_is_found_out(self, model, whole, kind, native):
        class Stale(kind):
            if not whole:
                forward_delta = None

        native(linear=Stale)
        with pytest.raises(CaptureMismatch, check=having("3 requests", fault="result")) as caught:
            captured(engine(model), (3,))
        assert caught.value.kind in ("gdn", "kda")

    def test_what_is_not_a_number_is_found_out(self, native):
        native(NotANumber)
        with pytest.raises(BackendError, check=having("differs", "nan", settings=("disable_cuda_graph",))):
            captured(engine(), (4,))

    def test_padding_that_gives_anything_but_zero_is_found_out(self, native):
        native(LoudPadding)
        with pytest.raises(CaptureMismatch, check=having(fault="padding")):
            captured(engine(), (4,))

    @pytest.mark.parametrize("model", MODELS)
    def test_padding_that_writes_to_the_cache_is_found_out(self, model, native):
        """Outputs do not show this fault: attention that runs afterwards, eager or not, reads the same wrong row."""
        native(WritesPadding)
        with pytest.raises(CaptureMismatch, check=having("4 requests", fault="writes")):
            captured(engine(model), (4,))

    def test_padding_that_writes_among_index_keys_in_fp8_is_found_out(self, native):
        native(WritesPadding)
        with pytest.raises(CaptureMismatch, check=having(fault="writes")):
            captured(engine("tiny:glm_moe_dsa", index_dtype=DType.FLOAT8_E4M3), (4,))

    def test_a_check_leaves_pages_and_caches_as_they_were(self, native):
        one = engine(num_pages=9)
        captured(one, (5,))
        assert one.runner.allocator.free_pages == 9
        pool = one.runner.pools.mha
        assert not any(pool.keys(layer).any() or pool.values(layer).any() for layer in pool.layer_ids)


class TestSizes:
    def test_a_default_pads_little_and_holds_the_largest_batch(self):
        for most in (1, 3, 32, 100, 256, 2000):
            sizes = default_sizes(most)
            assert sizes[-1] == min(most, 512) and sizes[0] == 1 and len(sizes) < 40
            assert all(size <= 1.5 * before for before, size in pairwise(sizes) if before >= 8)

    @pytest.mark.parametrize(
        ("sizes", "named"),
        [
            ((), []),
            ((0, 1), [0]),
            ((-4,), [-4]),
            ((1, 2.5), [2.5]),
            ((True,), [True]),
            ((1, 9), [9, 8]),
            ((2, 2), ["2, 2"]),
            (4, [4]),
            ("12", ["'12'"]),
        ],
    )
    def test_an_invalid_list_is_refused(self, sizes, named):
        with pytest.raises(UsageError, check=naming(*named)) as caught:
            EngineOptions(max_batch=8, cuda_graph_batch_sizes=sizes)
        assert "cuda_graph_batch_sizes" in caught.value.settings

    def test_a_switch_that_is_no_switch_is_refused(self):
        with pytest.raises(UsageError, check=having("no", settings=("disable_cuda_graph",))):
            EngineOptions(disable_cuda_graph="no")

    def test_sizes_are_sorted(self):
        assert EngineOptions(cuda_graph_batch_sizes=[4, 1]).cuda_graph_batch_sizes == (1, 4)

    @pytest.mark.parametrize("other", ["disable_cuda_graph", "check_layers"])
    def test_graphs_cannot_be_demanded_and_turned_off(self, other):
        with pytest.raises(UsageError, check=having(settings=("cuda_graph_batch_sizes", other))):
            EngineOptions(cuda_graph_batch_sizes=(1,), **{other: True})

    def test_graphs_cannot_be_demanded_of_a_cpu(self):
        with pytest.raises(UsageError, check=having("cpu", settings=("cuda_graph_batch_sizes", "device"))):
            Engine(MODELS[0], device="cpu", cuda_graph_batch_sizes=(1,))

    def test_an_engine_says_why_it_captured_nothing(self):
        assert str(engine().graphs) == "none: the device is cpu"

    def test_backends_inside_nested_wrappers_are_named(self):
        """A9"""
        able = Claims(cuda_graph=GraphLevel.ALWAYS)
        one, other = (SimpleNamespace(backend_id=BackendId(name), claims=able) for name in ("one", "other"))
        weak = SimpleNamespace(backend_id=BackendId("weak"), claims=Claims())
        assert limited_by(SplitBackend(one, SplitBackend(other, weak)), "cuda_graph") == ("weak",)
        assert limited_by(one, "cuda_graph") == ()

    @pytest.mark.parametrize(
        ("settings", "why"),
        [
            ({"disable_cuda_graph": True}, "turned off"),
            ({"check_layers": True}, "every layer is checked"),
            ({}, "torch_native cannot be captured"),
        ],
    )
    def test_on_a_gpu_too(self, settings, why):
        one = engine(**settings)
        one.runner.device = torch.device("cuda")
        assert str(capture_graphs(one.runner, one.rounds, one.options)) == f"none: {why}"

    @pytest.mark.parametrize(("asked", "sizes"), [(None, (1, 2, 4, 5)), ((1, 3), (1, 3))])
    def test_and_what_it_captured(self, asked, sizes, native, monkeypatch):
        one, free = engine(), iter([9 << 20, 2 << 20])
        one.options = replace(one.options, cuda_graph_batch_sizes=asked)
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (next(free), 0))
        monkeypatch.setattr("attnplug_engine.serving.start_up.GraphCapture", lambda device: Recorded())
        monkeypatch.setattr("attnplug_engine.serving.start_up.limited_by", lambda backend, claim: ("some",))
        device = torch.device("cuda")
        monkeypatch.setattr(
            "attnplug_engine.graphs.step_graphs.CaptureCheck", lambda *a: SimpleNamespace(run=lambda *b: None)
        )
        one.runner.device = device
        printed, rest = ", ".join(map(str, sizes)), "no prefill: some cannot capture it"
        assert (
            str(capture_graphs(one.runner, one.rounds, one.options))
            == f"decode with {printed} requests, 7 MiB (level UNIFORM, by some); {rest}"
        )
