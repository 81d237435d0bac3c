"""Drafts with a model for each step: the tokens, each layer's logits against float64, and how often plans are made."""

from __future__ import annotations

from functools import partial
from typing import Any

import draft_math as math
import pytest
import torch
from coached_drafts import Coach, caches, params, tokens
from refilled_native import AnyBatch, build, captured
from torch.testing import assert_close

from attnplug import ForwardMode
from attnplug.host import TINY_CONFIGS
from attnplug_engine import Engine
from attnplug_engine.speculation.drafts.model import DraftError
from attnplug_engine.speculation.window import WindowProposer
from attnplug_testing.draft_checkpoints import HIDDEN, saved_deepseek
from attnplug_testing.errors import having

pytestmark = pytest.mark.long

CONFIG = TINY_CONFIGS["deepseek_v3"]
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]]
STEPS, NEW = 3, 14


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A target with three multi-token-prediction layers, each with its own embedding and head."""
    return saved_deepseek(tmp_path_factory.mktemp("target"), STEPS, own=True)


@pytest.fixture(scope="module")
def longer(saved):
    """The target's greedy tokens without a draft, more than other tests request."""
    return tokens(engine(saved[0]), PROMPTS, params(PROMPTS, NEW + STEPS + 1))


@pytest.fixture
def plain(longer):
    return [output[: NEW - 2 * number] for number, output in enumerate(longer)]


def engine(folder, **settings: Any) -> Engine:
    return Engine(folder, device="cpu", **{"page_size": 4, "max_batch": 4, "prefix_cache": False, **settings})


def drafting(folder, steps: int = STEPS, **settings: Any) -> Engine:
    one = engine(folder, speculative_algorithm="mtp", speculative_num_steps=steps, **settings)
    assert isinstance(one.rounds.proposer, WindowProposer)
    for cache in caches(one.rounds.draft.pools):
        cache.fill_(float("nan"))
    return one


# ---- tokens ----


@pytest.mark.parametrize(
    ("settings", "coached"),
    [
        ({}, False),
        ({"steps": 2}, True),
        ({"chunked_prefill_size": 4}, True),
        ({"num_pages": 22, "overlap": True}, True),
        ({"prefix_cache": True, "max_batch": 2}, False),
    ],
    ids=str,
)
def test_tokens_are_those_of_an_engine_without_a_draft(settings, coached, saved, plain, longer, monkeypatch):
    if coached:
        Coach(monkeypatch, PROMPTS, longer)
    one = drafting(saved[0], **settings)
    assert tokens(one, PROMPTS, params(PROMPTS, NEW)) == plain
    assert one.statistics.rounds.acceptance > 0.5 or not coached


def test_drawn_tokens_are_those_of_an_engine_without_a_draft(saved):
    drawn = params(PROMPTS, NEW, temperature=0.8, top_p=0.9)
    assert tokens(drafting(saved[0]), PROMPTS, drawn) == tokens(engine(saved[0]), PROMPTS, drawn)


@pytest.mark.parametrize("fill", [6])
def test_captured_rounds_give_the_same_tokens(fill, saved, plain, longer, monkeypatch):
    for module in ("execution.runner", "speculation.draft_runner"):
        refilled = partial(build, kind=partial(AnyBatch, fill=fill))
        monkeypatch.setattr(f"attnplug_engine.{module}.build_selection", refilled)
    Coach(monkeypatch, PROMPTS, longer)
    one = captured(drafting(saved[0], overlap=True), (1, 2, 4), (4, 24))
    assert tokens(one, PROMPTS, params(PROMPTS, NEW)) == plain
    assert one.statistics.replayed_prefills and not one.statistics.eager_prefills
    assert one.statistics.replayed_steps > 3 and one.statistics.rounds.acceptance > 0.5


# ---- logits ----


class Reference:
    """The layers of one request in float64: the token and the hidden state that each has at every position."""

    def __init__(self, tensors, coach: Coach, number: int) -> None:
        self._tensors, self._coach, self._number = tensors, coach, number
        self._tokens: list[dict[int, int]] = [{} for _ in range(STEPS)]
        self._hidden: list[dict[int, torch.Tensor]] = [{} for _ in range(STEPS)]

    def check(self, positions: list[int], hidden: torch.Tensor, steps: list[Any]) -> int:
        """After the target's ``hidden`` states at ``positions``, with what each step chose; returns how many did."""
        sequence, chosen = self._coach.sequence(self._number), [step.chosen.get(self._number) for step in steps]
        # Where a prefill goes on, its prompt is all that is known; else all up to the newest token.
        known = len(self._coach.prompts[self._number]) - 1 if chosen[0] is None else chosen[0].position
        rows = [p for p in positions if p < known or chosen[0] is None]
        states = hidden[: len(rows)].double()
        for s, choice in enumerate(chosen):
            for p, state in zip(rows, states, strict=True):
                place = p + 1 + s
                drafted = 0 if choice is None or place <= known else chosen[place - known - 1].token
                self._tokens[s][p] = sequence[place] if place <= known else drafted
                self._hidden[s][p] = state
            count = len(self._tokens[s])
            assert sorted(self._tokens[s]) == list(range(count)), "a row of every position"
            ids = [self._tokens[s][p] for p in range(count)]
            given = torch.stack([self._hidden[s][p] for p in range(count)])
            out = math.deepseek_layer(CONFIG, self._tensors, f"model.layers.{3 + s}", ids, given)
            if choice is not None:
                assert_close(choice.logits.double(), out[-1, HIDDEN:], atol=2e-3, rtol=0)
            states = out[rows, :HIDDEN]
        return sum(choice is not None for choice in chosen)


