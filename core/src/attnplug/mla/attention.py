"""Running the MLA layers of a model: absorbed, or as MHA by the calls that were planned for the batch (C1, C2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug.contract.backend import AttentionBackend, ForwardExtras, bind_optional_hook
from attnplug.contract.batch import ForwardBatch
from attnplug.contract.geometry import Geometry
from attnplug.contract.hooks import Hook
from attnplug.contract.mode import ForwardMode
from attnplug.contract.plan import BackendId, Plan, received_plan
from attnplug.contract.ragged import Part
from attnplug.contract.sparse import SelectedRows
from attnplug.declare.errors import BackendError, PlanError
from attnplug.declare.model import LayerSpec
from attnplug.declare.problem import ExtendPath
from attnplug.kv import MLAPool
from attnplug.mla.merge import merge_partial
from attnplug.mla.plan import plan_extend
from attnplug.mla.policy import ExtendPolicy
from attnplug.mla.weights import MLAWeights


@dataclass(frozen=True, slots=True, eq=False)
class RowPlaces:
    """Where new rows of a layer are to be stored: that of token ``i`` in ``cache[slots[i]]``.

    Tokens whose slot is negative are padding, and so are those past the last slot: nothing is stored for them.
    """

    cache: Tensor
    """``[slots, row_dim]``: the layer's memory. Rows may lie apart, their numbers are adjacent."""
    slots: Tensor
    """``[rows]`` integers, of any stride."""


