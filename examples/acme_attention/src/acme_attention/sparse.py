"""Sparse MLA in plain torch: an indexer selects rows, and absorbed attention reads only these."""

import torch
from torch import Tensor

from attnplug import ForwardExtras, Geometry, LayerSpec, MLAShape, NewRows, Plan
from attnplug.sparse import IndexerDims, IndexInputs, SelectedPositions
from attnplug_sparse.attention import SparseAttention


class AcmeSparse(SparseAttention):
    def plan(self, geometry: Geometry) -> Plan:
        lens = enumerate(geometry.query_lens)
        requests = [(new, geometry.cache_slots([request])[0]) for request, new in lens if new]
        return Plan.of(self.backend_id, geometry, requests, geometry.new_slots())

    def choose(self, index: IndexInputs, layer: LayerSpec, dims: IndexerDims, plan: Plan) -> SelectedPositions:
        assert self.index_keys is not None
        chosen = torch.full((plan.query_rows, dims.topk), -1, dtype=torch.int32, device=index.q.device)
        start = 0
        for count, slots in plan.metadata:
            part = slice(start, start := start + count)
            keys = self.index_keys.read_keys(layer.layer_id, slots).float()
            products = torch.einsum("qhd,kd->qhk", index.q[part].float(), keys).mul(dims.scale).relu()
            scores = torch.einsum("qh,qhk->qk", index.weights[part], products)
            scores = scores.masked_fill(future(scores), float("-inf"))
            best = scores.topk(min(dims.topk, len(slots)))
            chosen[part, : best.indices.shape[1]] = best.indices.masked_fill(best.values.isneginf(), -1).int()
        return SelectedPositions(chosen)

    def attend(self, q: Tensor, layer: LayerSpec, plan: Plan, new: NewRows | None, extras: ForwardExtras) -> Tensor:
        shape, selected = MLAShape.of(self.context), extras.selected
        out = q.new_empty(*q.shape[:2], shape.dims.kv_lora_rank)
        start = 0
        for count, slots in plan.metadata:
            part = slice(start, start := start + count)
            rows = shape.pool.read_rows(layer.layer_id, slots).float()
            scores = torch.einsum("qhd,kd->hqk", q[part].float(), rows) * layer.scale
            hidden = future(scores[0])
            if selected is not None:  # None for a dense layer of the same model
                assert isinstance(selected, SelectedPositions)  # it claims no coordinator, so never slots
                hidden = unselected(selected.positions[part], len(slots))
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[part] = torch.einsum("hqk,kd->qhd", weights, rows[:, : shape.dims.kv_lora_rank]).to(q.dtype)
        return out


def future(scores: Tensor) -> Tensor:
    """Mask ``[queries, keys]`` of the keys behind each query."""
    queries, keys = scores.shape
    return torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(keys - queries + 1)


def unselected(positions: Tensor, keys: int) -> Tensor:
    """Mask ``[queries, keys]`` of the keys that are not among the positions ``[queries, topk]``; -1 is none."""
    chosen = torch.zeros(len(positions), keys + 1, dtype=torch.bool, device=positions.device)
    chosen.scatter_(1, positions.long().where(positions >= 0, keys), True)
    return ~chosen[:, :keys]
