"""Dense attention over gathered cache rows, in tiles of queries, or in tiles of one shape at absolute positions.

The latter is invariant: the bits of a row depend on its own request alone (E3). torch chooses kernels by shape. There
every operation has the same shape in every batch, a row has the same place in its tile, and tiles of keys are merged in
order. Tiles of keys that a row does not see change none of its bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnplug.contract.geometry import Geometry
from attnplug.declare.model import LayerSpec
from attnplug.declare.problem import LARGEST_TREE
from attnplug.machine.runtime import to_device
from attnplug.torch_native.planner import Extent

# Maximum scores of a tile: 64 MiB of float32. A tile of a long prefill also skips keys that none of its queries sees.
_TILE_SCORES = 1 << 24
_INNER_SLICE = 128


@dataclass(frozen=True, slots=True)
class Softmax:
    """Softmax parameters of a layer: ``Softmax(scale=0.125, window=4096, cap=None)``."""

    scale: float
    window: int | None
    cap: float | None

    @classmethod
    def of(cls, layer: LayerSpec) -> Softmax:
        return cls(layer.scale, layer.sliding_window, layer.logit_cap)


class Tile(NamedTuple):
    """Queries ``first … last - 1`` of each request, and the keys ``start … stop - 1`` that any of them sees."""

    first: int
    last: int
    start: int
    stop: int


def attend(
    q: Tensor, k: Tensor, v: Tensor, extent: Extent, softmax: Softmax, lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Attend over one extent, causally or by its trees.

    q ``[requests, queries, heads, dim]``, k ``[requests, keys, kv_heads, dim]`` and v ``[requests, keys, kv_heads,
    v_dim]``. Returns ``[requests, queries, heads, v_dim]`` in q's dtype and, with ``lse``, the log-sum-exp
    ``[requests, queries, heads]`` float32.
    """
    # torch's fused kernel has neither a logit cap nor a log-sum-exp, and its fallback for values of another width is
    # slower than ours. It adds its mask to the logits, which would not hide a NaN; on a CPU, rows of NaN become 0.
    fused = softmax.cap is None and not lse and k.shape[-1] == v.shape[-1] and extent.tree is None
    fused = fused and not (q.device.type == "cpu" and bool((q.sum() + k[:, :1].sum()).isnan()))  # a tenth of isnan()
    # On a CPU, kernels for 16-bit types are slower than those for float32, some by a factor of 100.
    exact = not fused or q.device.type == "cpu"
    dtype = torch.float32 if exact else q.dtype
    queries, keys, values = (tensor.to(dtype) for tensor in (q, k, v))
    if fused and softmax.window is None and extent.shared_mask:
        found = decode(queries.squeeze(1), keys, values, extent.bias, softmax.scale)
        return found.unsqueeze(1).to(q.dtype), None
    queries, keys, values = (tensor.transpose(1, 2) for tensor in (queries, keys, values))
    if fused and extent.plain and softmax.window is None:
        whole = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=softmax.scale, enable_gqa=True
        )
        return whole.transpose(1, 2).to(q.dtype), None
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    sums = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device) if lse else None
    if not fused and k.shape[2] > 1:
        keys, values = keys.contiguous(), values.contiguous()  # once, instead of inside every product
    broken = None
    if extent.tree is not None:
        # A sibling's values may be NaN, and 0 * NaN is NaN. Queries that do see such a key get NaN by its score.
        broken = ~values.isfinite().all(-1)
        values = values.masked_fill(broken.unsqueeze(-1), 0.0)
    for tile in tiles(extent, extent.requests * q.shape[2], softmax.window):
        rows = queries[:, :, tile.first : tile.last]
        seen_keys, seen_values = keys[:, :, tile.start : tile.stop], values[:, :, tile.start : tile.stop]
        hidden = hidden_keys(extent, tile, softmax.window)
        if fused:
            mask = None if hidden is None else ~hidden.unsqueeze(1)
            result = F.scaled_dot_product_attention(
                rows, seen_keys, seen_values, attn_mask=mask, scale=softmax.scale, enable_gqa=True
            )
        else:
            seen_broken = None if broken is None else broken[:, :, tile.start : tile.stop]
            result, tile_sums = attend_by_parts(rows, seen_keys, seen_values, hidden, seen_broken, softmax)
            if sums is not None:
                sums[:, tile.first : tile.last] = tile_sums.transpose(1, 2)
        out[:, tile.first : tile.last] = result.transpose(1, 2)
    return out, sums


