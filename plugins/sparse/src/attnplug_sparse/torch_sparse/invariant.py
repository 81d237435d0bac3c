"""Selection of rows, and attention to them, in tiles of one shape: the bits of a row depend on its request alone (E3).

torch chooses kernels by shape. Here every operation has the same shape in every batch, and a row has the same place in
its tile; see ``RowTiles``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attnplug.kernels import RowTiles, Softmax, merge_partial
from attnplug.sparse import IndexInputs, SelectedRows, SelectedSlots, selected_tensor
from attnplug_sparse.torch_sparse.selection import attend_selected, stable_topk


@dataclass(frozen=True, slots=True, eq=False)
class EntryTiles(RowTiles):
    """Tiles of a batch's query rows whose keys are entries of ``ratio`` tokens each, by number.

    Slots are those of the windows' last tokens. ``spans`` are the first and last entries of each group, ``lens`` the
    numbers of complete windows, and ``shape`` a tile's numbers of rows and of keys. Behind a request's last entry, that
    one is repeated. A request without entries repeats its first window's slot, which no row sees.
    """

    ratio: int
    shape: tuple[int, int]

    @classmethod
    def over(cls, tiles: RowTiles, ratio: int) -> EntryTiles:
        """Return the same tiles of rows, over entries."""
        spans = tuple((0, max((last + 1) // ratio - 1, 0)) for _, last in tiles.spans)
        _, rows, keys = tiles.keys(0, 0, None)[1].shape
        own = tiles.requests, tiles.starts, spans, tiles.places, tiles.table, tiles.lens // ratio, tiles.geometry
        return cls(*own, ratio, (rows, keys))

    def keys(self, group: int, tile: int, window: int | None) -> tuple[Tensor, Tensor]:
        (count, size), device = self.shape, self.requests.device
        numbers = torch.arange(tile * size, (tile + 1) * size, device=device)
        rows = self.starts[group].view(-1, 1, 1) + torch.arange(count, device=device).unsqueeze(1)
        there = torch.minimum(numbers, self.lens[self.requests[group]].view(-1, 1, 1) - 1).clamp_(min=0)
        return self.slots(group, there).squeeze(1), (numbers + 1) * self.ratio > rows + 1

    def slots(self, group: int, positions: Tensor) -> Tensor:
        return RowTiles.slots(self, group, (positions + 1) * self.ratio - 1)


def choose_in_tiles(
    index: IndexInputs, read: Callable[[Tensor], Tensor], tiles: RowTiles, topk: int, scale: float
) -> Tensor:
    """Return the top visible positions of each row, ``[rows, topk]`` int32, then -1.

    ``read`` returns the index keys ``[tiles, keys, head_dim]`` at some slots.
    """
    queries, weights = tiles.pad(index.q.float()), tiles.pad(index.weights)
    count, heads = tiles.requests.shape[1], queries.shape[2]
    chosen = torch.full((*queries.shape[:2], topk), -1, dtype=torch.int32, device=queries.device)
    for group, (_, last) in enumerate(tiles.spans):
        rows, parts, tile = queries[group].unflatten(0, (count, -1)).flatten(1, 2), list[Tensor](), 0
        while not parts or tile * parts[0].shape[1] <= last:
            slots, hidden = tiles.keys(group, tile, None)
            products = torch.matmul(rows, read(slots).float().transpose(1, 2)).mul_(scale).relu_()
            by_head = products.unflatten(1, (-1, heads)).flatten(0, 1)
            scores = torch.matmul(weights[group].unsqueeze(1), by_head).squeeze(1)
            parts.append(scores.masked_fill_(hidden.flatten(0, 1), float("-inf")))
            tile += 1
        scores = torch.cat(parts, 1)
        found = stable_topk(scores, min(topk, scores.shape[1]))
        chosen[group, :, : found.shape[1]] = found
    return chosen.flatten(0, 1)[tiles.places]


def attend_selected_in_tiles(
    q: Tensor,
    selected: SelectedRows,
    topk: int,
    tiles: RowTiles,
    read: Callable[[Tensor], Tensor],
    value_dim: int,
    softmax: Softmax,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Absorbed attention of queries ``[rows, heads, dim]`` to at most ``topk`` selected rows each.

    Returns ``[rows, heads, value_dim]`` and the log-sum-exp ``[rows, heads]``, both float32. ``read`` is that of
    ``attend_selected``.
    """
    given = selected_tensor(selected)[: q.shape[0]].long()
    given = F.pad(given, (0, max(topk - given.shape[1], 0)), value=-1)
    queries, rows = tiles.pad(q.float()), tiles.pad(given, -1)
    outs, sums = queries.new_empty(*queries.shape[:3], value_dim), queries.new_empty(queries.shape[:3])
    for group, slots in enumerate(rows):
        if not isinstance(selected, SelectedSlots):
            positions = slots.unflatten(0, (tiles.requests.shape[1], -1))
            slots = tiles.slots(group, positions.clamp(min=0)).masked_fill(positions < 0, -1).flatten(0, 1)
        outs[group], sums[group] = attend_selected(queries[group], slots, read, value_dim, softmax)
        if sinks is not None:
            outs[group] *= torch.sigmoid(sums[group] - sinks).unsqueeze(-1)
    return outs.flatten(0, 1)[tiles.places], sums.flatten(0, 1)[tiles.places]


def merge_in_tiles(
    tiles: RowTiles, found: tuple[Tensor, Tensor], part: tuple[Tensor, Tensor], sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Merge outputs ``[rows, heads, value_dim]`` and log-sum-exps ``[rows, heads]`` over disjoint keys, then sinks."""
    merged = [tiles.pad(each) for each in found]
    for group, given in enumerate(zip(*merged, *(tiles.pad(each) for each in part), strict=True)):
        out, sums = merge_partial(*given)
        if sinks is not None:
            out = out * torch.sigmoid(sums - sinks).unsqueeze(-1)
        merged[0][group], merged[1][group] = out, sums
    out, sums = (each.flatten(0, 1)[tiles.places] for each in merged)
    return out, sums
