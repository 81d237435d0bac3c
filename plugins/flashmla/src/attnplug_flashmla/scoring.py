"""Which rows each token attends to: scores of all index keys that it sees, and the slots of the best.

By kernels of our own on a GPU, and by torch elsewhere. Nothing here waits for a device, and all of it can be captured.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from attnplug import DType, IndexerDims, IndexInputs, IndexKeyPool
from attnplug_flashmla.sparse_planner import Tokens

_MOST_SCORES = 1 << 26
"""Scores at a time: 256 MiB."""


class Score(Protocol):
    """Scores index keys; see ``score_keys``."""

    def __call__(
        self, q: Tensor, weights: Tensor, pool: IndexKeyPool, layer_id: int, scale: float, tokens: Tokens
    ) -> Tensor: ...


def choose_rows(
    score: Score,
    index: IndexInputs,
    pool: IndexKeyPool,
    layer_id: int,
    dims: IndexerDims,
    tokens: Tokens,
    width: int,
    *,
    by_slots: bool,
) -> Tensor:
    """``[rows, width]`` int32: the ``topk`` best rows that each token sees, then -1; their slots or their positions."""
    rows = len(tokens.owner)
    found = torch.empty(rows, width, dtype=torch.int32, device=index.q.device)
    if tokens.longest <= dims.topk:
        place_rows(None, tokens, dims.topk, found, by_slots=by_slots)
        return found
    step = max(1, _MOST_SCORES // tokens.longest)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        some = tokens.rows(part)
        scores = score(index.q[part], index.weights[part], pool, layer_id, dims.scale, some)
        best = scores.topk(dims.topk, dim=1, sorted=False).indices
        place_rows(best, some, dims.topk, found[part], by_slots=by_slots)
    return found


def score_keys(q: Tensor, weights: Tensor, pool: IndexKeyPool, layer_id: int, scale: float, tokens: Tokens) -> Tensor:
    """``[rows, longest]`` float32: the score of each key for each token; -inf where it sees none."""
    if q.device.type == "cuda":
        from attnplug_flashmla.triton_index import launch_score_keys

        return launch_score_keys(q, weights, pool.keys(layer_id), pool.dtype is DType.FLOAT8_E4M3, scale, tokens)
    position = torch.arange(tokens.longest)
    hidden = position >= tokens.visible.unsqueeze(1)
    keys = pool.read_keys(layer_id, _slots(position.where(~hidden, 0), tokens)).float()
    products = torch.einsum("rhd,rkd->rkh", q.float(), keys).mul_(scale).relu_()
    return torch.einsum("rkh,rh->rk", products, weights).masked_fill_(hidden, float("-inf"))


def place_rows(chosen: Tensor | None, tokens: Tokens, topk: int, found: Tensor, *, by_slots: bool) -> None:
    """Fill ``found`` ``[rows, width]`` int32 with the ``chosen`` positions ``[rows, topk]`` or their slots, then -1.

    A token that sees no more than ``topk`` rows is given all of them, in order, whatever was chosen.
    """
    if found.device.type == "cuda":
        from attnplug_flashmla.triton_index import launch_place_rows

        launch_place_rows(chosen, tokens, topk, found, by_slots)
        return
    column, seen = torch.arange(found.shape[1]), tokens.visible.long().unsqueeze(1)
    positions = column.expand_as(found)
    if chosen is not None:
        padded = torch.nn.functional.pad(chosen, (0, found.shape[1] - topk))
        positions = torch.where(seen <= topk, positions, padded)
    exists = column < seen.clamp(max=topk)
    positions = positions.where(exists, 0)
    found.copy_((_slots(positions, tokens) if by_slots else positions).masked_fill(~exists, -1))


def translate(positions: Tensor, tokens: Tokens) -> Tensor:
    """The slots ``[rows, width]`` int32 of positions of each token's request; -1 stays."""
    return _slots(positions.clamp(min=0).long(), tokens).masked_fill_(positions < 0, -1).int()


def _slots(positions: Tensor, tokens: Tokens) -> Tensor:
    """The slots ``[rows, width]`` int64 of positions. A padded token has no page of its own: it is given page 0."""
    size = tokens.page_size
    page = tokens.table.index_select(0, tokens.owner).gather(1, positions // size).long()
    return page.masked_fill_(tokens.visible.unsqueeze(1) == 0, 0).mul_(size).add_(positions % size)
