"""Draft trees: random trees, their bit masks, and tree attention in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

Parents = tuple[int, ...]
"""Parent of each new row, an earlier row; -1 for a root."""


def chain(rows: int) -> Parents:
    """Return a tree without branches."""
    return tuple(range(-1, rows - 1))


def random_trees(requests: int, rows: int, seed: int = 0) -> tuple[Parents, ...]:
    """Return a different tree per request. Most rows have a parent; some parents have several children."""
    chance = random.Random(seed)
    return tuple(
        tuple(chance.choice([-1, chance.randrange(-1, row), row - 1]) for row in range(rows)) for _ in range(requests)
    )


def ancestors(parents: Parents, row: int) -> list[int]:
    """Return a row and its ancestors, in ascending order."""
    found = []
    while row >= 0:
        found.append(row)
        row = parents[row]
    return found[::-1]


def tree_bits(trees: Sequence[Parents], device: torch.device | str = "cpu") -> Tensor:
    """Return ancestor masks ``[requests, rows]`` in int64, as in ``Geometry.tree``; bit 63 is the sign."""
    bits = [[sum(1 << seen for seen in ancestors(tree, row)) for row in range(len(tree))] for tree in trees]
    signed = [[number - (1 << 64) if number >> 63 else number for number in row] for row in bits]
    return torch.tensor(signed, dtype=torch.int64, device=device)


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, parents: Parents, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of one request's tree in float64: output ``[rows, heads, dim]`` and log-sum-exp ``[rows, heads]``.

    ``q [rows, heads, dim]`` belongs to the last rows of ``k [keys, heads, dim]``. Each row gathers the keys that it
    sees, so the contents of other keys cannot matter.
    """
    q, k, v = q.double(), k.double(), v.double()
    prefix, outs, sums = len(k) - len(parents), [], []
    for row in range(len(parents)):
        seen = [*range(prefix), *(prefix + other for other in ancestors(parents, row))]
        logits = torch.einsum("hd,khd->hk", q[row], k[seen]) * scale
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        sums.append(logits.logsumexp(-1))
        outs.append(torch.einsum("hk,khd->hd", logits.softmax(-1), v[seen]))
    return torch.stack(outs), torch.stack(sums)
