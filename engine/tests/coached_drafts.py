"""Drafts that know the target's choices, so that most proposals are accepted, with a record of their inputs.

Random drafts are accepted almost never. A coached one computes its logits as ever. They are recorded, and then the
token is proposed that an engine without speculation gave for the same place, or at some places a wrong one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from attnplug import ForwardBatch
from attnplug.host import KVPools
from attnplug_engine import Engine, SamplingParams
from attnplug_engine.speculation.draft_runner import DraftRunner

FIRST_SEED = 100


@dataclass
class Choice:
    """Token that one step of a draft chose for one request, behind the target's row at ``position``."""

    position: int
    token: int
    logits: Tensor


@dataclass
class Forward:
    """One run of a draft model, and what each request's newest row led to, by the request's number."""

    step: int
    ids: Tensor
    positions: Tensor
    hidden: Tensor | None
    batch: ForwardBatch
    chosen: dict[int, Choice] = field(default_factory=dict)


class Coach:
    """Coaches every draft from here on. ``prompts`` and ``outputs`` are those of an engine without speculation."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
    ) -> None:
        self.prompts, self.outputs = prompts, outputs
        self.forwards: list[Forward] = []
        forward, choose = DraftRunner.forward, DraftRunner.choose

        def watched(runner: DraftRunner, batch: ForwardBatch, hidden: Tensor | None, step: int = 0) -> Tensor:
            assert batch.input_ids is not None and batch.positions is not None
            before = None if hidden is None else hidden.clone()
            self.forwards.append(Forward(step, batch.input_ids.clone(), batch.positions.clone(), before, batch))
            return forward(runner, batch, hidden, step)

        def coached(runner: DraftRunner, hidden: Tensor, sampling: Any, step: int = 0) -> Tensor:
            own, logits = choose(runner, hidden, sampling, step), runner.model.logits(hidden, step)
            rows = zip(sampling.seed, sampling.position, own, logits, strict=True)
            return torch.tensor([self._told(*row, step) for row in rows])

        monkeypatch.setattr(DraftRunner, "forward", watched)
        monkeypatch.setattr(DraftRunner, "choose", coached)

    def _told(self, seed: Tensor, place: Tensor, own: Tensor, logits: Tensor, step: int) -> int:
        number, position = int(seed) - FIRST_SEED, int(place)
        if not 0 <= number < len(self.outputs):
            return int(own)  # a padded request
        output, prompt = self.outputs[number], self.prompts[number]
        token = output[position] if position < len(output) else 0
        if (3 * position + number) % 7 == 0:
            token = (token + 1) % logits.shape[0]
        after = position + len(prompt) - 1
        self.forwards[-1].chosen[number] = Choice(after, token, logits.clone())
        return token

    def sequence(self, number: int) -> list[int]:
        return [*self.prompts[number], *self.outputs[number]]


def params(prompts: Sequence[Sequence[int]], most: int, **sampling: Any) -> list[SamplingParams]:
    """Sampling parameters for each prompt, of different lengths, with the seeds that identify them to a coach."""
    return [
        SamplingParams(max_tokens=most - 2 * number, seed=FIRST_SEED + number, **sampling)
        for number in range(len(prompts))
    ]


def tokens(engine: Engine, prompts: Sequence[Sequence[int]], each: Sequence[SamplingParams]) -> list[list[int]]:
    return [completion.token_ids for completion in engine.generate(prompts, each)]


def caches(pools: KVPools) -> list[Tensor]:
    """The memory of every layer that has rows per token."""
    mha, mla = pools.mha, pools.mla
    found = [] if mla is None else [mla.rows(layer) for layer in mla.layer_ids]
    return found + ([] if mha is None else [part(layer) for layer in mha.layer_ids for part in (mha.keys, mha.values)])
