"""Proposers: n-grams of a request's own tokens, or a draft model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from attnplug import ForwardBatch, ForwardMode, Geometry
from attnplug.host import HostLengths, TypicalLens
from attnplug.kernels import to_device
from attnplug_engine.request import Request
from attnplug_engine.scheduling.step import Step
from attnplug_engine.settings.speculation import Speculation
from attnplug_engine.speculation.acceptance import Accepted
from attnplug_engine.speculation.batches import Batches, RoundShape
from attnplug_engine.speculation.draft_runner import DraftRunner
from attnplug_engine.speculation.drafts.model import NOTHING, HiddenInputs
from attnplug_engine.speculation.ngram import History
from attnplug_engine.speculation.tree import Proposal, TreeGrowth


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """A prefill that the target has run."""

    step: Step
    page_table: Tensor
    hidden: Tensor | None
    """Hidden states ``[tokens, width]`` that the proposer reads."""
    ended: Batches | None
    """Batches of the requests whose prefill ends here, if any."""
    sampled: Tensor
    """First tokens ``[requests that end]`` of these requests."""
    newest: Tensor | None = None
    """Draft's hidden states ``[requests that end, width]``, if a graph ran the draft's prefill."""


class DraftRows(NamedTuple):
    """Rows of a draft's prefill, on the host."""

    tokens: list[int]
    positions: list[int]
    counts: list[int]
    """New rows of each entry."""
    lengths: list[int]
    """KV length of each entry, with the new rows."""
    last: list[int]
    """Rows that get the sampled token of each request that ends; their ``tokens`` are 0."""


class Proposer(Protocol):
    """Proposes tokens following every round and every prefill."""

    hidden_inputs: HiddenInputs
    """Hidden states of the target that it reads."""
    ahead: int
    """Number of following tokens on which a row of its cache depends."""
    extends: Sequence[RoundShape]
    """Batches that ``catch_up`` makes, relative to the lengths that the round found."""
    further: Sequence[RoundShape]
    """Batches that ``look_ahead`` makes, relative to its lengths."""

    def after_prefill(self, prefill: Prefill) -> Proposal | None:
        """Propose for the requests whose prefill ends; return None if there are none."""
        ...

    def catch_up(self, batches: Batches, lengths: Tensor, accepted: Accepted, hidden: Tensor | None) -> Tensor | None:
        """Process a round that found ``lengths [requests]`` committed rows, with the target's ``hidden [requests * N,
        width]`` of all nodes. Returns the input of ``look_ahead``."""
        ...

    def look_ahead(self, batches: Batches, newest: Tensor | None, lengths: Tensor) -> Proposal:
        """Propose tokens behind the newest ones of requests with ``lengths [requests]`` committed rows."""
        ...


class NgramProposer:
    """Proposes the tokens that followed an earlier occurrence of the newest ones."""

    hidden_inputs = NOTHING
    ahead = 0
    extends: Sequence[RoundShape] = ()
    further: Sequence[RoundShape] = ()

    def __init__(self, speculation: Speculation, rows: int, context: int, device: torch.device) -> None:
        self._steps, self._topk = speculation.steps, speculation.topk
        self._history = History(rows, context, device)
        self._owners: dict[int, Request] = {}

    def after_prefill(self, prefill: Prefill) -> Proposal | None:
        step, ended = prefill.step, prefill.ended
        for row, (request, position, token_ids, _) in zip(step.rows, step.entries, strict=True):
            # Tokens found in the prefix cache are not among those of the first chunk.
            start = position if self._owners.get(row) is request else 0
            self._owners[row] = request
            self._history.write_prompt(row, start, request.tokens(start, position + len(token_ids)))
        if ended is None:
            return None
        members = ended.members
        known = members.committed
        self._history.append(members.rows, known, prefill.sampled.unsqueeze(1), torch.ones_like(known))
        return self.look_ahead(ended, None, known)

    def catch_up(self, batches: Batches, lengths: Tensor, accepted: Accepted, hidden: Tensor | None) -> Tensor | None:
        self._history.append(batches.members.rows, lengths + 1, accepted.tokens, accepted.counts)
        return None

    def look_ahead(self, batches: Batches, newest: Tensor | None, lengths: Tensor) -> Proposal:
        return self._history.propose(batches.members.rows, lengths + 1, self._steps, topk=self._topk)