class MLAAttention:
    """The MLA layers of one model on one backend. Holds the pool and the policy, and binds the backend's hooks once.

    With ``absorbed``, all batches run absorbed, whatever the policy: layers read rows and further caches in place.
    """

    def __init__(
        self, backend: AttentionBackend, pool: MLAPool, policy: ExtendPolicy, *, absorbed: bool = False
    ) -> None:
        self._backend, self._pool, self._policy, self._absorbed = backend, pool, policy, absorbed
        self._id = BackendId(f"mla over {backend.backend_id.name}")
        self._by_slot = {layer_id: pool.by_slot(layer_id) for layer_id in pool.layer_ids}
        self._plan_chunks: Hook | None = bind_optional_hook(backend, "init_mha_chunk_metadata")
        self._ragged: Hook | None = bind_optional_hook(backend, "forward_ragged")
        needed = backend.claims.mla_extend - {ExtendPath.ABSORBED}
        if needed and self._ragged is None:
            raise BackendError(
                f"backend {backend.backend_id.name} claims the extend paths {', '.join(sorted(needed))}, "
                "but has no forward_ragged"
            )

    def plan(self, geometry: Geometry, path: ExtendPath | None = None) -> Plan | None:
        """How a batch runs as MHA, with its parts as ``metadata``; ``None`` if it runs absorbed.

        ``path`` overrules the policy. If the host has no exact lengths, a backend that can extend absorbed does so.
        """
        path = self.path(geometry, path)
        if path is ExtendPath.ABSORBED:
            return None
        return Plan.of(
            self._id, geometry, plan_extend(geometry, path, self._policy.chunk_capacity), geometry.new_slots()
        )

    def path(self, geometry: Geometry, asked: ExtendPath | None = None) -> ExtendPath:
        """The path of a batch: the one that is ``asked`` for, or the policy's."""
        abilities, mode = self._backend.claims.mla_extend, geometry.mode
        if self._absorbed:
            return self._only_absorbed(asked or self._policy.forced)
        if mode.is_decode or not geometry.rows:
            return ExtendPath.ABSORBED
        chosen = asked is ExtendPath.ABSORBED or (
            asked is None and (mode is not ForwardMode.EXTEND or not geometry.host)
        )
        if chosen and ExtendPath.ABSORBED in abilities:
            return ExtendPath.ABSORBED  # what the policy would say too, without looking at the lengths
        return self._policy.choose(mode, geometry.query_lens, geometry.kv_lens, abilities, asked)

    @staticmethod
    def _only_absorbed(asked: ExtendPath | None) -> ExtendPath:
        if asked not in (None, ExtendPath.ABSORBED):
            raise PlanError(
                f"the extend path {asked} is asked for, and the model's layers read further caches in place, so they "
                f"run {ExtendPath.ABSORBED} only; ask for that one, or for none"
            )
        return ExtendPath.ABSORBED

    def path_of_halves(self, geometry: Geometry) -> ExtendPath | None:
        """The path of the whole batch, by which its halves run too; ``None`` where each takes the policy's.

        By itself, a half of a request that was cut would take another one: it has a prefix. Chunks that are switched
        off stay so: without a prefix the whole batch runs by that path and reads none.
        """
        path = self.path(geometry)
        off = path is ExtendPath.CHUNKED and self._policy.disable_chunked_prefix_cache
        return None if off else path

    def plan_chunks(self, batch: ForwardBatch) -> Plan | None:
        """What the backend plans for the calls of a batch that runs as MHA, if it plans them (A6, A8)."""
        if self._plan_chunks is None:
            return None
        plan = self._plan_chunks(batch, self._policy.disable_ragged)
        if plan is None:
            return None
        who, hook = self._backend.backend_id, "init_mha_chunk_metadata"
        return received_plan(plan, who, batch.forward_mode, batch.num_tokens, hook, delegated=True)

    def row_places(self, layer: LayerSpec, batch: ForwardBatch, tokens: int, dtype: torch.dtype) -> RowPlaces | None:
        """See ``ModelAttention.row_places``."""
        if batch.plan is None or batch.plan.extend is not None:
            return None
        if layer.indexer is not None or layer.compressed is not None:
            return None
        # Judged here already: by a stale plan rows would go to slots that are somebody else's by now (B5).
        slots = batch.plan_for(self._backend.backend_id, tokens).row_slots()
        cache = self._by_slot.get(layer.layer_id)
        if slots is None or cache is None or cache.dtype is not dtype:
            return None
        return RowPlaces(cache, slots)

    def attend(
        self,
        q: Tensor,
        rows: Tensor | None,
        layer: LayerSpec,
        weights: MLAWeights,
        batch: ForwardBatch,
        selected: SelectedRows | None = None,
    ) -> Tensor:
        """One layer; see ``ModelAttention.attend_mla``."""
        if batch.plan is None or batch.plan.extend is None:
            self._check_queries(q, layer, absorbed=rows is None)
            run = self._backend.forward_decode if batch.forward_mode.is_decode else self._backend.forward_extend
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
                "to them as they are; leave them out only where row_places said where to store them"
            )
        self._check_queries(q, layer, absorbed=False)
        plan = batch.check_plan(batch.plan.extend, self._id, q.shape[0])
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
        self,
        q: Tensor,
        rows: Tensor,
        layer: LayerSpec,
        weights: MLAWeights,
        parts: tuple[Part, ...],
        planned: Plan | None,
    ) -> Tensor:
        first, chunks = parts[0], parts[1:]
        lse = self._new_lse(q) if chunks else None
        out = self._run(first, q, rows, layer, weights, planned, lse)
        if lse is None:
            return out
        merged = out.float()
        for part in chunks:
            queries = q if part.rows is None else q[part.rows]
            part_lse = self._new_lse(queries)
            part_out = self._run(part, queries, None, layer, weights, planned, part_lse)
            if part.rows is None:
                merged, lse = merge_partial(merged, lse, part_out, part_lse)
            else:
                merged[part.rows], lse[part.rows] = merge_partial(merged[part.rows], lse[part.rows], part_out, part_lse)
        return merged.to(q.dtype)

    def _run(
        self,
        part: Part,
        q: Tensor,
        rows: Tensor | None,
        layer: LayerSpec,
        weights: MLAWeights,
        planned: Plan | None,
        lse: Tensor | None,
    ) -> Tensor:
        """One ragged call. What it up-projects is alive only here, so memory is bounded by one chunk."""
        if part.slots is not None:
            rows = self._pool.read_rows(layer.layer_id, part.slots).to(q.dtype)
        assert rows is not None and self._ragged is not None
        keys, values = weights.up_project(rows)
        out: Tensor = self._ragged(q, keys, values, layer, part.call, planned, lse)
        return out

    @staticmethod
    def _new_lse(q: Tensor) -> Tensor:
        """Filled with NaN: rows that nobody fills then give NaN, and not whatever was in memory."""
        return torch.full(q.shape[:2], float("nan"), dtype=torch.float32, device=q.device)
