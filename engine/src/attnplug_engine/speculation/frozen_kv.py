"""Proposer for a draft without a cache of its own, which reads the target's committed rows (frozen KV)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnplug import ForwardMode
from attnplug.kernels import to_device
from attnplug_engine.settings.speculation import Speculation
from attnplug_engine.speculation.acceptance import Accepted
from attnplug_engine.speculation.batches import Batches, RoundShape
from attnplug_engine.speculation.draft_runner import DraftRunner
from attnplug_engine.speculation.proposers import Prefill, newest_rows
from attnplug_engine.speculation.tree import Proposal


class FrozenKVProposer:
    """Proposes the tokens of an assistant model.

    All its steps run at a request's last committed position and see the same rows, so one plan serves them all. It
    writes no rows, so it need not catch up: it starts from the newest token and the target's hidden state before it.
    """

    ahead = 0
    extends: Sequence[RoundShape] = ()
    further: Sequence[RoundShape] = (RoundShape(ForwardMode.DECODE, 1, 0),)

    def __init__(self, runner: DraftRunner, speculation: Speculation, tokens: Tensor) -> None:
        """``tokens`` are the requests' newest tokens, by row of the slot table."""
        self._runner, self._steps, self._nodes = runner, speculation.steps, speculation.nodes
        self._tokens = tokens
        self.hidden_inputs = runner.model.hidden_inputs

    def after_prefill(self, prefill: Prefill) -> Proposal | None:
        if (ended := prefill.ended) is None:
            return None
        hidden = prefill.hidden
        assert hidden is not None
        last = to_device(prefill.step.sampled_rows, hidden.device)
        return self.look_ahead(ended, hidden.index_select(0, last), ended.members.committed)

    def catch_up(self, batches: Batches, lengths: Tensor, accepted: Accepted, hidden: Tensor | None) -> Tensor | None:
        assert hidden is not None
        return newest_rows(hidden.unflatten(0, (-1, self._nodes)), accepted)

    def look_ahead(self, batches: Batches, newest: Tensor | None, lengths: Tensor) -> Proposal:
        assert newest is not None
        members, runner = batches.members, self._runner
        batch = batches.make(ForwardMode.DECODE, lengths, (lengths - 1).unsqueeze(1))
        batches.begin(batch)
        places = members.places(lengths, self._steps)
        hidden, token = newest, self._tokens.index_select(0, members.rows)
        tokens: list[Tensor] = []
        for step in range(self._steps):
            batch.input_ids = token.clamp(min=0)
            hidden = runner.forward(batch, hidden, step)
            token = runner.choose(hidden, members.sampled(places[step]), step)
            tokens.append(token)
        return Proposal(torch.stack(tokens, 1))
