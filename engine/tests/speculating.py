"""Engines that speculate, on a CPU: what tests of them share."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from attnplug_engine import Engine, SamplingParams

LLAMA, DEEPSEEK, HYBRID = "tiny:llama", "tiny:deepseek_v3", "tiny:qwen3_next"
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11], [3, 1, 4, 1, 5], [9, 2, 6], [5] * 9, [1, 2, 3, 4] * 5]
NGRAM = {"speculative_algorithm": "ngram"}
MTP = {"speculative_algorithm": "mtp"}


def standalone(draft: str) -> dict[str, Any]:
    return {"speculative_algorithm": "standalone", "speculative_draft_model": draft}


def shaped(steps: int, topk: int = 1, nodes: int | None = None) -> dict[str, Any]:
    return {
        "speculative_num_steps": steps,
        "speculative_topk": topk,
        "speculative_num_draft_tokens": nodes,
    }


def engine(model: str = LLAMA, **settings: Any) -> Engine:
    return Engine(model, device="cpu", **{"page_size": 4, "max_batch": 7, "ignore_eos": True, **settings})


def params(new: int = 14) -> list[SamplingParams]:
    """Parameters for each prompt, with different lengths, so batches shrink; every other request samples. None ends in
    its first round, so its verify can be planned ahead for all."""
    drawn = SamplingParams(new, temperature=0.9, top_k=40, top_p=0.95, seed=3)
    each = [replace(drawn, max_tokens=max(new - 2 * number, 6)) for number in range(len(PROMPTS))]
    return [one if number % 2 else replace(one, temperature=0.0) for number, one in enumerate(each)]


@cache
def plain(model: str) -> list[list[int]]:
    return [one.token_ids for one in engine(model).generate(PROMPTS, params())]


def tokens(one: Engine) -> list[list[int]]:
    return [completion.token_ids for completion in one.generate(PROMPTS, params())]


def rounds(one: Engine) -> Any:
    assert one.statistics.rounds is not None and one.statistics.rounds.rounds
    return one.statistics.rounds
