"""Ends of requests in rounds with several tokens at once: the same as without speculation."""

from __future__ import annotations

from typing import Any

from attnplug_engine import Engine, SamplingParams
from attnplug_engine.completion import Completion

LLAMA = "tiny:llama"
SPECULATING = {"speculative_algorithm": "standalone", "speculative_draft_model": LLAMA}
PROMPT = [1, 2, 3]


def both(asked: SamplingParams) -> tuple[Completion, Completion]:
    """Completions of an engine that speculates, and of one that does not."""

    def answer(**settings: Any) -> Completion:
        return Engine(LLAMA, device="cpu", ignore_eos=True, **settings).generate([PROMPT], asked)[0]

    return answer(**SPECULATING), answer()


def test_the_text_of_a_stop_token_is_there_where_stop_texts_are_looked_for():
    token = both(SamplingParams(9))[1].token_ids[5]
    mine, theirs = both(SamplingParams(9, stop_token_ids=frozenset({token}), stop=("never",)))
    assert (mine.text, mine.token_ids, mine.finish_reason) == (theirs.text, theirs.token_ids, "stop")
    assert len(mine.text) == 6
