"""MLA layers of a model, run absorbed or as MHA by ragged calls: prefix chunks and their slots (C1, C2, C3).

Absorbed attention applies a layer's up-projections to queries and outputs; MHA applies them to cache rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from attnplug.author.served_layers import bind_forward
from attnplug.contract.backend import AttentionBackend, ForwardExtras, Hook, bind_optional_hook
from attnplug.contract.batch import BackendId, BatchPlan, ForwardBatch, Plan, received_plan
from attnplug.contract.geometry import Geometry, spread
from attnplug.contract.inputs import Part, RaggedCall, SelectedRows
from attnplug.declare.errors import BackendError, PlanError
from attnplug.declare.model import LayerSpec
from attnplug.declare.problem import ExtendPath, ForwardMode
from attnplug.kv.pools import MLAPool
from attnplug.mla.extend_policy import ExtendPolicy


@dataclass(frozen=True, slots=True, eq=False)
class MLAWeights:
    """Up-projections of one layer, for this rank's heads.

    ``w_kc`` ``[heads, nope, kv_lora_rank]`` projects latents to keys, ``w_vc`` ``[heads, kv_lora_rank, v_head_dim]`` to
    values. Absorbed attention applies the first to the query and the second to the output.
    """

    w_kc: Tensor
    w_vc: Tensor
    by_head: Callable[[Tensor, Tensor], Tensor | None] | None = None
    """Kernel of the host: multiplies ``[rows, heads, inputs | others]`` by ``[heads, inputs, outputs]`` to ``[rows,
    heads, outputs | others]``, copying columns behind the inputs. Returns ``None`` for rows that torch multiplies."""
    w_values: Tensor = field(init=False)
    """``[heads * v_head_dim, kv_lora_rank]``: ``w_vc`` as one contiguous matrix, made once."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "w_values", self.w_vc.transpose(1, 2).reshape(-1, self.w_vc.shape[1]).contiguous())

    def absorb(self, q: Tensor) -> Tensor:
        """Absorb ``w_kc`` into queries: ``[tokens, heads, nope + rope]`` → ``[tokens, heads, kv_lora_rank + rope]``."""
        if self.by_head is not None and (product := self.by_head(q, self.w_kc)) is not None:
            return product
        nope, rank = self.w_kc.shape[1:]
        absorbed = q.new_empty(*q.shape[:2], rank + q.shape[-1] - nope)
        absorbed[..., :rank] = _product(q[..., :nope].transpose(0, 1), self.w_kc).transpose(0, 1)
        absorbed[..., rank:] = q[..., nope:]
        return absorbed

    def project_back(self, latent: Tensor) -> Tensor:
        """Project attended latents to values: ``[tokens, heads, kv_lora_rank]`` → ``[tokens, heads, v_head_dim]``."""
        if self.by_head is not None and (product := self.by_head(latent, self.w_vc)) is not None:
            return product
        return _product(latent.transpose(0, 1), self.w_vc).transpose(0, 1)

    def up_project(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Up-project cache rows ``[rows, kv_lora_rank + rope]`` to keys ``[rows, heads, nope + rope]`` and values
        ``[rows, heads, v_head_dim]``."""
        heads, nope, rank = self.w_kc.shape
        latent, rope = rows[:, :rank], rows[:, rank:]
        keys = rows.new_empty(rows.shape[0], heads, nope + rope.shape[1])
        keys[..., :nope] = _product(latent, self.w_kc.flatten(0, 1).T).unflatten(1, (heads, nope))
        keys[..., nope:] = rope.unsqueeze(1)
        return keys, _product(latent, self.w_values.T).unflatten(1, (heads, -1))


def _product(rows: Tensor, weight: Tensor) -> Tensor:
    """``rows @ weight``, for one matrix or for one per head."""
    product = torch.bmm if weight.dim() == 3 else torch.mm
    if rows.device.type == "cpu" and rows.dtype.itemsize < 4:  # CPU kernels for short dtypes may be 200 times slower
        return product(rows.float(), weight.float()).to(rows.dtype)
    return product(rows, weight)


def merge_partial(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of keys; returns output and log-sum-exp over both.

    Outputs are ``[tokens, heads, dim]``, log-sum-exps ``[tokens, heads]`` float32, natural log; the result is float32.
    A part without keys has log-sum-exp -inf, or +inf from some kernels. It has weight 0, and its output is ignored even
    if it is NaN. A log-sum-exp of NaN was never filled and gives NaN.
    """
    # Some kernels return +inf for a part without keys.
    lse, part_lse = (torch.where(each == float("inf"), float("-inf"), each) for each in (lse, part_lse))
    largest = torch.maximum(lse, part_lse)
    base = torch.where(largest == float("-inf"), 0.0, largest)  # both empty: exp(-inf - 0) is 0, not NaN
    weight, part_weight = torch.exp(lse - base), torch.exp(part_lse - base)
    total = weight + part_weight
    merged = _weighted(out, weight) + _weighted(part, part_weight)
    merged = torch.where(total.unsqueeze(-1) == 0, 0.0, merged / total.unsqueeze(-1))
    return merged, base + torch.log(total)


def _weighted(out: Tensor, weight: Tensor) -> Tensor:
    weight = weight.unsqueeze(-1)
    return torch.where(weight == 0, 0.0, out.float() * weight)


class MLAAttention:
    """MLA layers of one model on one backend. Holds the pool and the policy, and binds the backend's hooks once.

    With ``absorbed``, all batches run absorbed, whatever the policy: layers read rows and further caches in place.
    """

    def __init__(
        self, backend: AttentionBackend, pool: MLAPool, policy: ExtendPolicy, *, absorbed: bool = False
    ) -> None:
        self._backend, self._pool, self.policy, self.absorbed = backend, pool, policy, absorbed
        self._id = BackendId(f"mla over {backend.backend_id.name}")
        self.by_slot = {layer_id: pool.by_slot(layer_id) for layer_id in pool.layer_ids}
        """Memory of each layer by slot, for hosts that store new rows themselves; see ``MLAPool.by_slot``."""
        self._plan_chunks: Hook | None = bind_optional_hook(backend, "init_mha_chunk_metadata")
        self._extend = bind_forward(self, "_extend", backend, "forward_extend")
        self._decode = bind_forward(self, "_decode", backend, "forward_decode")
        self._ragged = bind_forward(self, "_ragged", backend, "forward_ragged")
        needed = backend.claims.mla_extend - {ExtendPath.ABSORBED}
        if needed and self._ragged is None:
            raise BackendError(
                f"backend {backend.backend_id.name} claims the extend paths {', '.join(sorted(needed))}, "
                "but has no forward_ragged"
            )

    def plan(self, geometry: Geometry, path: ExtendPath | None = None) -> Plan | None:
        """Plan how a batch runs as MHA, with its parts as ``metadata``; ``None`` if it runs absorbed.

        ``path`` overrides the policy. Without exact host lengths, a backend that can extend absorbed does so.
        """
        path = self.path(geometry, path)
        if path is ExtendPath.ABSORBED:
            return None
        parts = plan_extend(geometry, path, self.policy.chunk_capacity)
        return Plan.of(self._id, geometry, parts, geometry.new_slots())

    @property
    def captures_mha(self) -> bool:
        """True if extends without prefixes can be captured as MHA, and the policy would run them so."""
        claims, policy = self._backend.claims, self.policy
        chosen = policy.forced in (None, ExtendPath.CHUNKED) and not policy.disable_ragged and not self.absorbed
        return chosen and claims.ragged_graphs and ExtendPath.CHUNKED in claims.mla_extend

    def capture(self, geometry: Geometry) -> Plan:
        """Plan a captured extend as MHA, over its new rows alone: replay it for batches without prefixes only."""
        call = RaggedCall.captured(geometry.requests, geometry.rows, device=geometry.device, lane=geometry.lane)
        slots = torch.full((geometry.rows,), -1, dtype=torch.int64, device=geometry.device)
        return Plan.of(self._id, geometry, (Part(call, None, None),), slots)

    def refill(self, plan: Plan, geometry: Geometry) -> None:
        """Update the plan of a captured extend on the device, inside the graph."""
        assert geometry.new_lens is not None and plan.new_slots is not None
        plan.metadata[0].call.refill(geometry.new_lens)
        plan.new_slots.copy_(geometry.new_slots())

    def path(self, geometry: Geometry, requested: ExtendPath | None = None) -> ExtendPath:
        """Return the path of a batch: the requested one, or the policy's."""
        abilities, mode = self._backend.claims.mla_extend, geometry.mode
        if self.absorbed:
            forced = requested or self.policy.forced
            if forced not in (None, ExtendPath.ABSORBED):
                raise PlanError(
                    f"the extend path {forced} is requested, and the model's layers read further caches in place, so "
                    f"they run {ExtendPath.ABSORBED} only; request that one, or none"
                )
            return ExtendPath.ABSORBED
        if mode.is_decode or not geometry.rows:
            return ExtendPath.ABSORBED
        is_open = requested is None and (mode is not ForwardMode.EXTEND or not geometry.host)
        if ExtendPath.ABSORBED in abilities and (is_open or requested is ExtendPath.ABSORBED):
            return ExtendPath.ABSORBED  # as the policy would choose, without reading the lengths
        return self.policy.choose(mode, geometry.query_lens, geometry.kv_lens, abilities, requested)

    def plan_apart(self, batch: ForwardBatch, first: int, plan: Callable[[ForwardBatch], object]) -> BatchPlan:
        """Plan the ``first`` requests of a mixed batch as decodes and the others as extends, each half by ``plan``."""
        halves = batch.split(first)
        for half, mode in zip(halves, (ForwardMode.DECODE, ForwardMode.EXTEND), strict=True):
            half.geometry = replace(half.geometry, mode=mode)
            plan(half)
        parts = tuple(half.plan.attention for half in halves if half.plan is not None)
        joined = replace(Plan.of(self._id, batch.geometry), parts=parts)
        return BatchPlan(joined, joined, geometry=batch.geometry, halves=halves)

    def plan_chunks(self, batch: ForwardBatch) -> Plan | None:
        """Plan the calls of a batch that runs as MHA; ``None`` if the backend has nothing to plan (A6, A8)."""
        plan = None if self._plan_chunks is None else self._plan_chunks(batch, self.policy.disable_ragged)
        if plan is None:
            return None
        planner, hook = self._backend.backend_id, "init_mha_chunk_metadata"
        return received_plan(plan, planner, batch.forward_mode, batch.num_tokens, hook, delegated=True)

    def attend(
        self,
        q: Tensor,
        rows: Tensor | None,
        layer: LayerSpec,
        weights: MLAWeights,
        batch: ForwardBatch,
        selected: SelectedRows | None = None,
    ) -> Tensor:
        """Run one layer; see ``ModelAttention.attend_mla``."""
        if batch.plan is None or batch.plan.extend is None:
            self._check_queries(q, layer, absorbed=rows is None)
            run = self._decode if batch.forward_mode.is_decode else self._extend
            extras = None if selected is None else ForwardExtras(selected=selected)
            if rows is None:
                out = run(q, None, None, layer, batch, save_kv_cache=False, extras=extras)
            else:
                out = run(weights.absorb(q), rows.unsqueeze(1), None, layer, batch, save_kv_cache=True, extras=extras)
            return weights.project_back(out)
        if layer.indexer is not None:
            raise BackendError(
                f"layer {layer.layer_id} attends to selected rows, and the batch was planned to run as MHA, over all "
                "rows; build the model's attention with all caches of its layers, and plan the batch again"
            )
        if rows is None:
            raise BackendError(
                f"layer {layer.layer_id} was given no new rows, and the batch was planned to run as MHA, which attends "
                "to them; leave them out only in batches that run absorbed, after storing them in the cache"
            )
        self._check_queries(q, layer, absorbed=False)
        plan = batch.check_plan(batch.plan.extend, self._id, q.shape[0])
        if batch.plan.halves:
            parts = (each.tensor_split([batch.plan.halves[0].num_tokens]) for each in (q, rows))
            runs = zip(*parts, batch.plan.halves, strict=True)
            return torch.cat([self.attend(part, new, layer, weights, half) for part, new, half in runs])
        assert plan.new_slots is not None
        planned = plan.query_rows
        self._pool.write(layer.layer_id, plan.new_slots, rows[:planned])
        out = self._as_mha(q[:planned], rows[:planned], layer, weights, plan.metadata, batch.plan.chunks)
        if q.shape[0] == planned:
            return out
        return torch.cat([out, out.new_zeros(q.shape[0] - planned, *out.shape[1:])])

    @staticmethod
    def _check_queries(q: Tensor, layer: LayerSpec, *, absorbed: bool) -> None:
        assert layer.mla is not None
        width = layer.mla.row_dim if absorbed else layer.head_dim
        if q.shape[1:] != (layer.num_heads, width):
            kind = "absorbed, since its rows are stored already" if absorbed else "not absorbed"
            raise BackendError(
                f"layer {layer.layer_id}: q has shape {tuple(q.shape)}, but on this rank it is [rows, "
                f"{layer.num_heads}, {width}], {kind}"
            )

    def _as_mha(
        self, q: Tensor, rows: Tensor, layer: LayerSpec, weights: MLAWeights, parts: tuple[Part, ...], plan: Plan | None
    ) -> Tensor:
        """Run all ragged calls and merge their results. Up-projected rows live only during their call, so memory is
        bounded by one chunk. An LSE is filled with NaN, so that rows a kernel does not fill give NaN, not old memory.
        """
        assert self._ragged is not None
        merged, lse = q, None
        for part in parts:
            queries = q if part.rows is None else q[part.rows]
            part_lse = None
            if len(parts) > 1:
                part_lse = torch.full(queries.shape[:2], float("nan"), dtype=torch.float32, device=q.device)
            keys, values = weights.up_project(
                rows if part.slots is None else self._pool.read_rows(layer.layer_id, part.slots).to(q.dtype)
            )
            out: Tensor = self._ragged(queries, keys, values, layer, part.call, plan, part_lse)
            del keys, values
            if part_lse is None:
                return out
            if lse is None:
                merged, lse = out.float(), part_lse  # the first call has all query rows
            elif part.rows is None:
                merged, lse = merge_partial(merged, lse, out, part_lse)
            else:
                merged[part.rows], lse[part.rows] = merge_partial(merged[part.rows], lse[part.rows], out, part_lse)
        return merged.to(q.dtype)


class Span(NamedTuple):
    """Rows ``start … start + length - 1`` of one request's prefix; ``length`` is never 0."""

    request: int
    start: int
    length: int


Chunk: TypeAlias = tuple[Span, ...]
"""Spans that one kernel call attends to: at most one per request, in the order of requests."""


def plan_prefix_chunks(prefix_lens: Sequence[int], capacity: int) -> tuple[Chunk, ...]:
    """Cover every prefix row exactly once, with as few chunks of at most ``capacity`` rows as possible.

    Chunks are filled one after the other, across requests. Every chunk but the last is full, however skewed the lengths
    are. (Dividing the capacity evenly among requests would leave most of it unused once the short ones end.)
    Requests without a prefix appear in no chunk, since kernels return garbage for empty spans.
    """
    chunks: list[list[Span]] = []
    free = 0
    for request, prefix_len in enumerate(prefix_lens):
        start = 0
        while start < prefix_len:
            if not free:
                chunks.append([])
                free = capacity
            length = min(free, prefix_len - start)
            chunks[-1].append(Span(request, start, length))
            start += length
            free -= length
    return tuple(map(tuple, chunks))


def plan_extend(geometry: Geometry, path: ExtendPath, chunk_capacity: int) -> tuple[Part, ...]:
    """Plan the calls of a batch that runs as MHA, one-shot or chunked. Copies nothing from the device."""
    query_lens, kv_lens, device = geometry.query_lens, geometry.kv_lens, geometry.device
    live = [request for request, new in enumerate(query_lens) if new]
    queries = [query_lens[request] for request in live]
    if path is ExtendPath.ONE_SHOT:
        rows = [kv_lens[request] for request in live]
        call = RaggedCall.of(0, queries, rows, causal=True, device=device, lane=geometry.lane)
        return (Part(call, geometry.span_slots(live, [0] * len(live), rows), None),)
    call = RaggedCall.of(0, queries, queries, causal=True, device=device, lane=geometry.lane)
    parts = [Part(call, None, None)]
    prefixes = [kv - new if new else 0 for new, kv in zip(query_lens, kv_lens, strict=True)]
    starts = list(accumulate(query_lens, initial=0))
    for index, chunk in enumerate(plan_prefix_chunks(prefixes, chunk_capacity), start=1):
        # Not causal: all queries of a chunk's requests come behind the prefix and attend to the whole span.
        requests, lens = [span.request for span in chunk], [span.length for span in chunk]
        queries = [query_lens[request] for request in requests]
        call = RaggedCall.of(index, queries, lens, causal=False, device=device, lane=geometry.lane)
        slots = geometry.span_slots(requests, [span.start for span in chunk], lens)
        starting = [starts[request] for request in requests]
        parts.append(Part(call, slots, None if requests == live else spread(starting, queries, device)[1]))
    return tuple(parts)