def decode(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Attend with one query per request, ``[requests, heads, dim]``, over k and v ``[requests, keys, kv_heads, dim]``.

    The query heads that share a KV head become the rows of one product, so that each key is read once for all of them.
    """
    rows = q.unflatten(1, (k.shape[2], -1))
    mask = None if bias is None else bias.expand(-1, 1, rows.shape[2], -1)
    found = F.scaled_dot_product_attention(rows, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale)
    return found.flatten(1, 2)


def attend_by_parts(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, broken: Tensor | None, softmax: Softmax
) -> tuple[Tensor, Tensor]:
    """Attend step by step in float32, with a logit cap and the log-sum-exp.

    q ``[requests, heads, queries, dim]``, k and v ``[requests, kv_heads, keys, …]``, hidden ``[requests, queries,
    keys]``. A query that sees a ``broken`` key ``[requests, kv_heads, keys]`` gets NaN. Returns the output and the
    log-sum-exp ``[requests, heads, queries]``.
    """
    kv_heads, queries = k.shape[1], q.shape[2]
    # The query heads that share a KV head become rows of one product.
    rows = q.unflatten(1, (kv_heads, -1)).flatten(2, 3)
    scores = products(rows, k.transpose(2, 3)).mul_(softmax.scale)
    if softmax.cap is not None:
        scores = scores.div_(softmax.cap).tanh_().mul_(softmax.cap)
    if broken is not None:
        scores.masked_fill_(broken.unsqueeze(2), float("nan"))
    if hidden is not None:
        scores.unflatten(2, (-1, queries)).masked_fill_(hidden[:, None, None], float("-inf"))
    sums = scores.logsumexp(-1).unflatten(2, (-1, queries)).flatten(1, 2)
    result = torch.matmul(torch.softmax(scores, -1), v)
    return result.unflatten(2, (-1, queries)).flatten(1, 2), sums


def products(rows: Tensor, keys: Tensor) -> Tensor:
    """Return ``rows @ keys``, accumulated in slices of the inner dimension.

    One product over the 576 columns of an MLA row loses up to 1e-5 in a logit. Slices keep the float32 result within
    2e-6 of float64; each costs one more pass over the scores.
    """
    slices = zip(rows.split(_INNER_SLICE, -1), keys.split(_INNER_SLICE, -2), strict=True)
    first_rows, first_keys = next(slices)
    products = torch.matmul(first_rows, first_keys)
    for more_rows, more_keys in slices:
        products += torch.matmul(more_rows, more_keys)
    return products


def tiles(extent: Extent, score_rows: int, window: int | None) -> Iterator[Tile]:
    """Yield tiles ``[queries, keys]`` that cover an extent. A key and a query of a tile have ``score_rows`` scores."""
    step = max(1, min(extent.queries, _TILE_SCORES // max(1, score_rows * extent.keys)))
    for first in range(0, extent.queries, step):
        last = min(first + step, extent.queries)
        stop = min(extent.keys, extent.largest_offset + last)
        start = 0 if window is None else max(0, extent.smallest_offset + first - window + 1)
        yield Tile(first, last, start, stop)


def hidden_keys(extent: Extent, tile: Tile, window: int | None) -> Tensor | None:
    """Return the mask of hidden keys, ``[requests, queries, keys]``; ``None`` if every key is visible."""
    if window is None and extent.queries == 1 and extent.smallest_offset == extent.largest_offset:
        return None
    device = extent.offsets.device
    position = extent.offsets[:, None] + torch.arange(tile.first, tile.last, device=device)
    key = torch.arange(tile.start, tile.stop, device=device)
    hidden = key > position[..., None]
    if window is not None:
        hidden |= key <= position[..., None] - window
    if extent.tree is not None:
        row = key - extent.offsets[:, None]  # index among the new rows; negative for earlier keys
        bits = extent.tree[:, tile.first : tile.last, None] >> row.clamp(0, LARGEST_TREE - 1)[:, None]
        hidden |= (row >= 0)[:, None] & (bits & 1 == 0)
    return hidden


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

    def pad(self, rows: Tensor, fill: float = 0.0) -> Tensor:
        """Return the batch's ``rows`` in all tiles, ``[groups, rows of a group, …]``, and ``fill`` at other places."""
        padded = rows.new_full((self.requests.numel() * ROWS, *rows.shape[1:]), fill)
        padded[self.places] = rows
        return padded.view(len(self.requests), -1, *rows.shape[1:])

    def keys(self, group: int, tile: int, window: int | None) -> tuple[Tensor, Tensor]:
        """Return the slots ``[tiles, KEYS]`` of a tile of keys, and the mask ``[tiles, ROWS, KEYS]`` of those that rows
        do not see. Behind a request's last row, its last slot is repeated."""
        requests, tree = self.requests[group].view(-1, 1, 1), self.geometry.tree
        keys = torch.arange(tile * KEYS, (tile + 1) * KEYS, device=requests.device)
        rows = self.starts[group].view(-1, 1, 1) + torch.arange(ROWS, device=requests.device).unsqueeze(1)
        hidden = keys > rows if window is None else (keys > rows) | (keys <= rows - window)
        if tree is not None:
            first = self.lens[requests] - tree.shape[1]
            bits = tree[requests, (rows - first).clamp(0, tree.shape[1] - 1)]
            hidden |= (keys >= first) & (bits >> (keys - first).clamp(0, LARGEST_TREE - 1) & 1 == 0)
        return self.slots(group, torch.minimum(keys, self.lens[requests] - 1)).squeeze(1), hidden

    def slots(self, group: int, positions: Tensor) -> Tensor:
        """Return the slots of ``positions`` ``[tiles, …, …]`` in the requests of a group's tiles."""
        size = self.geometry.page_size
        return self.table[self.requests[group].view(-1, 1, 1), positions // size] * size + positions % size


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
    count, window, padded = tiles.requests.shape[1], softmax.window, tiles.pad(q.float())
    outs, sums = padded.new_empty(*padded.shape[:3], v_dim), padded.new_empty(padded.shape[:3])
    for index, (first, last) in enumerate(tiles.spans):
        merged = None
        for tile in range(0 if window is None else max(0, first - window + 1) // KEYS, last // KEYS + 1):
            slots, hidden = tiles.keys(index, tile, window)
            keys, values = (each.float().transpose(1, 2) for each in read(slots))
            if merged is None:  # [tiles, kv_heads, ROWS, heads per KV head, dim]
                rows = padded[index].view(count, ROWS, keys.shape[1], -1, q.shape[2]).transpose(1, 2).contiguous()
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
        sums[index] = (base + torch.log(total)).transpose(1, 2).flatten(2).flatten(0, 1)
        # Adding 0.0 turns -0.0 into 0.0, as a further tile of hidden keys would.
        outs[index] = (merged / total.unsqueeze(-1) + 0.0).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        if sinks is not None:  # here and not for all rows: on a CPU, a sigmoid at the end of a tensor has other bits
            outs[index] *= torch.sigmoid(sums[index] - sinks).unsqueeze(-1)
    return outs.flatten(0, 1)[tiles.places], sums.flatten(0, 1)[tiles.places]