class DraftModelProposer:
    """Proposes the tokens of a draft model.

    A draft that reads the target's hidden states has, at position p, a row of token p + 1 and the target's hidden state
    at p. One that reads nothing has rows of its own tokens, so its newest row is one position further (``_shift``).

    If a request samples, the draft samples with the same noise, so that it often chooses the target's token.
    """

    def __init__(self, runner: DraftRunner, speculation: Speculation) -> None:
        self._runner = runner
        self._steps, self._topk, self._nodes = speculation.steps, speculation.topk, speculation.nodes
        self.hidden_inputs = runner.model.hidden_inputs
        self._fed = self.hidden_inputs != NOTHING
        """True if a step reads the hidden states of the previous one."""
        self._shift = int(not self._fed)
        self.more_rows = not self._fed
        """True if its prefill has one more row for every request that ends."""
        self.ahead = runner.model.models if self._fed else 0
        self._numbers = torch.arange(self._shift, self._shift + max(self._nodes, self._steps), device=runner.device)
        """Positions of a draft's rows behind the committed ones, ``[N or steps]``."""
        self.extends: Sequence[RoundShape] = (
            RoundShape(ForwardMode.DRAFT_EXTEND, self._nodes, self._shift + self._nodes),
        )
        self.further: Sequence[RoundShape] = self._further()

    def _further(self) -> Sequence[RoundShape]:
        shift, topk = self._shift, self._topk
        if topk == 1:
            return [RoundShape(ForwardMode.DECODE, 1, shift + 1 + step, step=step) for step in range(self._steps - 1)]
        return [
            RoundShape(ForwardMode.TARGET_VERIFY, step * topk, shift + step * topk, trees=True, step=step)
            for step in range(1, self._steps)
        ]

    def after_prefill(self, prefill: Prefill) -> Proposal | None:
        newest, ended = prefill.newest, prefill.ended
        if newest is None:
            batch, last = self._prefill(prefill)
            newest = self._runner.forward(batch, prefill.hidden)
            if ended is not None:
                newest = newest.index_select(0, last)
        return None if ended is None else self.look_ahead(ended, newest, ended.members.committed)

    def lay_out(self, step: Step) -> DraftRows:
        """Return the draft's rows for a prefill of the target."""
        tokens: list[int] = []
        positions: list[int] = []
        counts: list[int] = []
        last: list[int] = []
        for request, position, token_ids, is_sampled in step.entries:
            end = position + len(token_ids)
            own = list(token_ids) if self._shift else [*token_ids[1:], *request.tokens(end, end + 1)]
            if is_sampled:
                own.append(0)  # replaced by the sampled token
                last.append(len(tokens) + len(own) - 1)
            tokens += own
            counts.append(len(own))
            positions += range(position, position + len(own))
        lengths = [entry.position + count for entry, count in zip(step.entries, counts, strict=True)]
        return DraftRows(tokens, positions, counts, lengths, last)

    def _prefill(self, prefill: Prefill) -> tuple[ForwardBatch, Tensor]:
        """Return the draft's batch for a prefill, and the last rows in it of the requests that end."""
        page_table, (tokens, positions, counts, lengths, last) = prefill.page_table, self.lay_out(prefill.step)
        device, longest = page_table.device, max(counts)
        ids, places = to_device([tokens, positions], device).unbind()
        ends = to_device(last, device)
        ids.index_copy_(0, ends, prefill.sampled.clamp(min=0))
        geometry = Geometry(
            ForwardMode.EXTEND,
            page_table,
            to_device(lengths, device, np.int32),
            self._runner.capacity.page_size,
            rows=len(tokens),
            max_seq_len=max(lengths),
            max_new=longest,
            new_lens=None if len(tokens) == longest * len(counts) else to_device(counts, device, np.int32),
            host=HostLengths(counts, lengths) if self._runner.exact_prefill else None,
            typical=TypicalLens.of(lengths),
        )
        batch = ForwardBatch(geometry, ids, places)
        self._runner.attention.plan(batch)
        batch.mark_forward_metadata_ready()
        return batch, ends

    def catch_up(self, batches: Batches, lengths: Tensor, accepted: Accepted, hidden: Tensor | None) -> Tensor | None:
        _, out = self._extend(batches, lengths, accepted, hidden)
        return newest_rows(out, accepted)

    def _extend(
        self, batches: Batches, lengths: Tensor, accepted: Accepted, hidden: Tensor | None
    ) -> tuple[ForwardBatch, Tensor]:
        """Return the draft's batch over a round's nodes, and its hidden states ``[requests, N, hidden]``."""
        nodes = self._nodes
        positions = lengths.unsqueeze(1) + self._numbers[:nodes]
        batch = batches.make(ForwardMode.DRAFT_EXTEND, lengths + (self._shift + nodes), positions)
        batch.input_ids = accepted.tokens.clamp(min=0).flatten()
        if hidden is not None and self._topk > 1:
            path = accepted.path.unsqueeze(2).expand(-1, -1, hidden.shape[1])
            hidden = hidden.unflatten(0, (-1, nodes)).gather(1, path).flatten(0, 1)
        batches.begin(batch)
        out: Tensor = self._runner.forward(batch, hidden).unflatten(0, (-1, nodes))
        return batch, out

    def look_ahead(self, batches: Batches, newest: Tensor | None, lengths: Tensor) -> Proposal:
        assert newest is not None
        if self._topk > 1:
            return self._grow(batches, newest, lengths)
        hidden, members, steps = newest, batches.members, self._steps - 1
        # The lengths of all steps; their plans are made before the first of them runs.
        positions = lengths + self._numbers[: steps + 1].unsqueeze(1)
        places = members.places(lengths, steps + 1)
        ahead = [
            batches.make(ForwardMode.DECODE, positions[step + 1], positions[step].unsqueeze(1), step=step)
            for step in range(steps)
        ]
        runner = self._runner
        tokens = [runner.choose(hidden, members.sampled(places[0]))]
        for step, batch in enumerate(ahead, 1):
            batch.input_ids = tokens[-1].clamp(min=0)
            batches.begin(batch)
            hidden = runner.forward(batch, hidden if self._fed else None, step)
            tokens.append(runner.choose(hidden, members.sampled(places[step]), step))
        return Proposal(torch.stack(tokens, 1))

    def _grow(self, batches: Batches, hidden: Tensor, lengths: Tensor) -> Proposal:
        """Grow a tree level by level. Each step runs all nodes so far, so that each sees its own ancestors.

        The chain of best tokens, which a draft without branches would propose, is always part of it, so branches never
        reduce what is accepted. Its nodes come first in every level.
        """
        members, topk, runner = batches.members, self._topk, self._runner
        start = lengths + self._shift  # the position of the next row
        places = members.places(lengths, self._steps)
        tokens, logprobs = runner.best(hidden, members.sampled(places[0]), topk)
        chain = logprobs[:, :1]
        growth = TreeGrowth(tokens, torch.cat([torch.zeros_like(chain), logprobs[:, 1:]], 1))
        inputs = hidden.unsqueeze(1).expand(-1, topk, -1)
        for step in range(1, self._steps):
            positions = start.unsqueeze(1) + (growth.depths - 1)
            batch = batches.make(
                ForwardMode.TARGET_VERIFY, start + growth.rows, positions, tree=growth.ancestors, step=step
            )
            batch.input_ids = growth.tokens.clamp(min=0).flatten()
            batches.begin(batch)
            out = runner.forward(batch, inputs.flatten(0, 1) if self._fed else None, step)
            newest = out.unflatten(0, (-1, growth.rows))[:, -topk:]
            tokens, logprobs = runner.best(newest.flatten(0, 1), members.sampled(places[step], topk), topk, step)
            # The chain's newest node has a score of 0, so that it stays. Its other children get their real scores here.
            first = chain + logprobs[::topk]
            chain, logprobs = first[:, :1], logprobs.clone()
            logprobs[::topk] = torch.cat([torch.zeros_like(chain), first[:, 1:]], 1)
            growth.grow(tokens, logprobs)
            parents = _parents(growth).unsqueeze(2).expand(-1, -1, newest.shape[2])
            inputs = torch.cat([inputs, newest.gather(1, parents)], 1)
        return growth.proposal(self._nodes)


def newest_rows(hidden: Tensor, accepted: Accepted) -> Tensor:
    """Return the rows ``[requests, width]`` of ``hidden [requests, N, width]`` at the last nodes of accepted paths."""
    last = (accepted.counts - 1).view(-1, 1, 1).expand(-1, 1, hidden.shape[2])
    return hidden.gather(1, last)[:, 0]


def _parents(growth: TreeGrowth) -> Tensor:
    """Return the parents ``[requests, topk]`` of the newest level's nodes, as nodes of the level before."""
    topk = growth.topk
    level = torch.arange(growth.rows - 2 * topk, growth.rows - topk, device=growth.tokens.device)
    return ((growth.ancestors[:, -topk:].unsqueeze(2) >> level) & 1).argmax(2)
