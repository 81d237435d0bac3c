"""Default backend: attends to cache rows with torch operations, gathered by slot or, in a CPU decode, in place.

In place, whole pages are read where they are; only each request's last page is copied. Each page gives a partial result
and its log-sum-exp for its request's query; these are merged per request. So a cache row is read once, while a gather
reads it, writes it and reads it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from attnplug.author.attention import PlannedAttention
from attnplug.author.served_layers import NewRows, check_lse, output_width
from attnplug.contract.backend import ForwardExtras
from attnplug.contract.batch import Plan
from attnplug.contract.context import BackendContext
from attnplug.contract.geometry import Geometry
from attnplug.contract.inputs import RaggedCall
from attnplug.declare.errors import PoolError
from attnplug.declare.model import LayerSpec
from attnplug.declare.problem import DType
from attnplug.machine.hardware import IS_ARM
from attnplug.torch_native.attention import RowTiles, Softmax, attend, attend_tiles, decode
from attnplug.torch_native.planner import Extent, Group, padding_bias, plan_groups

# All pages between the batch's first and last one are computed, and results of foreign pages are dropped. A gather is
# faster if less than this share of them belongs to the batch.
_MIN_SHARE = 0.5
# With smaller pages or fewer rows, call overhead exceeds the work. On Arm the small products per page are slower.
_MIN_PAGE_SIZE = 32
_MIN_ROWS = 8192 if IS_ARM else 3072

# Unlike F.scaled_dot_product_attention it also returns the log-sum-exp, [requests, heads, rows].
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True, eq=False)
class PagesInPlace:
    """Plan of requests with one query each, over pages ``first … last - 1`` of a pool and copies of their last pages.

    ``owners`` ``[last - first]`` is the request of each page. ``tails`` ``[requests, longest]`` are the slots of each
    request's last page; ``tail_bias`` ``[requests, 1, 1, longest]`` masks their padding. ``parts`` ``[requests, most]``
    are indices of each request's partial results: pages, then tails, then an empty result as padding.
    """

    first: int
    last: int
    owners: Tensor
    tails: Tensor
    tail_bias: Tensor | None
    parts: Tensor

    @classmethod
    def of(cls, geometry: Geometry) -> PagesInPlace | None:
        """Plan a batch; ``None`` if a gather is faster or requests share pages."""
        size, requests = geometry.page_size, geometry.requests
        if geometry.max_new != 1 or size < _MIN_PAGE_SIZE or not requests or min(geometry.query_lens) != 1:
            return None
        if sum(geometry.kv_lens) < _MIN_ROWS:
            return None
        last_rows = np.array(geometry.kv_lens) - 1
        whole = last_rows // size  # the last page is always a tail, even a full one, so that no tail is empty
        most = int(whole.max())
        if not most:
            return None
        table = geometry.page_table[:, : most + 1].numpy().astype(np.int64)
        used = np.arange(most) < whole[:, None]
        pages, owners = table[:, :most][used], used.nonzero()[0]
        first, last = int(pages.min()), int(pages.max()) + 1
        if first < 0 or len(pages) * size < _MIN_ROWS or len(pages) < _MIN_SHARE * (last - first):
            return None
        owner_of = np.full(last - first, -1)
        owner_of[pages - first] = owners
        if np.count_nonzero(owner_of >= 0) < len(pages):
            return None
        parts = np.full((requests, most + 1), last - first + requests)
        parts[:, :most][used] = pages - first
        parts[:, most] = last - first + np.arange(requests)
        ends = last_rows % size
        places = np.arange(int(ends.max()) + 1)
        tails = table[np.arange(requests), whole][:, None] * size + np.minimum(places, ends[:, None])
        owners_of, slots, indices = map(torch.from_numpy, (owner_of.clip(0), tails, parts))
        bias = padding_bias(ends, len(places)) if ends.min() < ends.max() else None
        return cls(first, last, owners_of, slots, bias, indices)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, last_k: Tensor, last_v: Tensor, scale: float) -> Tensor:
        """Return ``[requests, heads, v_dim]``; all tensors are float32.

        q ``[requests, heads, dim]``, k and v the pool's ``[pages, page_size, kv_heads, dim]``, last_k and last_v the
        rows at ``tails``, ``[requests, longest, kv_heads, dim]``.
        """
        rows = q.unflatten(1, (k.shape[2], -1))
        span = slice(self.first, self.last)
        pages, page_sums = _flash(
            rows.index_select(0, self.owners), k[span].transpose(1, 2), v[span].transpose(1, 2), scale=scale
        )
        mask = None if self.tail_bias is None else self.tail_bias.expand(-1, 1, rows.shape[2], -1)
        tails, tail_sums = _flash(rows, last_k.transpose(1, 2), last_v.transpose(1, 2), attn_mask=mask, scale=scale)
        # The empty result pads requests with fewer pages; its weight is 0.
        empty = tail_sums.new_full((1, *tail_sums.shape[1:]), float("-inf"))
        sums = torch.cat((page_sums, tail_sums, empty)).index_select(0, self.parts.view(-1))
        weights = torch.softmax(sums.view(*self.parts.shape, *sums.shape[1:]), 1)
        results = torch.cat((pages, tails, torch.zeros_like(tails[:1]))).index_select(0, self.parts.view(-1))
        merged = (results.view(*self.parts.shape, *results.shape[1:]) * weights.unsqueeze(-1)).sum(1)
        return merged.flatten(1, 2)


@dataclass(frozen=True, slots=True, eq=False)
class GroupedPlan:
    """Metadata of a plan: groups that cover the batch, and the in-place decode of plain layers if it is faster."""

    groups: tuple[Group, ...]
    pages: PagesInPlace | None


class TorchNativeBackend(PlannedAttention):
    """MHA, GQA and MLA over paged caches of any page size."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._mha, self._mla = context.pools.mha, context.pools.mla
        # 16-bit caches are converted, which copies them anyway.
        self._in_place = (
            self._mha is not None and self._mha.dtype == DType.FLOAT32 and torch.device(context.device).type == "cpu"
        )
        # Layers that torch's fused kernel supports.
        mha = [layer for layer in context.model.full_layers if layer.mla is None and not layer.features]
        self._plain = {layer.layer_id for layer in mha if layer.head_dim == layer.v_head_dim}
        self._fixed_tiles = bool(context.invariant - {"run"})

    def plan(self, geometry: Geometry) -> Plan:
        if self._fixed_tiles and geometry.rows and not geometry.calls:
            return Plan.of(self.backend_id, geometry, RowTiles.of(geometry), geometry.new_slots())
        new_slots, groups = plan_groups(geometry)
        pages = PagesInPlace.of(geometry) if self._in_place else None
        return Plan.of(self.backend_id, geometry, GroupedPlan(groups, pages), new_slots)

    def attend(self, q: Tensor, layer: LayerSpec, plan: Plan, new: NewRows | None, extras: ForwardExtras) -> Tensor:
        work: RowTiles | GroupedPlan = plan.metadata
        if isinstance(work, RowTiles):
            read, softmax = partial(self._read_slots, layer), Softmax.of(layer)
            tiled, lses = attend_tiles(q, work, read, softmax, extras.sinks, output_width(layer))
            if extras.lse is not None:
                extras.lse.copy_(lses)
            return tiled.to(q.dtype)
        groups, lse = work.groups, extras.lse
        if self._in_place and lse is None and q.dtype is torch.float32 and layer.layer_id in self._plain:
            if work.pages is not None and self._mha is not None:
                pages = self._mha.keys(layer.layer_id), self._mha.values(layer.layer_id)
                return work.pages.attend(q, *pages, *self._mha.read(layer.layer_id, work.pages.tails), layer.scale)
            first = groups[0]
            if first.rows is None and first.extent.shared_mask:  # the one group of a decode
                return decode(q, *self._read(layer, first), first.extent.bias, layer.scale)
        softmax = Softmax.of(layer)
        whole = len(groups) == 1 and groups[0].rows is None
        out = q if whole else q.new_empty(*q.shape[:2], output_width(layer))
        for group in groups:
            rows = slice(None) if group.rows is None else group.rows
            result, sums = self._attend_group(q[rows], layer, group, softmax, extras)
            if lse is not None and sums is not None:
                lse[rows] = sums
            if whole:
                return result
            out[rows] = result
        return out

    def _attend_group(
        self, q: Tensor, layer: LayerSpec, group: Group, softmax: Softmax, extras: ForwardExtras
    ) -> tuple[Tensor, Tensor | None]:
        """Return output and log-sum-exp of a group's queries."""
        # With a sink the result is rounded only after scaling.
        queries = (q.float() if layer.sinks else q).unflatten(0, (group.extent.requests, group.extent.queries))
        near = group.within(softmax.window)
        needed = layer.sinks or extras.lse is not None
        result, sums = attend(queries, *self._read(layer, near), near.extent, softmax, needed)
        result, sums = result.flatten(0, 1), None if sums is None else sums.flatten(0, 1)
        if extras.sinks is not None and sums is not None:
            # Total weight of all keys but the sink.
            result = result * torch.sigmoid(sums - extras.sinks).unsqueeze(-1)
        return result.to(q.dtype), sums

    def forward_ragged(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: LayerSpec,
        call: RaggedCall,
        plan: Plan | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        call.check(q, k, v)
        if lse is not None:
            check_lse(lse, q)
        softmax = Softmax.of(layer)
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        query = row = 0
        for queries, rows in zip(call.query_lens, call.kv_lens, strict=True):
            # A query positioned behind all keys sees all of them: non-causal.
            extent = Extent.of(queries, [rows - queries if call.causal else rows], rows, q.device)
            own_q, own_kv = slice(query, query + queries), slice(row, row + rows)
            result, sums = attend(q[None, own_q], k[None, own_kv], v[None, own_kv], extent, softmax, lse is not None)
            out[own_q] = result[0]
            if lse is not None and sums is not None:
                lse[own_q] = sums[0]
            query, row = query + queries, row + rows
        return out

    def _read(self, layer: LayerSpec, group: Group) -> tuple[Tensor, Tensor]:
        """Read keys ``[requests, keys, kv_heads, dim]`` and values of a group's requests."""
        if layer.mla is not None or self._mha is None:
            return self._read_slots(layer, group.slots)
        if group.run is not None and self._in_place and group.run.stop <= self._mha.num_pages * self._mha.page_size:
            layouts = self._mha.layout(layer.layer_id)
            if layouts[0].tokens_evenly_spaced and layouts[1].tokens_evenly_spaced:
                keys, values = self._mha.keys(layer.layer_id), self._mha.values(layer.layer_id)
                return keys.flatten(0, 1)[None, group.run], values.flatten(0, 1)[None, group.run]
        return self._read_slots(layer, group.slots)

    def _read_slots(self, layer: LayerSpec, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Read keys and values at ``slots`` ``[requests, keys]``."""
        if layer.mla is not None:
            if self._mla is None:
                raise PoolError(f"layer {layer.layer_id} is MLA, but {self.backend_id.name} has no MLA pool")
            rows = self._mla.read_rows(layer.layer_id, slots).unsqueeze(2)
            return rows, rows[..., : layer.mla.kv_lora_rank]
        if self._mha is None:
            raise PoolError(f"layer {layer.layer_id} is {layer.kind}, but {self.backend_id.name} has no MHA pool")
        return self._mha.read(layer.layer_id, slots)
