"""Planning of rounds: planners and counts, detected mistakes, and rounds by a capture that repeats the same calls."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from refilled_native import RefilledNative, build, captured
from speculating import DEEPSEEK, LLAMA, MTP, NGRAM, PROMPTS, engine, plain, shaped, standalone, tokens
from test_draft_prediction import saved_deepseek

from attnplug import BackendError, ForwardMode, PlanError
from attnplug_engine import SamplingParams
from attnplug_engine.speculation.batches import EagerBatches
from attnplug_testing.errors import having, naming

pytestmark = pytest.mark.long


class Counting(RefilledNative):
    """Backend that records its calls to plan: mode, and whether for an eager step, a capture or a replay."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[tuple[str, str]] = []

    def init_forward_metadata(self, batch):
        self.seen.append(("plan", str(batch.forward_mode)))
        return super().init_forward_metadata(batch)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        self.seen.append(("capture" if in_capture else "replay", str(forward_batch.forward_mode)))
        return super().init_forward_metadata_out_graph(forward_batch, in_capture)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("execution.runner", "speculation.draft_runner"):
        monkeypatch.setattr(f"attnplug_engine.{module}.build_selection", partial(build, kind=Counting))


class TestPlanning:
    """Each batch is planned once, in every mode, by the code that made it (B1, B2)."""

    @pytest.mark.parametrize(
        ("model", "settings", "draft"),
        [
            (LLAMA, NGRAM, None),
            (LLAMA, standalone(LLAMA) | shaped(3), ["draft_extend", "decode", "decode"]),
            (LLAMA, standalone(LLAMA) | shaped(1), ["draft_extend"]),
            (DEEPSEEK, MTP | shaped(3, 2), ["draft_extend", "target_verify", "target_verify"]),
        ],
    )
    def test_a_round_plans_each_of_its_batches_once(self, model, settings, draft, counted):
        one = engine(model, overlap=False, **settings)
        one.add(PROMPTS[0], SamplingParams(12))
        assert one.step() is not None
        backends = [one.runner.backend] + ([] if draft is None else [one.rounds.draft.backend])
        further = ["extend", *(draft or ())[1:]]  # the prefill's extend replaces the draft extend
        assert [[mode for _, mode in backend.seen] for backend in backends] == [["extend"], further][: len(backends)]
        for backend in backends:
            backend.seen.clear()
        one.step()
        expected = [[("plan", "target_verify")], [("plan", mode) for mode in draft or ()]]
        assert [backend.seen for backend in backends] == expected[: len(backends)]

    @pytest.mark.parametrize(
        ("settings", "draft"),
        [(standalone(LLAMA) | shaped(3), ["draft_extend", "decode", "decode"]), (NGRAM, None)],
    )
    def test_a_replayed_round_is_planned_outside_of_its_graphs_only(self, settings, draft, counted):
        one = captured(engine(overlap=False, **settings), (2,))
        backends = [one.runner.backend] + ([] if draft is None else [one.rounds.draft.backend])
        seen = [[what for what in backend.seen if what[0] == "capture"] for backend in backends]
        expected = [[("capture", "target_verify")], [("capture", mode) for mode in draft or ()]]
        assert seen == expected[: len(backends)], "a batch is planned once, and again by nobody in its capture"
        one.add(PROMPTS[0], SamplingParams(12))
        one.step()
        for backend in backends:
            backend.seen.clear()
        one.step()
        assert one.statistics.replayed_steps == 1
        expected = [[("replay", "target_verify")], [("replay", mode) for mode in draft or ()]]
        assert [backend.seen for backend in backends] == expected[: len(backends)]

    def test_each_step_of_a_draft_sees_its_own_length(self, monkeypatch):
        """Row by row after the newest token: an extend over all nodes, then one row more a step."""
        one = engine(overlap=False, **standalone(LLAMA), **shaped(4))
        backend, seen = one.rounds.draft.backend, []
        plan = backend.plan

        def planned(geometry):
            seen.append((geometry.mode, geometry.step, list(geometry.query_lens), list(geometry.kv_lens)))
            return plan(geometry)

        monkeypatch.setattr(backend, "plan", planned)
        one.add(PROMPTS[0], SamplingParams(12))
        one.add(PROMPTS[1], SamplingParams(12))
        one.step()
        seen.clear()
        one.step()  # finds 3 and 7 rows committed, and commits 5 more
        extend, *steps = seen
        assert extend == (ForwardMode.DRAFT_EXTEND, 0, [5, 5], [3 + 1 + 5, 7 + 1 + 5])
        assert steps == [(ForwardMode.DECODE, step, [1, 1], [3 + 5 + 2 + step, 7 + 5 + 2 + step]) for step in range(3)]

    def test_a_draft_with_a_model_for_each_step_plans_once(self, tmp_path, counted):
        folder, _ = saved_deepseek(tmp_path, 3)
        one = engine(str(folder), overlap=False, **MTP, **shaped(3))
        one.add(PROMPTS[0], SamplingParams(12))
        one.step()
        one.step()
        assert one.rounds.draft.backend.seen == [("plan", "extend"), ("plan", "draft_extend")]


