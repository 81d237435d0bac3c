"""Dense attention over gathered cache rows, in tiles of queries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attnplug.declare.model import LayerSpec
from attnplug.declare.problem import LARGEST_TREE
from attnplug.torch_native.planner import Extent

# Maximum scores of a tile: 64 MiB of float32. A tile of a long prefill also skips keys that none of its queries sees.
_TILE_SCORES = 1 << 24
_INNER_SLICE = 128


@dataclass(frozen=True, slots=True)
class Softmax:
    """Softmax parameters of a layer: scale, sliding window and logit cap."""

    scale: float
    window: int | None
    cap: float | None

    @classmethod
    def of(cls, layer: LayerSpec) -> Softmax:
        return cls(layer.scale, layer.sliding_window, layer.logit_cap)


@dataclass(frozen=True, slots=True)
class Tile:
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
    # slower than ours. It adds its mask to the logits, which would not hide a NaN.
    fused = softmax.cap is None and not lse and k.shape[-1] == v.shape[-1] and extent.tree is None
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
    requests, heads, dim = q.shape
    rows = q.view(requests, k.shape[2], heads // k.shape[2], dim)
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
    """Yield tiles of queries that cover an extent. A key and a query of a tile have ``score_rows`` scores."""
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
