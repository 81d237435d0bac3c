"""The embedded backend: gathers cache rows by slot and attends to them with torch operations."""

from __future__ import annotations

from torch import Tensor

from attnplug.author.attention import PlannedAttention
from attnplug.author.served_layers import NewRows, check_lse, output_width
from attnplug.contract.backend import ForwardExtras
from attnplug.contract.context import BackendContext
from attnplug.contract.geometry import Geometry
from attnplug.contract.plan import Plan
from attnplug.contract.ragged import RaggedCall
from attnplug.declare.errors import PoolError
from attnplug.declare.model import LayerSpec
from attnplug.torch_native.attention import Softmax, attend
from attnplug.torch_native.planner import Extent, Group, plan_groups


class TorchNativeBackend(PlannedAttention):
    """MHA, GQA and absorbed MLA over paged caches of any page size. Keeps the pools, and nothing of any batch."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._mha, self._mla = context.pools.mha, context.pools.mla

    def plan(self, geometry: Geometry) -> Plan:
        new_slots, groups = plan_groups(geometry)
        return Plan.of(self.backend_id, geometry, groups, new_slots)

    def attend(self, q: Tensor, layer: LayerSpec, plan: Plan, new: NewRows | None, extras: ForwardExtras) -> Tensor:
        groups: tuple[Group, ...] = plan.metadata
        lse = extras.lse
        softmax = Softmax(layer.scale, layer.sliding_window, layer.logit_cap)
        whole = len(groups) == 1 and groups[0].rows is None
        out = q if whole else q.new_empty(*q.shape[:2], output_width(layer))
        for group in groups:
            rows = slice(None) if group.rows is None else group.rows
            queries = q[rows].unflatten(0, (group.extent.requests, group.extent.queries))
            result, sums = attend(queries, *self._read(layer, group), group.extent, softmax, lse is not None)
            if lse is not None and sums is not None:
                lse[rows] = sums.flatten(0, 1)
            if whole:
                return result.flatten(0, 1)
            out[rows] = result.flatten(0, 1)
        return out

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
        softmax = Softmax(layer.scale, layer.sliding_window, layer.logit_cap)
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        query = row = 0
        for queries, rows in zip(call.query_lens, call.kv_lens, strict=True):
            # A query that comes after all keys sees every one of them.
            extent = Extent.of(queries, [rows - queries if call.causal else rows], rows, q.device)
            mine, theirs = slice(query, query + queries), slice(row, row + rows)
            result, sums = attend(q[None, mine], k[None, theirs], v[None, theirs], extent, softmax, lse is not None)
            out[mine] = result[0]
            if lse is not None and sums is not None:
                lse[mine] = sums[0]
            query, row = query + queries, row + rows
        return out

    def _read(self, layer: LayerSpec, group: Group) -> tuple[Tensor, Tensor]:
        """Keys ``[requests, keys, kv_heads, dim]`` and values of a group's requests."""
        if layer.mla is not None:
            if self._mla is None:
                raise PoolError(f"layer {layer.layer_id} is MLA, but {self.backend_id.name} has no MLA pool")
            rows = self._mla.read_rows(layer.layer_id, group.slots).unsqueeze(2)
            return rows, rows[..., : layer.mla.kv_lora_rank]
        if self._mha is None:
            raise PoolError(f"layer {layer.layer_id} is {layer.kind}, but {self.backend_id.name} has no MHA pool")
        return self._mha.read_keys(layer.layer_id, group.slots), self._mha.read_values(layer.layer_id, group.slots)
