"""Proposer for a draft with one model per step: all of them run over the same window of rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from attnplug.kernels import to_device
from attnplug_engine.scheduling.step import StepEntry
from attnplug_engine.speculation.acceptance import Accepted
from attnplug_engine.speculation.batches import Batches, RoundShape
from attnplug_engine.speculation.proposers import DraftModelProposer, Prefill, newest_rows
from attnplug_engine.speculation.tree import Proposal


class WindowProposer(DraftModelProposer):
    """Proposes the tokens of a draft of several models: layers for multi-token prediction, one per step.

    There are no steps of one row. Every model runs over the whole window, i.e. the rows of a round's nodes or of a
    prefill, so that its cache has a row of every position. At position p, model s has a row of token p + 1 + s and of
    the hidden state that model s - 1 gave for p; the first model reads the target's. So tokens shift left by one with
    each step, and the token that the previous step chose behind a request's newest row is inserted at that row. All
    steps have the rows and lengths of one batch, and one plan serves them all.

    Rows before the window are not changed. The last of them hold drafted tokens, even if the target chose others:
    proposals may be worse for it, but the accepted tokens are still right.
    """

    def _further(self) -> Sequence[RoundShape]:
        return ()  # all steps run in catch_up

    def after_prefill(self, prefill: Prefill) -> Proposal | None:
        batch, last = self._prefill(prefill)
        entries, hidden, ended = prefill.step.entries, prefill.hidden, prefill.ended
        assert batch.input_ids is not None
        counts = accumulate(len(entry.token_ids) for entry in entries)
        following = [[_following(entry, step) for entry in entries] for step in range(1, self._steps)]
        ends, *following_ids = to_device([[count - 1 for count in counts], *following], last.device).unbind()
        runner, tokens = self._runner, list[Tensor]()
        for step in range(self._steps):
            if step:
                batch.input_ids = batch.input_ids.roll(-1).index_copy_(0, ends, following_ids[step - 1])
            if tokens:
                batch.input_ids.index_copy_(0, last, tokens[-1].clamp(min=0))
            hidden = runner.forward(batch, hidden, step)
            if ended is not None:
                sampling = ended.members.sampled(ended.members.places(ended.members.committed + step)[0])
                tokens.append(runner.choose(hidden.index_select(0, last), sampling, step))
        return Proposal(torch.stack(tokens, 1)) if tokens else None

    def catch_up(self, batches: Batches, lengths: Tensor, accepted: Accepted, hidden: Tensor | None) -> Tensor | None:
        batch, out = self._extend(batches, lengths, accepted, hidden)
        members, runner, counts = batches.members, self._runner, accepted.counts.unsqueeze(1)
        places = members.places(lengths + accepted.counts, self._steps)
        # Tokens from the first row on: accepted ones, then those that each step chooses.
        known = F.pad(accepted.tokens.clamp(min=0), (0, self._steps - 1))
        tokens = [runner.choose(newest_rows(out, accepted), members.sampled(places[0]))]
        for step in range(1, self._steps):
            known.scatter_(1, counts + (step - 1), tokens[-1].clamp(min=0).unsqueeze(1))
            batch.input_ids = known[:, step : step + self._nodes].flatten()
            out = runner.forward(batch, out.flatten(0, 1), step).view_as(out)
            tokens.append(runner.choose(newest_rows(out, accepted), members.sampled(places[step]), step))
        return torch.stack(tokens, 1)

    def look_ahead(self, batches: Batches, newest: Tensor | None, lengths: Tensor) -> Proposal:
        assert newest is not None
        return Proposal(newest)


def _following(entry: StepEntry, step: int) -> int:
    """Return the token that a step's model reads at an entry's last row; 0 if it is not known yet."""
    place = entry.position + len(entry.token_ids) + step
    return next(iter(entry.request.tokens(place, place + 1)), 0)
