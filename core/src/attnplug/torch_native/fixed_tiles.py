"""Attention in tiles of one shape at absolute positions: the bits of a row depend on its own request alone (E3).

torch chooses kernels by shape. Here every operation has the same shape in every batch, a row has the same place in its
tile, and tiles of keys are merged in order. Tiles of keys that a row does not see change none of its bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug.contract.geometry import Geometry
from attnplug.declare.problem import LARGEST_TREE
from attnplug.machine.runtime import to_device
from attnplug.torch_native.attention import Softmax, products

ROWS, KEYS = 8, 256


@dataclass(frozen=True, slots=True, eq=False)
class RowTiles:
    """Tiles of a batch's query rows, in groups that are computed together.

    ``requests`` and ``starts`` ``[groups, tiles]`` are the request of each tile and the position of its first row,
    ``spans`` the first and last position of each group. ``places`` ``[rows]`` are the indices of the batch's rows in
    all tiles. ``table`` and ``lens`` are copies of the batch's.
    """

    requests: Tensor
    starts: Tensor
    spans: tuple[tuple[int, int], ...]
    places: Tensor
    table: Tensor
    lens: Tensor
    geometry: Geometry

    @classmethod
    def of(cls, geometry: Geometry) -> RowTiles:
        tiles, places, device = list[tuple[int, int, int]](), list[int](), geometry.device
        for request, (new, total) in enumerate(zip(geometry.query_lens, geometry.kv_lens, strict=True)):
            starts = range((total - new) // ROWS * ROWS, total if new else 0, ROWS)
            places += range(row := len(tiles) * ROWS + (total - new) % ROWS, row + new)
            tiles += [(request, start, min(start + ROWS, total) - 1) for start in starts]
        # Missing tiles of a group are computed and dropped, which costs a GPU less than more launches.
        count = 1 if device.type == "cpu" else 32
        tiles += tiles[-1:] * (-len(tiles) % count)
        groups = [tiles[first : first + count] for first in range(0, len(tiles), count)]
        spans = tuple((min(each[1] for each in group), max(each[2] for each in group)) for group in groups)
        requests, first_rows = to_device([each[:2] for each in tiles], device).view(-1, count, 2).unbind(-1)
        lens, table = to_device(geometry.kv_lens, device), geometry.page_table.to(torch.int64, copy=True)
        return cls(requests, first_rows, spans, to_device(places, device), table, lens, geometry)

    def keys(self, group: int, tile: int, window: int | None) -> tuple[Tensor, Tensor]:
        """Return the slots ``[tiles, KEYS]`` of a tile of keys, and the mask ``[tiles, ROWS, KEYS]`` of those that rows
        do not see. Behind a request's last row, its last slot is repeated."""
        requests, size, tree = self.requests[group].view(-1, 1, 1), self.geometry.page_size, self.geometry.tree
        keys = torch.arange(tile * KEYS, (tile + 1) * KEYS, device=requests.device)
        rows = self.starts[group].view(-1, 1, 1) + torch.arange(ROWS, device=requests.device).unsqueeze(1)
        hidden = keys > rows if window is None else (keys > rows) | (keys <= rows - window)
        if tree is not None:
            first = self.lens[requests] - tree.shape[1]
            bits = tree[requests, (rows - first).clamp(0, tree.shape[1] - 1)]
            hidden |= (keys >= first) & (bits >> (keys - first).clamp(0, LARGEST_TREE - 1) & 1 == 0)
        keys = torch.minimum(keys, self.lens[requests] - 1)
        return (self.table[requests, keys // size] * size + keys % size).squeeze(1), hidden


def attend_tiles(
    q: Tensor,
    tiles: RowTiles,
    read: Callable[[Tensor], tuple[Tensor, Tensor]],
    softmax: Softmax,
    sinks: Tensor | None,
    v_dim: int,
) -> tuple[Tensor, Tensor]:
    """Return the output ``[rows, heads, v_dim]`` and the log-sum-exp ``[rows, heads]``, both float32.

    q is ``[rows, heads, dim]``. ``read(slots)`` returns keys and values ``[tiles, KEYS, kv_heads, …]``.
    """
    (groups, count), window = tiles.requests.shape, softmax.window
    padded = q.new_zeros(groups * count * ROWS, *q.shape[1:], dtype=torch.float32)
    padded[tiles.places] = q.float()
    outs, sums = padded.new_empty(*padded.shape[:2], v_dim), padded.new_empty(padded.shape[:2])
    for index, (first, last) in enumerate(tiles.spans):
        own, merged = slice(index * count * ROWS, (index + 1) * count * ROWS), None
        for tile in range(0 if window is None else max(0, first - window + 1) // KEYS, last // KEYS + 1):
            slots, hidden = tiles.keys(index, tile, window)
            keys, values = (each.float().transpose(1, 2) for each in read(slots))
            if merged is None:  # [tiles, kv_heads, ROWS, heads per KV head, dim]
                rows = padded[own].view(count, ROWS, keys.shape[1], -1, q.shape[2]).transpose(1, 2).contiguous()
                largest = rows.new_full(rows.shape[:-1], float("-inf"))
                total, merged = torch.zeros_like(largest), rows.new_zeros(*rows.shape[:-1], v_dim)
            scores = products(rows.flatten(2, 3), keys.transpose(2, 3)).mul_(softmax.scale)
            if softmax.cap is not None:
                scores = scores.div_(softmax.cap).tanh_().mul_(softmax.cap)
            if tiles.geometry.tree is not None:  # a sibling's values may be NaN; see ``attend``
                broken = ~values.isfinite().all(-1)
                scores.masked_fill_(broken.unsqueeze(2), float("nan"))
                values = values.masked_fill(broken.unsqueeze(-1), 0.0)
            scores = scores.view(*largest.shape, KEYS).masked_fill_(hidden[:, None, :, None], float("-inf"))
            before, largest = largest, torch.maximum(largest, scores.amax(-1))
            base = largest.masked_fill(largest == float("-inf"), 0.0)
            weights, kept = torch.exp(scores - base.unsqueeze(-1)), torch.exp(before - base)
            total = total * kept + weights.sum(-1)
            merged = merged * kept.unsqueeze(-1) + torch.matmul(weights.flatten(2, 3), values).view(merged.shape)
        assert merged is not None, "a row sees its own key"
        sums[own] = (base + torch.log(total)).transpose(1, 2).flatten(2).flatten(0, 1)
        # Adding 0.0 turns -0.0 into 0.0, as a further tile of hidden keys would.
        outs[own] = (merged / total.unsqueeze(-1) + 0.0).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        if sinks is not None:  # here and not for all rows: on a CPU, a sigmoid at the end of a tensor has other bits
            outs[own] *= torch.sigmoid(sums[own] - sinks).unsqueeze(-1)
    return outs[tiles.places], sums[tiles.places]
