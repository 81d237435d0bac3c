"""Decode context parallelism for MHA: each rank attends to its share of the cache, and partial results are merged.

vLLM stores row ``n`` of a request on rank ``n % ranks``, in order. The rows that a query sees are therefore a prefix of
a rank's rows. It grows by one row for every ``ranks`` positions, so every ``ranks``-th query of a request forms an
ordinary causal request. Ranks exchange queries: each attends with the heads of all ranks, and gets its own heads back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnplug import ForwardExtras, ForwardMode, Geometry
from attnplug_vllm.geometry import GeometryBuilder, host_lengths
from attnplug_vllm.mha_step import LayerCall
from attnplug_vllm.planner import GroupPlanner, PlannedBatch


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's share of the cache rows. ``group`` returns vLLM's process group of the ranks."""

    ranks: int
    rank: int
    group: Callable[[], Any]

    def visible(self, length: int) -> int:
        """Number of this rank's rows among the first ``length`` rows of a request."""
        return (length + self.ranks - 1 - self.rank) // self.ranks

    def merged(self, out: Tensor, lse: Tensor) -> Tensor:
        """Merge the partial results of all ranks. Overwrites ``out``.

        ``out`` ``[tokens, heads * ranks, dim]`` and ``lse`` ``[tokens, heads * ranks]`` are over this rank's rows;
        without rows, LSE is -inf. Returns ``[tokens, heads, dim]``: this rank's heads over the rows of all ranks.
        """
        group = self.group()
        total = torch.logsumexp(group.all_gather(lse, 0).unflatten(0, (self.ranks, -1)), 0)
        weight = torch.exp(lse - total).masked_fill_(total == float("-inf"), 0.0)  # padded requests
        merged: Tensor = group.reduce_scatter(out.mul_(weight.unsqueeze(-1)), 1)
        return merged


@dataclass(slots=True)
class LocalQueries:
    """Queries that see rows of this rank, in requests of their own: ``order`` are their rows of q, ``requests`` the
    vLLM requests they belong to."""

    order: list[int] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    query_lens: list[int] = field(default_factory=list)
    kv_lens: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, query_lens: Sequence[int], kv_lens: Sequence[int], shard: Shard) -> LocalQueries:
        """Split requests with ``query_lens`` new rows of ``kv_lens`` rows in total."""
        found, row, step = cls(), 0, shard.ranks
        for request, (new, total) in enumerate(zip(query_lens, kv_lens, strict=True)):
            start = total - new
            for offset in range(min(step, new)):
                first = offset if shard.visible(start + offset + 1) else offset + step
                if (count := len(range(first, new, step))) > 0:
                    found.order.extend(range(row + first, row + new, step))
                    found.requests.append(request)
                    found.query_lens.append(count)
                    found.kv_lens.append(shard.visible(start + first + 1) + count - 1)
            row += new
        return found


class ShardedMHAStep:
    """A batch without a graph. The first layer plans it. ``rows`` counts the query rows of all requests."""

    __slots__ = ("_geometries", "_metadata", "_order", "_planned", "_planner", "_shard", "rows")

    def __init__(self, planner: GroupPlanner, geometries: GeometryBuilder, metadata: Any, shard: Shard) -> None:
        self._planner, self._geometries, self._metadata, self._shard = planner, geometries, metadata, shard
        self.rows = int(metadata.query_start_loc_cpu[-1])
        self._order: Tensor | None = None
        self._planned: PlannedBatch | None = None
        """``None`` also if no query sees a row of this rank."""

    def attend(self, call: LayerCall) -> None:
        """Run one layer. Rows behind those of the requests are neither read nor written."""
        if call.q.shape[0] != self.rows:
            call = call.rows(0, self.rows)
        if self._order is None:
            self._plan(call.q.device)
        assert self._order is not None
        write(call, self._planner, self._metadata.slot_mapping[: self.rows])
        q = self._shard.group().all_gather(call.q.contiguous(), 1)
        out = q.new_zeros(*q.shape[:2], call.layer.v_head_dim)
        lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
        if self._planned is not None:
            part, part_lse = local_attention(call, self._planned, q[self._order])
            out[self._order], lse[self._order] = part, part_lse
        call.out.copy_(self._shard.merged(out, lse))

    def _plan(self, device: torch.device) -> None:
        metadata, geometries = self._metadata, self._geometries
        lengths = host_lengths(metadata)
        queries = LocalQueries.of(lengths.query_lens, lengths.kv_lens, self._shard)
        self._order = torch.tensor(queries.order, device=device)
        if not queries.order:
            return
        table = geometries.table(metadata)[torch.tensor(queries.requests, device=device)]
        geometry = Geometry.of_lengths(
            ForwardMode.DECODE if max(queries.query_lens) == 1 else ForwardMode.MIXED,
            table,
            queries.query_lens,
            queries.kv_lens,
            geometries.page_size,
        )
        self._planned = self._planner.plan(geometry)


class CapturedShardedStep:
    """A decode batch that a graph captures. ``seq_lens`` ``[requests]`` are vLLM's local lengths."""

    __slots__ = ("_planner", "_seq_lens", "_shard", "_slots", "planned")

    def __init__(self, planner: GroupPlanner, planned: PlannedBatch, seq_lens: Tensor, slots: Tensor, shard: Shard):
        self._planner, self.planned, self._seq_lens, self._slots = planner, planned, seq_lens, slots
        self._shard = shard

    def attend(self, call: LayerCall) -> None:
        """Run one layer, inside the capture or in the warm-up before it."""
        self.planned.refill()
        write(call, self._planner, self._slots)
        q = self._shard.group().all_gather(call.q.contiguous(), 1)
        out, lse = local_attention(call, self.planned, q)
        empty = (self._seq_lens == 0).unsqueeze(-1)
        requests = empty.shape[0]
        lse[:requests].masked_fill_(empty, float("-inf"))
        lse[requests:] = float("-inf")
        call.out.copy_(self._shard.merged(out, lse))


def write(call: LayerCall, planner: GroupPlanner, slots: Tensor) -> None:
    """Write the new rows whose slots are on this rank; all others have slot -1."""
    if not call.save or call.k is None or call.v is None:
        return
    pool = planner.group.pools().mha
    assert pool is not None
    rows = slots.shape[0]
    pool.write(call.layer.layer_id, slots, call.k[:rows], call.v[:rows])


def local_attention(call: LayerCall, planned: PlannedBatch, q: Tensor) -> tuple[Tensor, Tensor]:
    """Attend to this rank's rows. Returns output ``[rows, heads, v_head_dim]`` and LSE ``[rows, heads]``."""
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    out = planned.attention.attend(
        q, None, None, call.layer, planned.batch, save_kv_cache=False, extras=ForwardExtras(lse=lse)
    )
    return out, lse
