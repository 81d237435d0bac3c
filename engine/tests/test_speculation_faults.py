"""Faults that end in wrong or worse proposals, and that no comparison of outputs would find."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from refilled_native import RefilledNative, build, captured
from torch import Tensor

from attnplug.host import SlotTable
from attnplug_engine import Engine, SamplingParams

LLAMA = "tiny:llama"
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11]]


def engine(**settings: Any) -> Engine:
    return Engine(LLAMA, device="cpu", **{"page_size": 4, "max_batch": 4, "ignore_eos": True, **settings})


def standalone(**settings: Any) -> Engine:
    """A draft with the target's own weights: all that it proposes is accepted, if all is as it should be."""
    return engine(speculative_algorithm="standalone", speculative_draft_model=LLAMA, **settings)


def tokens(one: Engine, most: int = 20) -> list[list[int]]:
    return [completion.token_ids for completion in one.generate(PROMPTS, SamplingParams(most))]


@pytest.fixture
def refilled(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("runner", "speculation.draft_runner"):
        monkeypatch.setattr(f"attnplug_engine.{module}.build_selection", partial(build, kind=RefilledNative))


def test_a_replay_finds_the_pages_of_the_step(refilled, monkeypatch):
    """On a CPU the table's mirror is the table itself; on a GPU it is a copy, which is out of date until it is asked
    for. As it is here."""
    mirrors: dict[SlotTable, Tensor] = {}

    def mirror(table: SlotTable) -> Tensor:
        whole = torch.from_numpy(table._page_table)
        mine = mirrors.setdefault(table, whole.clone())
        mine[:-1] = whole[:-1]
        return mine

    monkeypatch.setattr(SlotTable, "mirror", mirror)
    one = captured(standalone(), (1, 4))
    assert tokens(one) == tokens(engine())
    assert one.statistics.replayed_steps and one.statistics.rounds.acceptance == 1
