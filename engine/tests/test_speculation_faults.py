"""Faults that lead to wrong or worse proposals, which comparing outputs would not find."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from refilled_native import RefilledNative, build, captured
from torch import Tensor

from attnplug_engine import Engine, SamplingParams
from attnplug_engine.scheduling.slot_table import SlotTable
from attnplug_engine.scheduling.step import PENDING, StepEntry
from attnplug_engine.speculation.round_inputs import RoundInputs

LLAMA = "tiny:llama"
NGRAM: dict[str, Any] = {"speculative_algorithm": "ngram"}
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11]]


def engine(**settings: Any) -> Engine:
    return Engine(LLAMA, device="cpu", **{"page_size": 4, "max_batch": 4, "ignore_eos": True, **settings})


def standalone(**settings: Any) -> Engine:
    """A draft with the target's own weights. Without a fault, all of its proposals are accepted."""
    return engine(speculative_algorithm="standalone", speculative_draft_model=LLAMA, **settings)


def tokens(one: Engine, most: int = 20) -> list[list[int]]:
    return [completion.token_ids for completion in one.generate(PROMPTS, SamplingParams(most))]


@pytest.fixture
def refilled(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("execution.runner", "speculation.draft_runner"):
        monkeypatch.setattr(f"attnplug_engine.{module}.build_selection", partial(build, kind=RefilledNative))


def test_a_replay_finds_the_pages_of_the_step(refilled, monkeypatch):
    """On a CPU the table's mirror is the table itself. On a GPU, and here, it is a copy that is out of date until it is
    requested."""
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


def test_n_grams_are_looked_for_in_what_the_prefix_cache_supplied():
    """The row was another request's before, and no step runs the tokens of a hit."""
    one = engine(**NGRAM, max_batch=1, overlap=False)
    prompt = list(range(20, 41))
    one.generate([prompt], SamplingParams(1))
    history = one.rounds.proposer._history.tokens
    history.fill_(-7)
    request = one.add(prompt, SamplingParams(9))
    one.step()
    assert request.cached_tokens == 20
    assert history[request.row, :22].tolist() == [*prompt, *request.output]


def test_the_inputs_of_a_replay_are_those_of_its_requests_and_of_nobody_after_them():
    one = engine(**NGRAM, overlap=False)
    inputs, table = RoundInputs(4, 9, torch.device("cpu")), torch.zeros(4, 2, dtype=torch.int32)
    members = inputs.members(4, table, 64, has_states=True)
    fields = (members.rows, members.known, members.committed, members.prompts, members.state_slots)
    several = [one.add(prompt, SamplingParams(4, seed=5 + n)) for n, prompt in enumerate(PROMPTS)]
    entries = [StepEntry(request, 30 + n, (PENDING if n == 1 else 7,), True) for n, request in enumerate(several)]
    seed_of = one.runner.sampler.seed_of
    for chosen in ([0, 1, 2], [2, 1], [1, 2], [0]):  # each side of the host's memory has others before
        inputs.fill([entries[n] for n in chosen], [n + 3 for n in chosen], [n + 5 for n in chosen], seed_of)
        left = 4 - len(chosen)
        assert [field.tolist() for field in fields] == [
            [n + 3 for n in chosen] + [9] * left,
            [-1 if n == 1 else 7 for n in chosen] + [0] * left,
            [n + 30 for n in chosen] + [0] * left,
            [len(PROMPTS[n]) for n in chosen] + [0] * left,
            [n + 5 for n in chosen] + [-1] * left,
        ]
        assert members.sampling.seed.tolist()[: len(chosen)] == [n + 5 for n in chosen]


def test_a_request_that_lost_its_pages_computes_all_its_tokens_before_its_next_round():
    """Prompts in chunks, in steps with rounds of other requests."""
    one = engine(speculative_algorithm="ngram", num_pages=22, chunked_prefill_size=3, max_batch=3, prefix_cache=False)
    assert tokens(one, 40) == tokens(engine(), 40)
    assert one.scheduler.preemptions


def test_a_prefill_beside_a_round_has_linear_states_of_its_own():
    one, other = (Engine("tiny:qwen3_next", device="cpu", ignore_eos=True, **more) for more in (NGRAM, {}))
    wanted = [completion.token_ids for completion in other.generate(PROMPTS[:2], SamplingParams(9))]
    requests = [one.add(PROMPTS[0], SamplingParams(9))]
    one.step()
    requests.append(one.add(PROMPTS[1], SamplingParams(9)))
    while one.step() is not None:
        pass
    assert [request.output for request in requests] == wanted