class TestFaults:
    """A caller's planning mistakes show as a second plan or an error, not as wrong tokens."""

    def test_a_forgotten_mark_is_a_second_plan(self, counted, monkeypatch):
        monkeypatch.setattr("attnplug.ForwardBatch.mark_forward_metadata_ready", lambda *_, **__: None)
        one = engine(overlap=False, **NGRAM)
        one.add(PROMPTS[0], SamplingParams(4))
        one.step()
        one.step()
        assert one.runner.backend.seen[1:] == 2 * [("plan", "target_verify")]

    def test_a_stale_plan_is_an_error(self, monkeypatch):
        make = EagerBatches.make

        def stale(self, *args, **kwargs):
            batch = make(self, *args, **kwargs)
            batch.geometry = replace(batch.geometry)
            return batch

        monkeypatch.setattr(EagerBatches, "make", stale)
        one = engine(overlap=False, **NGRAM)
        one.add(PROMPTS[0], SamplingParams(4))
        one.step()
        with pytest.raises(PlanError, check=naming("torch_native", "geometry")):
            one.step()

    def test_a_draft_that_is_planned_by_the_targets_backend_is_an_error(self):
        one = engine(overlap=False, **standalone(LLAMA))
        one.rounds._draft_batches = one.rounds._eager
        one.add(PROMPTS[0], SamplingParams(4))
        with pytest.raises(PlanError, check=naming("torch_native")):
            one.step()


class StaleVerify(RefilledNative):
    """Faulty backend that keeps the rows of the first batch in captured verifies and draft extends."""

    def refill(self, plan, geometry):
        if geometry.mode.is_decode or not plan.metadata.rows:
            super().refill(plan, geometry)


class TestGraphs:
    @pytest.mark.parametrize("settings", [NGRAM, NGRAM | shaped(2, 2)], ids=["chain", "tree"])
    @pytest.mark.parametrize("model", [LLAMA, DEEPSEEK])
    def test_a_verify_that_keeps_what_was_captured_is_found_out(self, model, settings, monkeypatch):
        monkeypatch.setattr("attnplug_engine.execution.runner.build_selection", partial(build, kind=StaleVerify))
        with pytest.raises(BackendError, check=having("target_verify", 3, "differs", settings=("disable_cuda_graph",))):
            captured(engine(model, **settings), (3,))

    def test_a_drafts_extend_that_keeps_what_was_captured_is_found_out(self, monkeypatch):
        monkeypatch.setattr("attnplug_engine.execution.runner.build_selection", build)
        stale = partial(build, kind=StaleVerify)
        monkeypatch.setattr("attnplug_engine.speculation.draft_runner.build_selection", stale)
        with pytest.raises(BackendError, check=having("draft_extend", 3, "differs", settings=("disable_cuda_graph",))):
            captured(engine(**standalone(LLAMA)), (3,))

    @pytest.mark.parametrize(
        ("model", "settings", "overlap"),
        [
            (LLAMA, NGRAM | shaped(2, 2), True),
            (LLAMA, standalone(LLAMA) | shaped(3), False),
            (DEEPSEEK, MTP | shaped(3), True),
            (DEEPSEEK, MTP | shaped(3, 2, 5), False),
        ],
    )
    def test_replayed_rounds_give_the_tokens_of_eager_ones(self, model, settings, overlap, counted):
        """Rounds of 7 requests run eagerly, of 4 and 2 as captured, of 3 and 1 padded."""
        one = captured(engine(model, overlap=overlap, **settings), (2, 4))
        assert tokens(one) == plain(model)
        assert one.statistics.replayed_steps and one.statistics.eager_steps

    @pytest.mark.parametrize("fill", [0, 1, 6])
    def test_padding_writes_to_no_requests_pages(self, fill, monkeypatch):
        for module in ("execution.runner", "speculation.draft_runner"):
            kind = partial(RefilledNative, fill=fill)
            monkeypatch.setattr(f"attnplug_engine.{module}.build_selection", partial(build, kind=kind))
        one = captured(engine(**standalone(LLAMA), **shaped(3), num_pages=200), (4,))
        assert one.runner.allocator.free_pages == 200 - -(-max(fill, 4) // 4) * bool(fill)
        assert tokens(one) == plain(LLAMA)

    def test_a_draft_with_a_model_for_each_step_is_captured(self, tmp_path, counted):
        folder, _ = saved_deepseek(tmp_path, 3)
        one = captured(engine(str(folder), **MTP, **shaped(3)), (4,))
        assert tokens(one) == tokens(engine(str(folder)))
        assert one.statistics.replayed_steps
