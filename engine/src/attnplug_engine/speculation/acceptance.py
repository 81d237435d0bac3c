"""Acceptance of proposed tokens by the target's choices, and the cache rows that accepted tokens keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug_engine import kernels
from attnplug_engine.speculation.tree import Proposal, ancestors, depths, doublings, with_root


@dataclass(frozen=True, slots=True, eq=False)
class Accepted:
    """Accepted nodes of each request in a round."""

    counts: Tensor
    """Number of accepted nodes ``[requests]`` int64, 1 to N; the root is always accepted."""
    path: Tensor
    """Accepted nodes from the root on, ``[requests, N]`` int64; 0 behind them."""
    tokens: Tensor
    """Tokens that the target chose at the path's nodes, ``[requests, N]`` int64; -1 behind them."""


def accept(proposal: Proposal, chosen: Tensor) -> Accepted:
    """Return the accepted nodes. ``chosen [requests, N]`` int64 is the target's token behind each node.

    A node is accepted if its parent is, and if its token was chosen there. The path leads to the deepest such node, of
    equally deep ones to the first, because siblings may have the same token. Nothing follows a chosen -1 (bad logits),
    and no node without a token is accepted.
    """
    if kernels.usable(chosen):
        from attnplug_engine.kernels.trees import accept as launch

        return Accepted(*launch(proposal.tokens, proposal.parents, chosen))
    nodes, tokens = chosen.shape[1], proposal.tokens
    place = torch.arange(nodes, device=chosen.device)
    if proposal.parents is None:
        matched = (tokens == chosen[:, :-1]) & (tokens >= 0)
        counts = matched.cumprod(1).sum(1) + 1
        path = torch.where(place < counts.unsqueeze(1), place, 0)
    else:
        counts, path = _deepest(tokens, proposal.parents, chosen)
    found = torch.where(place < counts.unsqueeze(1), chosen.gather(1, path), -1)
    return Accepted(counts, path, found)


def accept_and_commit(
    proposal: Proposal, chosen: Tensor, rows: Tensor, committed: Tensor, lengths: Tensor, tokens: Tensor
) -> Accepted:
    """Run ``accept`` and commit the result; one launch on CUDA.

    ``committed [requests]`` are the cache rows before. The new lengths and newest tokens go to ``rows [requests]`` of
    ``lengths`` and ``tokens``; a token of -1 becomes 0, whose embedding is looked up and ignored.
    """
    if kernels.usable(chosen):
        from attnplug_engine.kernels.trees import accept as launch

        return Accepted(*launch(proposal.tokens, proposal.parents, chosen, (rows, committed, lengths, tokens)))
    accepted = accept(proposal, chosen)
    lengths.index_copy_(0, rows, committed + accepted.counts)
    newest = accepted.tokens.gather(1, accepted.counts.unsqueeze(1) - 1)[:, 0]
    tokens.index_copy_(0, rows, newest.clamp(min=0))
    return accepted


def _deepest(tokens: Tensor, parents: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return counts ``[requests]`` and paths ``[requests, N]`` in trees."""
    requests, nodes = chosen.shape
    up, depth, bits = with_root(parents), depths(parents), ancestors(parents)
    good = torch.ones_like(up, dtype=torch.bool)
    good[:, 1:] = (tokens == chosen.gather(1, up[:, 1:])) & (tokens >= 0)
    for _ in range(doublings(up)):
        good, up = good & good.gather(1, up), up.gather(1, up)
    last = torch.where(good, depth, -1).argmax(1, keepdim=True)
    place = torch.arange(nodes, device=chosen.device)
    is_on = (bits.gather(1, last) >> place) & 1
    path = torch.zeros(requests, nodes + 1, dtype=torch.int64, device=chosen.device)
    path.scatter_(1, torch.where(is_on > 0, depth, nodes), place.expand(requests, -1))
    return depth.gather(1, last)[:, 0] + 1, path[:, :nodes]


def moves(accepted: Accepted, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``sources`` and ``targets [requests * N]`` for ``KVPools.move_rows``; node i was written at ``slots[:,
    i]``.

    The accepted nodes' rows move to the front in their order. A target is -1 if its row does not move.
    """
    if kernels.usable(slots):
        from attnplug_engine.kernels.trees import moves as launch

        return launch(accepted.path, accepted.counts, slots)
    path, place = accepted.path, torch.arange(slots.shape[1], device=slots.device)
    moved = (place < accepted.counts.unsqueeze(1)) & (path != place)
    return slots.gather(1, path).flatten(), torch.where(moved, slots, -1).flatten()
