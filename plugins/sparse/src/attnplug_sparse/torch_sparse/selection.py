"""Reference implementation of sparse layers: top-k selection, and attention to the selected rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnplug.kernels import Group, Softmax, attend_by_parts, hidden_keys, tiles
from attnplug.sparse import IndexInputs, SelectedRows, SelectedSlots

# Elements of the cache rows gathered per tile: 64 MiB of float32.
_TILE_ELEMENTS = 1 << 24


def choose_positions(index: IndexInputs, keys: Tensor, group: Group, topk: int, scale: float) -> Tensor:
    """Return the top visible positions of each query of a group, ``[requests * queries, topk]`` int32, then -1.

    ``index`` has the group's rows. ``keys`` ``[requests, keys, head_dim]`` are its requests' index keys.
    """
    extent = group.extent
    shape = (extent.requests, extent.queries)
    q, weights = index.q.float().unflatten(0, shape), index.weights.unflatten(0, shape)
    keys = keys.float().transpose(1, 2)
    chosen = torch.full((*shape, topk), -1, dtype=torch.int32, device=q.device)
    for tile in tiles(extent, extent.requests * q.shape[2], None):
        rows = q[:, tile.first : tile.last].flatten(1, 2)
        products = torch.matmul(rows, keys[..., : tile.stop]).mul_(scale).relu_()
        by_head = products.unflatten(1, (-1, q.shape[2]))
        scores = torch.matmul(weights[:, tile.first : tile.last].unsqueeze(2), by_head).squeeze(2)
        hidden = hidden_keys(extent, tile, None)
        if hidden is not None:
            scores.masked_fill_(hidden, float("-inf"))
        found = stable_topk(scores, min(topk, tile.stop))
        chosen[:, tile.first : tile.last, : found.shape[-1]] = found
    return chosen.flatten(0, 1)


def stable_topk(scores: Tensor, topk: int) -> Tensor:
    """Return the positions of the ``topk`` highest scores ``[…, positions]``, in order; -1 at the end for -inf.

    Of equal scores, those at the lowest positions are selected. ``Tensor.topk`` selects any of them, depending on the
    shape of all scores: relu makes many scores of few index heads zero.
    """
    lowest = scores.topk(topk, dim=-1).values[..., -1:]
    above, equal = scores > lowest, scores == lowest
    wanted = topk - above.sum(-1, keepdim=True)
    taken = (above | (equal & (equal.cumsum(-1) <= wanted))) & ~scores.isneginf()
    position = torch.arange(scores.shape[-1], device=scores.device)
    ordered = torch.where(taken, position, scores.shape[-1]).topk(topk, dim=-1, largest=False).values
    return ordered.masked_fill_(ordered == scores.shape[-1], -1)


def selected_slots(selected: SelectedRows, rows: Tensor | slice, group: Group) -> Tensor:
    """Return the slots that a group's queries attend to, ``[requests * queries, width]`` int64; -1 for none."""
    if isinstance(selected, SelectedSlots):
        return selected.slots[rows, : group.extent.keys].long()
    queries = group.extent.queries
    positions = selected.positions[rows, : group.extent.keys].long().unflatten(0, (-1, queries))
    slots = group.slots.unsqueeze(1).expand(-1, queries, -1).gather(2, positions.clamp(min=0))
    return slots.masked_fill_(positions < 0, -1).flatten(0, 1)


def selects_all(slots: Tensor, group: Group) -> bool:
    """Return True if each query attends to every row that it sees, as in a dense layer."""
    extent = group.extent
    if extent.tree is not None or extent.keys > slots.shape[1]:
        return False
    seen = extent.offsets[:, None] + torch.arange(1, extent.queries + 1, device=slots.device)
    return torch.equal((slots >= 0).sum(1), seen.flatten())


def attend_selected(
    q: Tensor, slots: Tensor, read: Callable[[Tensor], Tensor], value_dim: int, softmax: Softmax
) -> tuple[Tensor, Tensor]:
    """Absorbed attention of queries ``[rows, heads, dim]`` to the cache rows at ``slots`` ``[rows, width]`` only.

    ``read`` returns the rows ``[…, dim]`` at some slots; their first ``value_dim`` columns are the values. Returns
    ``[rows, heads, value_dim]`` in q's type, and the log-sum-exp ``[rows, heads]`` float32.
    """
    out = q.new_empty(*q.shape[:2], value_dim)
    sums = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    step = max(1, _TILE_ELEMENTS // max(1, slots.shape[1] * q.shape[2]))
    for first in range(0, q.shape[0], step):
        part = slice(first, first + step)
        where, none = slots[part], slots[part] < 0
        # Instead of a missing row, the query's first one is read again, and masked.
        where = torch.where(none, where[:, :1], where)
        empty = none.all(1)
        keys = read(where.clamp(min=0)).float().masked_fill_(empty[:, None, None], 0.0).unsqueeze(1)
        queries = q[part].float().unsqueeze(2)
        found, lse = attend_by_parts(queries, keys, keys[..., :value_dim], none.unsqueeze(1), None, softmax)
        out[part] = found.squeeze(2).masked_fill_(empty[:, None, None], 0.0)
        sums[part] = lse.squeeze(2)
    return out, sums
