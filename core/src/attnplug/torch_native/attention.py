"""Dense attention of some requests' queries over their gathered cache rows, in float32, tile by tile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug.torch_native.planner import Group

# Scores of one tile: 64 MiB of float32. Long prefills are cut into tiles of queries, which also lets a tile skip the
# keys that none of its queries may see.
_TILE_SCORES = 1 << 24
_INNER_SLICE = 128


@dataclass(frozen=True, slots=True)
class Softmax:
    """What a layer's softmax needs to know."""

    scale: float
    window: int | None
    cap: float | None


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries ``first … last - 1`` of a group and the keys ``start … stop - 1`` that at least one of them sees."""

    first: int
    last: int
    start: int
    stop: int


def attend(q: Tensor, k: Tensor, v: Tensor, group: Group, softmax: Softmax, lse: bool) -> tuple[Tensor, Tensor | None]:
    """Causal attention of one group.

    q ``[requests, queries, heads, dim]``, k ``[requests, keys, kv_heads, dim]`` and v ``[requests, keys, kv_heads,
    v_dim]``. Returns ``[requests, queries, heads, v_dim]`` in q's dtype and, if asked, the log-sum-exp
    ``[requests, queries, heads]`` float32.
    """
    requests, queries, heads, _ = q.shape
    kv_heads = k.shape[2]
    shared = heads // kv_heads
    # [requests, kv_heads, shared, queries, dim]: the query heads of one KV head become rows of one product.
    grouped = q.float().unflatten(2, (kv_heads, shared)).permute(0, 2, 3, 1, 4)
    keys, values = k.float().permute(0, 2, 3, 1), v.float().permute(0, 2, 1, 3)
    out = q.new_empty(requests, queries, heads, v.shape[-1])
    sums = torch.empty(requests, queries, heads, dtype=torch.float32, device=q.device) if lse else None
    for tile in _tiles(group, requests * heads, softmax.window):
        rows = grouped[:, :, :, tile.first : tile.last].flatten(2, 3)
        scores = _products(rows, keys[..., tile.start : tile.stop]).mul_(softmax.scale)
        if softmax.cap is not None:
            scores = scores.div_(softmax.cap).tanh_().mul_(softmax.cap)
        scores = scores.unflatten(2, (shared, tile.last - tile.first))
        if (hidden := _hidden(group, tile, softmax.window)) is not None:
            scores.masked_fill_(hidden[:, None, None], float("-inf"))
        if sums is not None:
            sums[:, tile.first : tile.last] = scores.logsumexp(-1).flatten(1, 2).transpose(1, 2)
        weights = torch.softmax(scores, -1).flatten(2, 3)
        attended = torch.matmul(weights, values[:, :, tile.start : tile.stop])
        attended = attended.unflatten(2, (shared, tile.last - tile.first)).flatten(1, 2)
        out[:, tile.first : tile.last] = attended.transpose(1, 2)
    return out, sums


def _products(rows: Tensor, keys: Tensor) -> Tensor:
    """``rows @ keys``, summed in slices of the inner dimension.

    A product over the 576 columns of an MLA row, accumulated in one go, loses up to 1e-5 in a logit; slices keep the
    float32 result within 2e-6 of float64 and cost one more pass over the scores each.
    """
    slices = zip(rows.split(_INNER_SLICE, -1), keys.split(_INNER_SLICE, -2), strict=True)
    first_rows, first_keys = next(slices)
    products = torch.matmul(first_rows, first_keys)
    for more_rows, more_keys in slices:
        products += torch.matmul(more_rows, more_keys)
    return products


def _tiles(group: Group, score_rows: int, window: int | None) -> Iterator[Tile]:
    step = max(1, min(group.queries, _TILE_SCORES // max(1, score_rows * group.keys)))
    for first in range(0, group.queries, step):
        last = min(first + step, group.queries)
        stop = min(group.keys, group.largest_offset + last)
        start = 0 if window is None else max(0, group.smallest_offset + first - window + 1)
        yield Tile(first, last, start, stop)


def _hidden(group: Group, tile: Tile, window: int | None) -> Tensor | None:
    """``[requests, queries, keys]`` true where a query must not see a key; ``None`` where every key is seen."""
    if window is None and group.queries == 1 and group.smallest_offset == group.largest_offset:
        return None
    device = group.offsets.device
    position = group.offsets[:, None] + torch.arange(tile.first, tile.last, device=device)
    key = torch.arange(tile.start, tile.stop, device=device)
    hidden = key > position[..., None]
    if window is not None:
        hidden |= key <= position[..., None] - window
    return hidden
