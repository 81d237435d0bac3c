"""Captured prefills of speculative engines, with a fake capture that runs the same calls again."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from captured_prefills import PREFILLS, SIZES, AnyLinear, captured, engine, prompts, tokens
from refilled_native import AnyBatch, Recorded, RefilledNative, build

from attnplug_engine import SamplingParams
from attnplug_engine.serving.start_up import capture_graphs

pytestmark = pytest.mark.usefixtures("native")


EAGLE = {"speculative_algorithm": "eagle", "speculative_draft_model": "tiny:llama", "speculative_num_steps": 3}
MTP = {"speculative_algorithm": "mtp", "speculative_num_steps": 2}
DRAFT = {"speculative_algorithm": "standalone", "speculative_draft_model": "tiny:qwen3"}
NGRAM = {"speculative_algorithm": "ngram", "speculative_num_steps": 3}


class TestSpeculation:
    """The target's prefills are replayed between rounds, each followed by the draft's."""

    @pytest.fixture(autouse=True)
    def both(self, native, monkeypatch: pytest.MonkeyPatch):
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
        """Prompts run in chunks; the last chunk ends several prompts at once. A draft whose backend captures no extends
        runs eagerly behind the target's graph."""
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
