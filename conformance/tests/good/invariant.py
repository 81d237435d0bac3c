"""A correct MHA backend that keeps every level of invariance. Mutants change its source text slightly.

A row is computed in a tile of 4 rows, over splits of 32 keys that are merged in order. Tiles and splits begin at
absolute positions and are padded, so all products have one shape.
"""

from __future__ import annotations

import time  # noqa: F401 # broken variants use it

import torch

from attnplug import BackendSpec, Capabilities, GraphLevel, Plan, PlannedAttention

SPEC = BackendSpec(
    name="good_invariant",
    summary="good",
    contract="1.0",
    factory="good_invariant:Backend",
    capabilities=Capabilities(
        kinds={"mha"},
        devices={"cpu", "cuda"},
        dtypes={"float32"},
        max_speculative_tokens=8,
        cuda_graph=GraphLevel.ALWAYS,
        needs_cpu_seq_lens=False,
        extras={"lse"},
        invariant={"run", "batch", "graph", "chunks", "verify"},
    ),
)
ROWS, SPLIT = 4, 32


class Work:
    """Lengths and pages of a batch, in memory of the plan's own."""

    def __init__(self, geometry):
        self.geometry = geometry
        self.slots, self.lens, self.table = (
            geometry.new_slots().clone(),
            geometry.seq_lens.clone(),
            geometry.page_table.clone(),
        )
        new = geometry.new_lens
        self.new = torch.full_like(self.lens, geometry.max_new) if new is None else new.clone()
        self.rows, self.split = ROWS, SPLIT

    def refill(self, geometry):
        self.lens.copy_(geometry.seq_lens)
        self.table.copy_(geometry.page_table)
        if geometry.new_lens is not None:
            self.new.copy_(geometry.new_lens)
        self.slots.copy_(geometry.new_slots())


class Backend(PlannedAttention):
    calls = 0

    def plan(self, geometry):
        work = Work(geometry)
        return Plan.of(self.backend_id, geometry, work, work.slots)

    def capture(self, geometry, memory):
        return self.plan(geometry)

    def refill(self, plan, geometry):
        plan.metadata.refill(geometry)

    def attend(self, q, layer, plan, new, extras):
        work, start = plan.metadata, 0
        out = q.new_zeros(*q.shape[:2], layer.v_head_dim)
        if extras.lse is not None:
            extras.lse.fill_(float("-inf"))
        self.calls += 1
        for request, (total, count) in enumerate(zip(work.lens.tolist(), work.new.tolist())):
            if not total or not count:
                start += count
                continue
            keys, values = self.rows_of(work, request, total, layer)
            before = total - count
            for first in range(before // work.rows * work.rows, total, work.rows):
                tile = range(max(first, before), min(first + work.rows, total))
                rows = slice(start + tile[0] - before, start + tile[-1] + 1 - before)
                padded = q.new_zeros(work.rows, *q.shape[1:])
                padded[tile[0] - first : tile[-1] + 1 - first] = q[rows]
                result, lse = self.attend_tile(padded, first, keys, values, layer, work, request)
                mine = slice(tile[0] - first, tile[-1] + 1 - first)
                out[rows] = result[mine]
                if extras.lse is not None:
                    extras.lse[rows] = lse[mine]
            start += count
        return out

    def rows_of(self, work, request, total, layer):
        """Keys and values of a request, padded to whole splits: ``[heads, splits, split, dim]``."""
        position, size = torch.arange(total), self.context.page_size
        slots = work.table[request, position // size].long() * size + position % size
        pool = self.context.pools.mha
        found = []
        for rows in (pool.read_keys(layer.layer_id, slots), pool.read_values(layer.layer_id, slots)):
            padded = rows.new_zeros(-(-total // work.split) * work.split, *rows.shape[1:])
            padded[:total] = rows
            group = layer.num_heads // rows.shape[1]
            found.append(padded.repeat_interleave(group, 1).transpose(0, 1).unflatten(1, (-1, work.split)).contiguous())
        return found

    def attend_tile(self, q, first, keys, values, layer, work, request):
        parts = []
        position = first + torch.arange(len(q))[:, None]
        splits = range(-(-(first + len(q)) // work.split))
        for split in [split for split in splits if split < keys.shape[1]]:
            scores = self.scores(q, keys[:, split], work) * layer.scale
            key = split * work.split + torch.arange(work.split)
            scores = scores.masked_fill(key > position, float("-inf"))
            largest = scores.amax(-1).clamp(min=-1e30)
            weights = torch.exp(scores - largest[..., None])
            parts.append((largest, weights.sum(-1), weights @ values[:, split]))
        return self.merge(parts, work, request)

    def scores(self, q, keys, work):
        return q.transpose(0, 1).contiguous() @ keys.transpose(1, 2)

    def merge(self, parts, work, request):
        largest, total, out = parts[0]
        for other, others, product in parts[1:]:
            base = torch.maximum(largest, other)
            kept, added = torch.exp(largest - base), torch.exp(other - base)
            largest, total, out = (
                base,
                total * kept + others * added,
                out * kept[..., None] + product * added[..., None],
            )
        return (out / total[..., None]).transpose(0, 1) + 0.0, (largest + total.log()).T
