"""What a draft proposes: a chain or a tree of tokens after each request's newest one, and how a tree grows.

The newest token is node 0, the root. Nodes 1 to N-1 are proposed. A parent has a lower number than its children. All
functions here have fixed shapes and read nothing on the host, so that a graph may capture them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug.host import UsageError

MOST_ROWS = 64
"""Of a tree: what a row sees of the others are 64 bits."""


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """Proposed nodes of some requests."""

    tokens: Tensor
    """``[requests, N-1]`` int64: the tokens of nodes 1 to N-1; -1 where there is no node."""
    parents: Tensor | None = None
    """``[requests, N-1]`` int64: the number of each node's parent, 0 for the root. ``None``: a chain."""


def depths(parents: Tensor) -> Tensor:
    """``[requests, N]`` int64: how many ancestors each node has, from ``parents [requests, N-1]``."""
    up = with_root(parents)
    found = torch.ones_like(up)
    found[:, 0] = 0
    for _ in range(doublings(up)):
        found, up = found + found.gather(1, up), up.gather(1, up)
    return found


def ancestors(parents: Tensor) -> Tensor:
    """``[requests, N]`` int64 for ``Geometry.tree``: bit j of node i says that j is i or one of its ancestors."""
    up = with_root(parents)
    found = _bits(up.shape[1], up.device).expand_as(up)
    for _ in range(doublings(up)):
        found, up = found | found.gather(1, up), up.gather(1, up)
    return found


def with_root(parents: Tensor) -> Tensor:
    """``[requests, N]``: the parent of every node; the root is its own."""
    return torch.nn.functional.pad(parents, (1, 0)).clamp(min=0)


def doublings(up: Tensor) -> int:
    """After so many steps, each twice as far as the one before, every node has met the root."""
    return max(up.shape[1] - 1, 1).bit_length()


def _bits(count: int, device: torch.device) -> Tensor:
    """``[count]``: bit i for each i."""
    return torch.ones(count, dtype=torch.int64, device=device) << torch.arange(count, device=device)


@dataclass(frozen=True, slots=True, eq=False)
class _Level:
    """The candidates of one level, all ``[requests, candidates]``."""

    tokens: Tensor
    scores: Tensor
    parents: Tensor
    """Their parents' numbers among all candidates. These count from 1; 0 is the root."""


class TreeGrowth:
    """A tree that a draft grows level by level. Of each level the ``topk`` likeliest nodes live on.

    All children of living nodes are candidates. A candidate's score is the sum of log-probabilities from the root on;
    of equal scores the earlier candidate is better, so that none is taken without its parent.

    At every step a draft runs all living nodes, ``rows`` a request, level by level: ``tokens`` are their ids, positions
    are the root's plus ``depths``, and ``ancestors`` is the batch's ``Geometry.tree``. The root is no such row: the
    draft has it in its cache. The last ``topk`` rows are the newest level, whose children ``grow`` takes.
    """

    def __init__(self, tokens: Tensor, logprobs: Tensor) -> None:
        """``tokens`` int64 and ``logprobs`` float32, ``[requests, topk]``, are the root's children; all live."""
        requests, self.topk = tokens.shape
        self.tokens = tokens
        """``[requests, rows]`` int64."""
        self.ancestors = _bits(self.topk, tokens.device).repeat(requests, 1)
        """``[requests, rows]`` int64: by bits, which rows each one sees."""
        self._scores = _at_most_zero(logprobs)
        self._numbers = torch.arange(1, self.topk + 1, device=tokens.device).expand(requests, -1)
        """``[requests, topk]``: of the newest level."""
        self._levels = [_Level(tokens, self._scores, torch.zeros_like(tokens))]

    @property
    def rows(self) -> int:
        return self.tokens.shape[1]

    @property
    def depths(self) -> Tensor:
        """``[rows]`` int64: 1 for the root's children."""
        return torch.arange(self.rows, device=self.tokens.device) // self.topk + 1

    def grow(self, tokens: Tensor, logprobs: Tensor) -> None:
        """Add a level. ``tokens`` int64 and ``logprobs`` float32, ``[requests * topk, topk]``, are the children of the
        newest level's nodes."""
        requests, topk, rows = self.tokens.shape[0], self.topk, self.rows
        if rows > MOST_ROWS:
            raise UsageError(
                f"a draft of {rows // topk + 1} steps with {topk} branches runs {rows} rows a request; steps less one, "
                f"times branches, may be up to {MOST_ROWS}"
            )
        scores = (self._scores.unsqueeze(2) + _at_most_zero(logprobs).view(requests, topk, topk)).flatten(1)
        level = _Level(tokens.view(requests, topk * topk), scores, self._numbers.repeat_interleave(topk, 1))
        first = sum(each.tokens.shape[1] for each in self._levels) + 1
        self._scores, best = _best(scores, topk)
        self._numbers = best + first
        self._levels.append(level)
        parents = (best // topk) + (rows - topk)
        bits = _bits(rows + topk, tokens.device)[rows:]
        self.ancestors = torch.cat([self.ancestors, self.ancestors.gather(1, parents) | bits], 1)
        self.tokens = torch.cat([self.tokens, level.tokens.gather(1, best)], 1)

    def proposal(self, nodes: int) -> Proposal:
        """The best ``nodes - 1`` of all candidates as a tree of ``nodes`` with the root."""
        tokens = torch.cat([level.tokens for level in self._levels], 1)
        scores = torch.cat([level.scores for level in self._levels], 1)
        parents = torch.cat([level.parents for level in self._levels], 1)
        requests, count = tokens.shape
        if nodes - 1 > count:
            raise UsageError(
                f"a tree of {nodes} nodes was asked for, and {len(self._levels)} steps with {self.topk} branches have "
                f"{count + 1}; ask for up to {count + 1}, or for more steps or branches"
            )
        taken = _best(scores, nodes - 1)[1].sort(1).values  # by level, so that parents come first
        places = torch.zeros(requests, count + 1, dtype=torch.int64, device=tokens.device)
        places.scatter_(1, taken + 1, torch.arange(1, nodes, device=tokens.device).expand(requests, -1))
        return Proposal(tokens.gather(1, taken), places.gather(1, parents.gather(1, taken)))


def _at_most_zero(logprobs: Tensor) -> Tensor:
    """No child is better than its parent, whatever was rounded or is NaN."""
    return logprobs.nan_to_num(nan=-torch.inf, neginf=-torch.inf).clamp(max=0)


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest of each row and their places, of equals the first; ``topk`` says nothing of equals."""
    found = scores.sort(dim=1, descending=True, stable=True)
    return found.values[:, :count], found.indices[:, :count]