@pytest.mark.parametrize("settings", [{}, {"chunked_prefill_size": 4, "max_batch": 2}], ids=["whole", "chunked"])
def test_each_layers_logits_are_those_of_float64_over_its_own_rows(settings, saved, plain, longer, monkeypatch):
    """All other rows of the draft's cache are NaN, or of nodes that were rejected."""
    folder, tensors = saved
    coach = Coach(monkeypatch, PROMPTS, longer)
    assert tokens(drafting(folder, **settings), PROMPTS, params(PROMPTS, NEW)) == plain
    references = [Reference(tensors, coach, number) for number in range(len(PROMPTS))]
    checked = 0
    runs = [coach.forwards[first : first + STEPS] for first in range(0, len(coach.forwards), STEPS)]
    for run in runs:
        first = run[0]
        assert [one.step for one in run] == list(range(STEPS))
        assert all(one.batch is first.batch and torch.equal(one.positions, first.positions) for one in run)
        geometry = first.batch.geometry
        counts = [geometry.max_new] * geometry.requests if geometry.new_lens is None else geometry.new_lens.tolist()
        parts = list(zip(*(one.split(counts) for one in (first.positions, first.ids, first.hidden)), strict=True))
        owners = list(first.chosen)
        if geometry.mode is ForwardMode.EXTEND:
            owners = [_owner(coach, int(positions[0]), ids.tolist()) for positions, ids, _ in parts]
        for number, (positions, _, hidden) in zip(owners, parts, strict=True):
            checked += references[number].check(positions.tolist(), hidden, run)
    assert checked > 40


def _owner(coach: Coach, start: int, ids: list[int]) -> int:
    """Request whose tokens these are, behind position ``start``."""
    whole = [coach.sequence(number) for number in range(len(coach.prompts))]
    (owner,) = [number for number, one in enumerate(whole) if one[start + 1 : start + 1 + len(ids)] == ids]
    return owner


# ---- plans ----


def test_one_plan_serves_all_layers_of_a_round_and_of_a_prefill(saved, monkeypatch):
    one = drafting(saved[0])
    planned = []
    backend = one.rounds.draft.backend
    init = type(backend).init_forward_metadata

    def counted(self, batch):
        if self is backend:
            planned.append(batch.forward_mode)
        return init(self, batch)

    monkeypatch.setattr(type(backend), "init_forward_metadata", counted)
    tokens(one, PROMPTS[:2], params(PROMPTS[:2], 12))
    rounds = one.statistics.rounds.timed
    assert planned == [ForwardMode.EXTEND] + [ForwardMode.DRAFT_EXTEND] * rounds and rounds > 3


# ---- what is refused ----


def test_a_tree_of_a_draft_with_a_model_for_each_step(saved):
    with pytest.raises(DraftError, check=having(2, 3, settings=("speculative_topk",))):
        engine(saved[0], speculative_algorithm="mtp", speculative_num_steps=2, speculative_topk=2)


def test_one_step_uses_one_layer_and_may_have_branches(saved, plain):
    one = engine(saved[0], speculative_algorithm="mtp", speculative_num_steps=1, speculative_topk=2)
    assert not isinstance(one.rounds.proposer, WindowProposer)
    assert tokens(one, PROMPTS, params(PROMPTS, NEW)) == plain


# ---- the prefix cache ----


@pytest.mark.parametrize("steps", [1, 3])
def test_a_hit_ends_as_many_tokens_early_as_its_rows_look_ahead(steps, saved):
    """The last layer's row of a token depends on as many tokens after it as there are layers."""
    one = engine(saved[0], page_size=1, prefix_cache=True, speculative_algorithm="mtp", speculative_num_steps=steps)
    prompt = PROMPTS[3]
    one.generate([prompt], max_tokens=4)
    (again,) = one.generate([[*prompt, 99, 98]], max_tokens=1)
    assert again.usage.cached_tokens == len(prompt) - steps
