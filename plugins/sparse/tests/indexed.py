"""A sparse backend as a stranger writes it: the index is core's, and attention is torch's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from attnplug import BackendContext, ExtendPath, ForwardExtras, Geometry, GraphLevel, LayerSpec, MLAShape, NewRows, Plan
from attnplug.kernels import Softmax
from attnplug.sparse import IndexerDims, IndexInputs, SelectedRows
from attnplug_sparse.attention import SparseAttention
from attnplug_sparse.index import SparseIndex
from attnplug_sparse.torch_sparse.selection import attend_selected

MULTIPROCESSORS = 3
"""Of the imaginary GPU: few, since each is a loop in Python, and enough to divide a request."""


class IndexedBackend(SparseAttention):
    def __init__(self, context: BackendContext, score: Any = None) -> None:
        paths = frozenset({ExtendPath.ABSORBED})
        declared = replace(context.declared, cuda_graph=GraphLevel.UNIFORM, mla_extend=paths)
        super().__init__(replace(context, declared=declared))
        on_cpu = context.device.type == "cpu"
        self.index = SparseIndex(context, score=score, multiprocessors=MULTIPROCESSORS if on_cpu else None)
        self._pool = MLAShape.of(context).pool

    def plan(self, geometry: Geometry) -> Plan:
        if not geometry.rows:
            return Plan.of(self.backend_id, geometry)
        index = self.index.plan(geometry)
        return Plan.of(self.backend_id, geometry, index, index.slots)

    def capture(self, geometry: Geometry, memory: None) -> Plan:
        return self.plan(geometry)

    def refill(self, plan: Plan, geometry: Geometry) -> None:
        self.index.fill(plan.metadata, geometry)

    def choose(self, index: IndexInputs, layer: LayerSpec, dims: IndexerDims, plan: Plan) -> SelectedRows:
        return self.index.choose(plan.metadata, index, layer)

    def attend(self, q: Tensor, layer: LayerSpec, plan: Plan, new: NewRows | None, extras: ForwardExtras) -> Tensor:
        assert layer.mla is not None and extras.selected is not None
        slots = self.index.slots(plan.metadata, extras.selected, self.index.topk)

        def read(where: Tensor) -> Tensor:
            return self._pool.read_rows(layer.layer_id, where)

        out, sums = attend_selected(q, slots.long(), read, layer.mla.kv_lora_rank, Softmax(layer.scale, None, None))
        if extras.lse is not None:
            extras.lse.copy_(sums)
        return out
