"""The embedded backend: gathers cache rows by slot and attends to them with torch operations."""

from __future__ import annotations

from torch import Tensor

from attnplug.contract.backend import ForwardExtras
from attnplug.contract.batch import ForwardBatch
from attnplug.contract.context import BackendContext
from attnplug.contract.geometry import Geometry
from attnplug.contract.plan import BackendId, Plan
from attnplug.contract.ragged import RaggedCall
from attnplug.declare.claims import Claims, ExtendPath
from attnplug.declare.errors import BackendError, PoolError
from attnplug.declare.model import LayerSpec
from attnplug.kv import MHAPool, MLAPool
from attnplug.torch_native.attention import Softmax, attend
from attnplug.torch_native.planner import Extent, Group, NativeMetadata, plan_groups

_EXTRAS = frozenset({"lse"})


class TorchNativeBackend:
    """MHA, GQA and absorbed MLA over paged caches of any page size. Holds the pools and nothing of any batch."""

    claims = Claims(mla_extend=frozenset(ExtendPath))

    def __init__(self, context: BackendContext) -> None:
        self.backend_id = BackendId(context.name)
        self._page_size = context.page_size
        self._mha: MHAPool | None = context.pools.mha
        self._mla: MLAPool | None = context.pools.mla

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan:
        geometry = Geometry.of(batch, self._page_size)
        return Plan(
            planner=self.backend_id,
            mode=batch.forward_mode,
            query_rows=geometry.query_rows,
            kv_rows=geometry.kv_rows,
            metadata=plan_groups(geometry),
        )

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        *,
        save_kv_cache: bool = True,
        extras: ForwardExtras | None = None,
    ) -> Tensor:
        plan = batch.plan_for(self.backend_id, q.shape[0])
        lse = self._lse(q, extras)
        metadata: NativeMetadata = plan.metadata
        if save_kv_cache:
            self._save(layer, metadata.new_slots, k, v, plan.query_rows)
        softmax = Softmax(layer.scale, layer.sliding_window, layer.logit_cap)
        whole = plan.query_rows == q.shape[0] and len(metadata.groups) == 1 and metadata.groups[0].rows is None
        width = layer.v_head_dim if layer.mla is None else layer.mla.kv_lora_rank
        out = q if whole else q.new_zeros(q.shape[0], q.shape[1], width)  # rows behind the plan stay zero (B5)
        if lse is not None and not whole:
            lse.fill_(float("-inf"))
        for group in metadata.groups:
            rows = slice(0, plan.query_rows) if group.rows is None else group.rows
            queries = q[rows].unflatten(0, (group.extent.requests, group.extent.queries))
            result, sums = attend(queries, *self._read(layer, group), group.extent, softmax, lse is not None)
            if lse is not None and sums is not None:
                lse[rows] = sums.flatten(0, 1)
            if whole:
                return result.flatten(0, 1)
            out[rows] = result.flatten(0, 1)
        return out

    forward_decode = forward_extend  # one new token per request is an extend by one

    def forward_ragged(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: LayerSpec,
        batch: ForwardBatch,
        call: RaggedCall,
        lse: Tensor | None = None,
    ) -> Tensor:
        softmax = Softmax(layer.scale, layer.sliding_window, layer.logit_cap)
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        query = row = 0
        for queries, rows in zip(call.query_lens, call.kv_lens, strict=True):
            # Behind all keys, a query sees every one of them.
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
            rows = self._mla_pool(layer).read_rows(layer.layer_id, group.slots).unsqueeze(2)
            return rows, rows[..., : layer.mla.kv_lora_rank]
        pool = self._mha_pool(layer)
        return pool.read_keys(layer.layer_id, group.slots), pool.read_values(layer.layer_id, group.slots)

    def _save(self, layer: LayerSpec, slots: Tensor, k: Tensor | None, v: Tensor | None, rows: int) -> None:
        if rows == 0:
            return
        if k is None or (v is None) != (layer.mla is not None):
            wants = "k and no v" if layer.mla is not None else "k and v"
            raise BackendError(
                f"layer {layer.layer_id} ({layer.kind}) writes {wants}, but was given k={_shape(k)}, v={_shape(v)}; "
                "pass save_kv_cache=False where nothing is to be written"
            )
        if v is None:
            self._mla_pool(layer).write(layer.layer_id, slots, k[:rows])
        else:
            self._mha_pool(layer).write(layer.layer_id, slots, k[:rows], v[:rows])

    def _lse(self, q: Tensor, extras: ForwardExtras | None) -> Tensor | None:
        if extras is None:
            return None
        if unknown := extras.asked() - _EXTRAS:
            raise BackendError(
                f"backend {self.backend_id.name} was asked for {', '.join(sorted(unknown))}; "
                f"it knows {', '.join(_EXTRAS)}"
            )
        if extras.lse is not None and extras.lse.shape != q.shape[:2]:
            raise BackendError(f"lse has shape {_shape(extras.lse)}, but q has (tokens, heads) {tuple(q.shape[:2])}")
        return extras.lse

    def _mha_pool(self, layer: LayerSpec) -> MHAPool:
        if self._mha is None:
            raise PoolError(
                f"layer {layer.layer_id} is {layer.kind}, but backend {self.backend_id.name} has no MHA pool"
            )
        return self._mha

    def _mla_pool(self, layer: LayerSpec) -> MLAPool:
        if self._mla is None:
            raise PoolError(
                f"layer {layer.layer_id} is {layer.kind}, but backend {self.backend_id.name} has no MLA pool"
            )
        return self._mla


def _shape(tensor: Tensor | None) -> str:
    return "None" if tensor is None else str(tuple(tensor.shape))
