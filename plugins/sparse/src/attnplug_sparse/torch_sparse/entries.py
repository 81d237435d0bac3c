"""Reference implementation of compressed layers: the compressor, selection of entries, and attention to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from attnplug import Geometry
from attnplug.kernels import Group, Softmax, attend_by_parts, spread, to_device
from attnplug.sparse import CompressorInputs, CompressorWeights, IndexInputs, SelectedRows, SelectedSlots
from attnplug_sparse.pools import CompressedPool, EntryCache
from attnplug_sparse.pools.compressed import EntryShape
from attnplug_sparse.torch_sparse.selection import stable_topk

# Elements, or scores, per tile: 64 MiB of float32.
_TILE = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """Windows that a batch completes, and the new tokens that are kept for later windows.

    ``numbers`` ``[windows]`` are the numbers of their entries. The span of a window is its tokens and, with overlap,
    those of the previous window. ``rows`` ``[windows, span]`` is the new row of each token, -1 for a token of an
    earlier step. ``slots`` ``[windows, span]`` is its slot, -1 if there is no previous window. ``kept`` ``[rows]`` are
    the slots of new tokens that are kept, -1 for others. ``earlier`` is True if some tokens are of earlier steps.
    With ``one_by_one``, each entry is computed by itself, so that its bits do not depend on other windows.
    """

    numbers: Tensor
    rows: Tensor
    slots: Tensor
    kept: Tensor
    earlier: bool
    one_by_one: bool = False

    @classmethod
    def of(cls, geometry: Geometry, new_slots: Tensor, shape: EntryShape, *, one_by_one: bool = False) -> Windows:
        ratio, span, size = shape.ratio, shape.ratio * shape.series, geometry.page_size
        query_lens, kv_lens, device = geometry.query_lens, geometry.kv_lens, geometry.device
        starts = [total - new for new, total in zip(query_lens, kv_lens, strict=True)]
        first = [start // ratio for start in starts]
        counts = [total // ratio - begin for begin, total in zip(first, kv_lens, strict=True)]
        owner, numbers = spread(first, counts, device)
        positions = (numbers * ratio + ratio - span).unsqueeze(1) + torch.arange(span, device=device)
        there = positions.clamp(min=0)
        slots = geometry.page_table[owner.unsqueeze(1), there // size].long() * size + there % size
        before, row = to_device([starts, list(accumulate(query_lens, initial=0))[:-1]], device).unbind()
        rows = positions + (row - before)[owner].unsqueeze(1)
        rows.masked_fill_(positions < before[owner].unsqueeze(1), -1)
        kept = new_slots
        if geometry.max_new > shape.kept:
            whose, position = spread(starts, query_lens, device)
            page_end = (position // size + 1) * size
            end = torch.minimum(to_device(kv_lens, device)[whose], page_end)
            kept = new_slots.masked_fill(position < end - shape.kept, -1)
        earlier = any(count and start > max(0, begin * ratio + ratio - span)
                      for start, begin, count in zip(starts, first, counts, strict=True))  # fmt: skip
        return cls(numbers, rows, slots.masked_fill_(positions < 0, -1), kept, earlier, one_by_one)


class Entries:
    """Operations on the entries of a model's compressed layers. For ``one_by_one`` see ``Windows``."""

    def __init__(self, pool: CompressedPool, *, one_by_one: bool = False) -> None:
        self._pool, self._one_by_one = pool, one_by_one
        caches = [pool.entries(layer_id) for layer_id in pool.layer_ids]
        self._shapes = {_key(cache.shape): cache.shape for cache in caches}

    def plan(self, geometry: Geometry, new_slots: Tensor) -> Mapping[tuple[int, int], Windows]:
        """Return the completed windows for each kind of compressor, by ``_key``."""
        alone = self._one_by_one
        return {key: Windows.of(geometry, new_slots, each, one_by_one=alone) for key, each in self._shapes.items()}

    @property
    def ratios(self) -> set[int]:
        """Numbers of tokens per entry."""
        return {shape.ratio for shape in self._shapes.values()}

    def write(self, layer_id: int, inputs: CompressorInputs, windows: Mapping[tuple[int, int], Windows]) -> None:
        """Write the entries that new tokens complete, and keep the tokens of unfinished windows."""
        cache = self._pool.entries(layer_id)
        write_entries(cache, inputs, windows[_key(cache.shape)])

    def make(
        self, layer_id: int, inputs: CompressorInputs, windows: Mapping[tuple[int, int], Windows]
    ) -> tuple[Tensor, Tensor]:
        """Return the entries that new tokens complete, for a coordinator, and keep the tokens of unfinished windows.

        Entries are ``[rows, dim]``, each in the row of its last token, and slots ``[rows]`` those of ``HostRows``, -1
        for tokens that complete none.
        """
        cache = self._pool.entries(layer_id)
        own, rows = windows[_key(cache.shape)], inputs.values.shape[0]
        entries = inputs.values.new_zeros(rows, cache.shape.dim)
        slots = torch.full((rows,), -1, dtype=torch.int64, device=entries.device)
        last = own.rows[:, -1]
        slots[last] = own.slots[:, -1] // cache.shape.ratio
        for part, made in _new_entries(cache, inputs, own):
            entries[last[part]] = made
        return entries, slots

    def write_index(self, layer_id: int, inputs: CompressorInputs, windows: Mapping[tuple[int, int], Windows]) -> None:
        """Write the keys of the layer's index, as ``write`` writes entries."""
        cache = self._index(layer_id)
        write_entries(cache, inputs, windows[_key(cache.shape)])

    def choose(self, layer_id: int, index: IndexInputs, group: Group, topk: int, scale: float) -> Tensor:
        """Return the top visible entries of each query of a group, ``[requests * queries, topk]`` int32, then -1."""
        cache = self._index(layer_id)
        extent, ratio = group.extent, cache.shape.ratio
        shape, heads = (extent.requests, extent.queries), index.q.shape[1]
        chosen = torch.full((*shape, topk), -1, dtype=torch.int32, device=index.q.device)
        keys = _visible(cache, group).float().transpose(1, 2)
        if not keys.shape[2]:
            return chosen.flatten(0, 1)
        q, weights = index.q.float().unflatten(0, shape), index.weights.unflatten(0, shape)
        step = max(1, _TILE // (extent.requests * heads * keys.shape[2]))
        for first in range(0, extent.queries, step):
            part = slice(first, first + step)
            products = torch.matmul(q[:, part].flatten(1, 2), keys).mul_(scale).relu_().unflatten(1, (-1, heads))
            scores = torch.matmul(weights[:, part].unsqueeze(2), products).squeeze(2)
            scores.masked_fill_(_hidden(group, ratio, keys.shape[2], part), float("-inf"))
            found = stable_topk(scores, min(topk, keys.shape[2]))
            chosen[:, part, : found.shape[-1]] = found
        return chosen.flatten(0, 1)

    def attend(self, layer_id: int, q: Tensor, group: Group, softmax: Softmax) -> tuple[Tensor, Tensor]:
        """Attend with queries ``[requests * queries, heads, dim]`` to all entries that each sees.

        Returns output and log-sum-exp ``[requests * queries, heads]``. If a query sees none, its log-sum-exp is -inf
        and its output undefined.
        """
        cache, extent = self._pool.entries(layer_id), group.extent
        rows = _visible(cache, group).float().unsqueeze(1)
        queries = q.unflatten(0, (extent.requests, extent.queries)).transpose(1, 2).float()
        outs, sums = [], []
        step = max(1, _TILE // max(1, extent.requests * q.shape[1] * rows.shape[2]))
        for first in range(0, extent.queries, step):
            part = slice(first, first + step)
            hidden = _hidden(group, cache.shape.ratio, rows.shape[2], part)
            out, lse = attend_by_parts(queries[:, :, part], rows, rows, hidden, None, softmax)
            outs.append(out)
            sums.append(lse)
        out, lse = torch.cat(outs, 2).transpose(1, 2), torch.cat(sums, 2).transpose(1, 2)
        return out.flatten(0, 1), lse.flatten(0, 1)

    def selected_slots(self, layer_id: int, selected: SelectedRows, rows: Tensor | slice, group: Group) -> Tensor:
        """Return the slots, as ``read`` takes them, of the entries that a group's queries attend to.

        ``[requests * queries, width]`` int64, -1 for none.
        """
        ratio = self._pool.entries(layer_id).shape.ratio
        most = max(1, group.extent.keys // ratio)
        if isinstance(selected, SelectedSlots):
            return selected.slots[rows, :most].long() * ratio  # floor: -1 stays negative
        queries = group.extent.queries
        numbers = selected.positions[rows, :most].long().unflatten(0, (-1, queries))
        last = (numbers * ratio + ratio - 1).clamp(min=0)
        slots = group.slots.unsqueeze(1).expand(-1, queries, -1).gather(2, last)
        return slots.masked_fill_(numbers < 0, -1).flatten(0, 1)

    def read(self, layer_id: int, slots: Tensor) -> Tensor:
        """Return entries ``[*slots.shape, dim]``, by the slot of any token of their windows."""
        return self._pool.entries(layer_id).read(slots)

    def read_index(self, layer_id: int, slots: Tensor) -> Tensor:
        """Return keys of the layer's index, as ``read`` returns entries."""
        return self._index(layer_id).read(slots)

    def _index(self, layer_id: int) -> EntryCache:
        cache = self._pool.index(layer_id)
        assert cache is not None, f"layer {layer_id} has no index"
        return cache


def write_entries(cache: EntryCache, inputs: CompressorInputs, windows: Windows) -> None:
    """Write the entries of ``windows``, then keep new tokens, which overwrite tokens that were read before."""
    for part, entries in _new_entries(cache, inputs, windows):
        cache.write(windows.slots[part, -1], entries)


def _new_entries(cache: EntryCache, inputs: CompressorInputs, windows: Windows) -> Iterator[tuple[slice, Tensor]]:
    """Yield entries of ``windows`` with their range, then keep new tokens, which overwrite tokens that were read."""
    shape, new = cache.shape, torch.cat((inputs.values, inputs.gates), 1)
    span = windows.rows.shape[1]
    step = 1 if windows.one_by_one else max(1, _TILE // (span * new.shape[1]))
    for first in range(0, windows.numbers.shape[0], step):
        part = slice(first, first + step)
        rows, slots = windows.rows[part], windows.slots[part]
        tokens = new.index_select(0, rows.clamp(min=0).flatten()).unflatten(0, rows.shape)
        if windows.earlier:
            tokens = torch.where((rows < 0).unsqueeze(-1), cache.read_tokens(slots.clamp(min=0)), tokens)
        entries = _entries(tokens.float(), slots < 0, shape, inputs.weights)
        first_positions = windows.numbers[part] * shape.ratio
        entries = _rotated(entries, first_positions, inputs.weights.frequencies)
        yield part, entries.to(new.dtype)
    cache.write_tokens(windows.kept, new)


def _entries(tokens: Tensor, absent: Tensor, shape: EntryShape, weights: CompressorWeights) -> Tensor:
    """Pool tokens ``[windows, span, values | gates]`` to entries ``[windows, dim]``; some tokens may be ``absent``."""
    values, gates = tokens.chunk(2, -1)
    gates = gates + weights.bias.repeat(shape.series, 1)
    if shape.series == 2:  # first series of the previous window, second series of the window itself
        values, gates = (
            torch.cat((each[:, : shape.ratio, : shape.dim], each[:, shape.ratio :, shape.dim :]), 1)
            for each in (values, gates)
        )
        gates = gates.masked_fill(absent.unsqueeze(-1), float("-inf"))
        values = values.masked_fill(absent.unsqueeze(-1), 0.0)
    pooled = (gates.softmax(1) * values).sum(1)
    return F.rms_norm(pooled, (shape.dim,), weights.norm, weights.eps)


def _rotated(entries: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    angles = positions.unsqueeze(1) * frequencies
    plain, rope = entries.tensor_split((entries.shape[1] - 2 * frequencies.shape[0],), 1)
    pairs = torch.view_as_complex(rope.contiguous().unflatten(1, (-1, 2)))
    rotated = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(1)
    return torch.cat((plain, rotated), 1)


def _visible(cache: EntryCache, group: Group) -> Tensor:
    """Return the entries of a group's requests, ``[requests, entries, dim]``, zero beyond a request's last one."""
    ratio, extent = cache.shape.ratio, group.extent
    count = extent.keys // ratio
    slots = group.slots[:, ratio - 1 :: ratio][:, :count]
    if not count:
        return cache.entries.new_empty(extent.requests, 0, cache.shape.dim)
    entries = cache.read(slots)
    if extent.smallest_offset == extent.largest_offset:
        return entries
    there = ((extent.offsets + extent.queries) // ratio).unsqueeze(1)
    missing = torch.arange(count, device=slots.device) >= there
    return entries.masked_fill(missing.unsqueeze(-1), 0.0)


def _hidden(group: Group, ratio: int, entries: int, part: slice) -> Tensor:
    """Return a mask ``[requests, queries, entries]``, True for entries that a query must not see."""
    extent = group.extent
    places = torch.arange(extent.queries, device=extent.offsets.device)[part]
    complete = (extent.offsets.unsqueeze(1) + places + 1) // ratio
    return torch.arange(entries, device=places.device) >= complete.unsqueeze(-1)


def _key(shape: EntryShape) -> tuple[int, int]:
    return shape.ratio, shape.series
