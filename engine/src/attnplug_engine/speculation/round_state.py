"""State that rounds keep on the device, and the members of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug.host import TypicalLens
from attnplug.kernels import to_device
from attnplug_engine.execution.sampling_inputs import SeedOf, sampling_metadata
from attnplug_engine.kernels.sampling_metadata import SamplingMetadata
from attnplug_engine.request import Request
from attnplug_engine.scheduling.step import PENDING, StepEntry
from attnplug_engine.speculation.tree import Proposal
from attnplug_engine.speculation.verify_rows import VerifyRows, verify_rows

_LATER = -1
"""Marker of a newest token that only the device knows."""


class RoundState:
    """Progress and proposals by row of the slot table, with one more row for padded requests.

    A stale proposal is harmless, because the target verifies it. So rows need no clearing between requests.
    """

    def __init__(self, tokens: Tensor, nodes: int, *, trees: bool) -> None:
        rows, device = tokens.shape[0], tokens.device
        self.tokens = tokens
        """Newest token ``[rows]``, whose cache row is not computed yet: the root."""
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        """Committed cache rows ``[rows]``."""
        self.trees = trees
        self.proposed = Proposal(
            torch.full((rows, nodes - 1), -1, dtype=torch.int64, device=device),
            torch.zeros(rows, nodes - 1, dtype=torch.int64, device=device) if trees else None,
        )
        """Proposals of all rows."""

    def propose(self, rows: Tensor, proposal: Proposal) -> None:
        """Keep proposals for the next round; nodes beyond the verified number are dropped."""
        nodes = self.proposed.tokens.shape[1]
        self.proposed.tokens.index_copy_(0, rows, proposal.tokens[:, :nodes])
        if self.proposed.parents is not None and proposal.parents is not None:
            self.proposed.parents.index_copy_(0, rows, proposal.parents[:, :nodes])

    def commit(self, rows: Tensor, lengths: Tensor, tokens: Tensor) -> None:
        """Set ``lengths`` committed rows and the newest ``tokens`` of the requests at ``rows``.

        -1 stands for a token that could not be sampled. What follows is ignored, but its embedding is still looked up.
        """
        self.lengths.index_copy_(0, rows, lengths)
        self.tokens.index_copy_(0, rows, tokens.clamp(min=0))


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """Requests of a round, or those whose prefill ends: tensors ``[requests]`` on the device."""

    rows: Tensor
    """Rows of the slot table, int64."""
    known: Tensor
    """Newest token, int64; -1 if only the device knows it."""
    committed: Tensor
    """Committed cache rows, int64; valid if the newest token is known."""
    prompts: Tensor
    """Prompt lengths, int64."""
    sampling: SamplingMetadata
    """Sampling parameters; ``position`` is undefined."""
    page_table: Tensor
    """Page table ``[requests, pages]`` int32."""
    longest: int
    """Upper bound of the requests' cache rows in this round."""
    state_slots: Tensor | None = None
    typical: TypicalLens | None = None
    """Approximate KV lengths of the requests."""

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
        """Build them from the entries of a round, by two copies to the device, or from entries whose prefill ends."""
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
        sampling = sampling_metadata(requests, seed_of, device, [0] * len(requests))
        typical = TypicalLens.of([before + 1 for before in numbers[2]])
        states = slots if state_slots else None
        return Members(which, known, committed, prompts, sampling, page_table, longest, states, typical)

    def verify_rows(self, state: RoundState) -> VerifyRows:
        """Return the rows to verify: the newest tokens, known to host or device, and the tokens proposed behind
        them."""
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
        """Return output positions ``[count, requests]`` int32: of the token behind ``lengths`` committed rows and the
        newest token, and of the following ones."""
        first = lengths + 1 - self.prompts
        if count == 1:
            return first.int().unsqueeze(0)
        return (first + torch.arange(count, device=first.device).unsqueeze(1)).int()

    def sampled(self, place: Tensor, each: int = 1) -> SamplingMetadata:
        """Return sampling parameters for tokens at ``place [requests]``, repeated for ``each`` rows of every
        request."""
        one = self.sampling

        def rows(values: Tensor) -> Tensor:
            return values if each == 1 else values.unsqueeze(1).repeat(1, each).flatten()

        return SamplingMetadata(
            rows(one.temperature), rows(one.top_k), rows(one.top_p), rows(one.min_p), rows(one.seed), rows(place)
        )
