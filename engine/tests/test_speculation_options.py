"""Options of speculation, and messages about combinations that do not fit."""

from __future__ import annotations

import pytest

from attnplug import UsageError
from attnplug_engine.options import EngineOptions
from attnplug_engine.settings.speculation import Algorithm, Speculation
from attnplug_testing.command import Attnplug
from attnplug_testing.errors import missing_values


def asked(**given: object) -> Speculation | None:
    return EngineOptions(**{f"speculative_{name}": value for name, value in given.items()}).speculation


def test_nothing_is_proposed_unless_it_is_asked_for():
    assert asked() is None


@pytest.mark.parametrize(
    ("given", "steps", "topk", "nodes"),
    [
        ({}, 3, 1, 4),
        ({"num_steps": 5}, 5, 1, 6),
        ({"num_draft_tokens": 5}, 4, 1, 5),
        ({"topk": 4}, 3, 4, 13),
        ({"topk": 2, "num_steps": 4, "num_draft_tokens": 6}, 4, 2, 6),
        ({"topk": 4, "num_steps": 16}, 16, 4, 64),
    ],
)
def test_what_is_left_out_follows_from_the_rest(given, steps, topk, nodes):
    assert asked(algorithm="ngram", **given) == Speculation(Algorithm.NGRAM, None, steps, topk, nodes)


def test_a_round_has_room_for_all_that_its_draft_writes():
    chain, tree = Speculation(Algorithm.MTP, None, 4), Speculation(Algorithm.STANDALONE, "small", 3, 2, 6)
    assert (chain.tail, chain.room) == (4, 9)
    assert (tree.tail, tree.room) == (5, 11)
    assert Speculation(Algorithm.NGRAM, None, 4).room == 5


@pytest.mark.parametrize(
    ("given", "fragment"),
    [
        ({"num_steps": 2}, "`speculative_num_steps` 2 is given without `speculative_algorithm`"),
        ({"algorithm": "magic"}, "'magic' is unknown; use one of mtp, eagle, eagle3, standalone, ngram"),
        ({"algorithm": "ngram", "draft_model": "x"}, "x is given, but `speculative_algorithm` ngram has no model"),
        ({"algorithm": "eagle"}, "eagle needs a draft model; give the folder of its checkpoint"),
        ({"algorithm": "ngram", "num_steps": 0}, "`speculative_num_steps` 0 is not allowed; give a number"),
        ({"algorithm": "ngram", "num_steps": 64}, "64 is not allowed; give a number of draft steps from 1 to 63"),
        ({"algorithm": "ngram", "topk": 0}, "`speculative_topk` 0 is not allowed"),
        ({"algorithm": "ngram", "num_draft_tokens": 0}, "`speculative_num_draft_tokens` 0 is not allowed"),
        ({"algorithm": "ngram", "num_draft_tokens": 99}, "`speculative_num_draft_tokens` 99 is not allowed"),
        ({"algorithm": "ngram", "num_steps": 3, "num_draft_tokens": 5}, "a chain has 4, one more than steps"),
        ({"algorithm": "ngram", "topk": 2, "num_draft_tokens": 8}, "8 is more than the 7 nodes of 3 steps with 2"),
        ({"algorithm": "ngram", "topk": 2, "num_draft_tokens": 65}, "from 2 to 64"),
        ({"algorithm": "mtp", "topk": 8, "num_steps": 10}, "run 72 rows of a request in its last step"),
        ({"algorithm": "mtp", "num_steps": True}, "`speculative_num_steps` True is not allowed"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_value(given, fragment):
    with pytest.raises(UsageError) as caught:
        asked(**given)
    assert fragment in caught.value.message
    assert {f"speculative_{name}" for name in given} & set(caught.value.settings)


def test_a_mistake_on_the_command_line_names_its_options(attnplug: Attnplug):
    outcome = attnplug("run", "--model", "tiny:llama", "--prompt", "x", "--speculative-num-steps", "2")
    assert outcome.code == 2 and not missing_values(outcome.err, "--speculative-num-steps 2", "--speculative-algorithm")
