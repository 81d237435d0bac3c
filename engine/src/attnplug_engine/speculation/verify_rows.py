"""Rows of a verify: each request's newest token and the tokens proposed behind it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug_engine import kernels
from attnplug_engine.kernels.sampling_metadata import SamplingMetadata
from attnplug_engine.speculation.tree import Proposal, ancestors, depths


@dataclass(frozen=True, slots=True, eq=False)
class VerifyRows:
    """N rows of each request, the root first."""

    lengths: Tensor
    """Committed cache rows ``[requests]`` int64; the root's position."""
    seq_lens: Tensor
    """Lengths ``[requests]`` int32, with all N rows."""
    ids: Tensor
    """Token ids ``[requests * N]`` int64; a missing node is token 0."""
    positions: Tensor
    """Positions ``[requests * N]`` int64."""
    tree: Tensor | None
    """``Geometry.tree`` ``[requests, N]`` int64; None for chains."""
    proposal: Proposal
    """The requests' proposals."""
    sampling: SamplingMetadata
    """Sampling parameters of the token behind each row."""


def verify_rows(
    rows: Tensor,
    known: Tensor,
    committed: Tensor,
    prompts: Tensor,
    sampling: SamplingMetadata,
    tokens: Tensor,
    lengths: Tensor,
    proposed: Proposal,
) -> VerifyRows:
    """Lay out the rows of requests at ``rows [requests]`` of the slot table; one launch on CUDA.

    Per request: ``known``, the newest token, or -1 if only the device knows it; ``committed``, the cache rows, if it is
    known; ``prompts``, the prompt's length; ``sampling``, whose ``position`` is undefined. Per row of the table: the
    newest ``tokens``, the committed ``lengths`` and what is ``proposed``. Integers are int64.
    """
    if kernels.usable(rows):
        from attnplug_engine.kernels.trees import lay_out

        starts, seq_lens, ids, positions, tree, drafts, parents, chosen_by = lay_out(
            rows, known, committed, prompts, sampling, tokens, lengths, proposed.tokens, proposed.parents
        )
        return VerifyRows(starts, seq_lens, ids, positions, tree, Proposal(drafts, parents), chosen_by)
    is_known = known >= 0
    newest = torch.where(is_known, known, tokens[rows])
    starts = torch.where(is_known, committed, lengths[rows])
    proposal = Proposal(proposed.tokens[rows], None if proposed.parents is None else proposed.parents[rows])
    nodes = proposal.tokens.shape[1] + 1
    depth, tree = torch.arange(nodes, device=rows.device), None
    if proposal.parents is not None:
        depth, tree = depths(proposal.parents), ancestors(proposal.parents)
    positions = starts.unsqueeze(1) + depth
    ids = torch.cat([newest.unsqueeze(1), proposal.tokens.clamp(min=0)], 1).flatten()

    def each(values: Tensor) -> Tensor:
        return values.repeat_interleave(nodes)

    chosen_by = SamplingMetadata(
        each(sampling.temperature),
        each(sampling.top_k),
        each(sampling.top_p),
        each(sampling.min_p),
        each(sampling.seed),
        (positions + 1 - prompts.unsqueeze(1)).flatten().int(),
    )
    return VerifyRows(starts, (starts + nodes).int(), ids, positions.flatten(), tree, proposal, chosen_by)
