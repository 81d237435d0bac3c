"""What rounds leave on the device for the next one, and the requests that take part in one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug.host import TypicalLens
from attnplug.kernels import to_device
from attnplug_engine.request import PENDING, Request, StepEntry
from attnplug_engine.sampling_batch import SamplingBatch, SeedOf
from attnplug_engine.speculation.tree import Proposal
from attnplug_engine.speculation.verify_rows import VerifyRows, verify_rows

_LATER = -1
"""Of a newest token: the device has it."""


class RoundState:
    """By row of the slot table, with a row more for padded requests: how far a request is, and what is proposed.

    A proposal may be anything, and what is accepted of it is right: rows need no clearing between requests.
    """

    def __init__(self, tokens: Tensor, nodes: int, *, trees: bool) -> None:
        rows, device = tokens.shape[0], tokens.device
        self.tokens = tokens
        """``[rows]``: the newest token, whose cache row is not computed yet: the root."""
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        """``[rows]``: cache rows that are committed."""
        self.trees = trees
        self.proposed = Proposal(
            torch.full((rows, nodes - 1), -1, dtype=torch.int64, device=device),
            torch.zeros(rows, nodes - 1, dtype=torch.int64, device=device) if trees else None,
        )
        """Of all rows."""

    def propose(self, rows: Tensor, proposal: Proposal) -> None:
        """Keep proposals for the next round; nodes past those that are verified are left out."""
        nodes = self.proposed.tokens.shape[1]
        self.proposed.tokens.index_copy_(0, rows, proposal.tokens[:, :nodes])
        if self.proposed.parents is not None and proposal.parents is not None:
            self.proposed.parents.index_copy_(0, rows, proposal.parents[:, :nodes])

    def commit(self, rows: Tensor, lengths: Tensor, tokens: Tensor) -> None:
        """The requests at ``rows`` have ``lengths`` committed rows, and ``tokens`` as their newest tokens.

        What follows a token that could not be chosen is ignored, but it is looked up all the same.
        """
        self.lengths.index_copy_(0, rows, lengths)
        self.tokens.index_copy_(0, rows, tokens.clamp(min=0))


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """Requests of a round, or those whose prefill ends: tensors ``[requests]`` on the device."""

    rows: Tensor
    """int64: of the slot table."""
    known: Tensor
    """int64: the newest token, -1 where only the device has it."""
    committed: Tensor
    """int64: committed cache rows, where the newest token is known."""
    prompts: Tensor
    """int64: tokens of the prompt."""
    sampling: SamplingBatch
    """How tokens are chosen; its ``position`` means nothing."""
    page_table: Tensor
    """``[requests, pages]`` int32."""
    longest: int
    """No request gets more cache rows in this round."""
    state_slots: Tensor | None = None
    typical: TypicalLens | None = None
    """About how many cache rows the requests have."""

    @property
    def count(self) -> int:
        return self.rows.shape[0]

    @staticmethod
    def of(
        entries: Sequence[StepEntry],
        rows: Sequence[int],
        page_table: Tensor,
        longest: int,
        seed_of: SeedOf,
        state_slots: Sequence[int] = (),
        *,
        prefilled: bool = False,
    ) -> Members:
        """Of the entries of a round, by two copies to the device; or of entries whose prefill ends, after it."""
        requests: list[Request] = [entry.request for entry in entries]
        newest = [entry.token_ids[-1] for entry in entries]
        numbers = [
            list(rows),
            [_LATER if token == PENDING else token for token in newest],
            [entry.position + (len(entry.token_ids) if prefilled else 0) for entry in entries],
            [len(request.prompt) for request in requests],
            list(state_slots or [0] * len(rows)),
        ]
        device = page_table.device
        which, known, committed, prompts, slots = to_device(numbers, device).unbind()
        sampling = SamplingBatch.of(requests, seed_of, device, [0] * len(requests))
        typical = TypicalLens.of([before + 1 for before in numbers[2]])
        states = slots if state_slots else None
        return Members(which, known, committed, prompts, sampling, page_table, longest, states, typical)

    def verify_rows(self, state: RoundState) -> VerifyRows:
        """What is to be verified: the newest tokens, the host's or the device's, and what is proposed after them."""
        return verify_rows(
            self.rows,
            self.known,
            self.committed,
            self.prompts,
            self.sampling,
            state.tokens,
            state.lengths,
            state.proposed,
        )

    def places(self, lengths: Tensor, count: int = 1) -> Tensor:
        """``[count, requests]`` int32: in its request's output, the place of the token after ``lengths`` committed rows
        and the newest token, and of those that follow."""
        first = lengths + 1 - self.prompts
        if count == 1:
            return first.int().unsqueeze(0)
        return (first + torch.arange(count, device=first.device).unsqueeze(1)).int()

    def sampled(self, place: Tensor, each: int = 1) -> SamplingBatch:
        """How tokens at ``place [requests]`` are chosen, for ``each`` so many rows of every request."""
        one = self.sampling

        def rows(values: Tensor) -> Tensor:
            return values if each == 1 else values.unsqueeze(1).repeat(1, each).flatten()

        return SamplingBatch(
            rows(one.temperature), rows(one.top_k), rows(one.top_p), rows(one.min_p), rows(one.seed), rows(place)
        )
