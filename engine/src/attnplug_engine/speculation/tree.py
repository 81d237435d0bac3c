"""Proposals: a chain or a tree of tokens behind each request's newest one, and the growth of trees.

The newest token is node 0, the root. Nodes 1 to N-1 are proposed. A parent has a lower number than its children. All
functions here have fixed shapes and read nothing on the host, so that a CUDA graph can capture them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import UsageError
from attnplug_engine import kernels

MAX_ROWS = 64
"""Most rows of a tree: a row's visibility mask has 64 bits."""


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """Proposed nodes of several requests."""

    tokens: Tensor
    """Tokens of nodes 1 to N-1, ``[requests, N-1]`` int64; -1 where there is no node."""
    parents: Tensor | None = None
    """Number of each node's parent, ``[requests, N-1]`` int64; 0 is the root. None: a chain."""


def depths(parents: Tensor) -> Tensor:
    """Return the number of ancestors of each node, ``[requests, N]`` int64, from ``parents [requests, N-1]``."""
    if kernels.usable(parents):
        from attnplug_engine.kernels.trees import relate

        return relate(parents)[0]
    up = with_root(parents)
    found = torch.ones_like(up)
    found[:, 0] = 0
    for _ in range(doublings(up)):
        found, up = found + found.gather(1, up), up.gather(1, up)
    return found


def ancestors(parents: Tensor) -> Tensor:
    """Return masks ``[requests, N]`` int64 for ``Geometry.tree``: bit j of node i is set if j is i or one of its
    ancestors."""
    if kernels.usable(parents):
        from attnplug_engine.kernels.trees import relate

        return relate(parents)[1]
    up = with_root(parents)
    found = _bits(up.shape[1], up.device).expand_as(up)
    for _ in range(doublings(up)):
        found, up = found | found.gather(1, up), up.gather(1, up)
    return found


def with_root(parents: Tensor) -> Tensor:
    """Return the parent of every node ``[requests, N]``; the root is its own parent."""
    return torch.nn.functional.pad(parents, (1, 0)).clamp(min=0)


def doublings(up: Tensor) -> int:
    """Number of pointer-doubling steps until every node has reached the root."""
    return max(up.shape[1] - 1, 1).bit_length()


def _bits(count: int, device: torch.device) -> Tensor:
    """Return ``1 << i`` for each i, ``[count]``."""
    return torch.ones(count, dtype=torch.int64, device=device) << torch.arange(count, device=device)


class TreeGrowth:
    """A tree that a draft grows level by level. Of each level, the ``topk`` most likely nodes survive, the best first.

    All children of surviving nodes are candidates. A candidate's score is the sum of log probabilities from the root
    on; of equal scores the earlier candidate is better, so that none is taken without its parent.

    At every step a draft runs all surviving nodes, ``rows`` per request, level by level: ``tokens`` are their ids,
    positions are the root's plus ``depths``, and ``ancestors`` is the batch's ``Geometry.tree``. The root is not among
    these rows: the draft has it in its cache. The last ``topk`` rows are the newest level, whose children ``grow``
    takes.
    """

    def __init__(self, tokens: Tensor, logprobs: Tensor) -> None:
        """``tokens`` int64 and ``logprobs`` float32, ``[requests, topk]``, are the root's children; all survive."""
        self.topk = tokens.shape[1]
        none = tokens[:, :0]
        self.tokens = none
        """Token ids ``[requests, rows]`` int64."""
        self.ancestors = none
        """Visibility masks ``[requests, rows]`` int64: the rows that each one sees."""
        self._newest: tuple[Tensor, Tensor] | None = None
        """Scores and numbers of the newest level, ``[requests, topk]``. Candidates are numbered from 1; 0 is the
        root."""
        self._candidates = none, logprobs[:, :0], none
        """Tokens, scores and parents' numbers of all candidates, ``[requests, candidates]``."""
        self.grow(tokens, logprobs)

    @property
    def rows(self) -> int:
        return self.tokens.shape[1]

    @property
    def depths(self) -> Tensor:
        """Depths ``[rows]`` int64: 1 for the root's children."""
        return torch.arange(self.rows, device=self.tokens.device) // self.topk + 1

    def grow(self, tokens: Tensor, logprobs: Tensor) -> None:
        """Add a level. ``tokens`` int64 and ``logprobs`` float32, ``[requests * topk, topk]``, are the children of the
        newest level's nodes."""
        topk, rows = self.topk, self.rows
        if rows > MAX_ROWS:
            raise UsageError(
                f"a draft of {rows // topk + 1} steps with {topk} branches runs {rows} rows per request; steps minus "
                f"one, times branches, may be up to {MAX_ROWS}"
            )
        before = (self.tokens, self.ancestors), self._newest, self._candidates
        if kernels.usable(tokens):
            from attnplug_engine.kernels.draft_tree import grow

            self.tokens, self.ancestors, *newest, self._candidates = grow(tokens, logprobs, *before)
        else:
            self.tokens, self.ancestors, *newest, self._candidates = _grown(tokens, logprobs, *before)
        self._newest = newest[0], newest[1]

    def proposal(self, nodes: int) -> Proposal:
        """Return the best ``nodes - 1`` of all candidates as a tree of ``nodes`` nodes with the root."""
        tokens, scores, parents = self._candidates
        requests, count = tokens.shape
        if nodes - 1 > count:
            raise UsageError(
                f"a tree of {nodes} nodes was requested, and {self.rows // self.topk} steps with {self.topk} branches "
                f"have {count + 1}; request up to {count + 1}, or for more steps or branches"
            )
        if kernels.usable(tokens):
            from attnplug_engine.kernels.draft_tree import prune

            return Proposal(*prune(tokens, scores, parents, nodes))
        taken = _best(scores, nodes - 1)[1].sort(1).values  # by level: parents come first
        places = torch.zeros(requests, count + 1, dtype=torch.int64, device=tokens.device)
        places.scatter_(1, taken + 1, torch.arange(1, nodes, device=tokens.device).expand(requests, -1))
        return Proposal(tokens.gather(1, taken), places.gather(1, parents.gather(1, taken)))


def _grown(
    tokens: Tensor,
    logprobs: Tensor,
    rows: tuple[Tensor, Tensor],
    newest: tuple[Tensor, Tensor] | None,
    candidates: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Add a level: return tokens and masks of rows, scores and numbers of the newest level, and all candidates."""
    (requests, width), topk = rows[0].shape, tokens.shape[1]
    children = tokens.reshape(requests, -1)
    # No child is better than its parent, even with rounding or NaN.
    scores = logprobs.nan_to_num(nan=-torch.inf, neginf=-torch.inf).clamp(max=0).view_as(children)
    parents = torch.zeros_like(children)
    if newest is not None:
        scores = scores + newest[0].repeat_interleave(topk, 1)
        parents = newest[1].repeat_interleave(topk, 1)
    best_scores, best = _best(scores, topk)
    bits = _bits(width + topk, tokens.device)[width:].expand(requests, -1)
    if newest is not None:
        bits = bits | rows[1].gather(1, best // topk + (width - topk))
    found = tuple(torch.cat(both, 1) for both in zip(candidates, (children, scores, parents), strict=True))
    numbers = best + (candidates[0].shape[1] + 1)
    grown = torch.cat([rows[0], children.gather(1, best)], 1), torch.cat([rows[1], bits], 1)
    return *grown, best_scores, numbers, (found[0], found[1], found[2])


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` largest of each row and their indices, of equals the first; ``topk`` does not define the
    order of equals."""
    found = scores.sort(dim=1, descending=True, stable=True)
    return found.values[:, :count], found.indices[:, :count]
