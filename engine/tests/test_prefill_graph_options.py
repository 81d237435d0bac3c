"""Options of captured prefills, and a captured backend in addition to an eager prefill backend."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from captured_prefills import MODELS, PREFILLS, SIZES, captured, engine, prompts, tokens
from refilled_native import AnyBatch, Recorded, RefilledNative, over

from attnplug import ForwardMode, Role, UsageError
from attnplug.auto.fastest import FastestBackend
from attnplug.auto.schedule import ExtendSchedule
from attnplug.host import load_model
from attnplug.torch_native.backend import TorchNativeBackend
from attnplug_engine import EngineOptions, SamplingParams
from attnplug_engine.execution.extend_times import ExtendTimes
from attnplug_engine.graphs.step_graphs import capture_steps
from attnplug_engine.scheduling.step import Step, StepEntry
from attnplug_engine.serving.start_up import _prefill_sizes, capture_graphs
from attnplug_engine.settings.capture_sizes import default_prefill_sizes
from attnplug_testing.errors import having, naming

pytestmark = pytest.mark.usefixtures("native")


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
    """A prefill backend that cannot be captured, with a decode backend that can."""

    @pytest.fixture(autouse=True)
    def both(self, native, monkeypatch: pytest.MonkeyPatch):
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
        """Captured MLA extends run absorbed, eager ones as MHA."""
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
