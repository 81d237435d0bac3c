"""The backend for sparse models: index keys, plans and FlashMLA's sparse kernels brought together."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attnplug import (
    BackendContext,
    DType,
    ForwardExtras,
    Geometry,
    IndexerDims,
    IndexInputs,
    IndexPlan,
    LayerSpec,
    MLAShape,
    NewRows,
    Plan,
    SelectedRows,
    SparseAttention,
    SparseIndex,
)
from attnplug.kernels import import_library
from attnplug_flashmla.deep_gemm_index import load_deep_gemm, score_in_fp8
from attnplug_flashmla.options import SparseOptions
from attnplug_flashmla.plugin import DEEP_GEMM, PAGE
from attnplug_flashmla.sparse_kernels import WIDTH, FlashMLASparseKernels, SparseKernels, padded_heads

_MOST_ROWS = 512
"""Rows of one call of the decode kernel: it holds partial results of all of them in float32, 128 MiB for 128 heads."""


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What a plan says: that of the index, and the schedules that the kernel makes, by shape of a call."""

    index: IndexPlan
    schedules: dict[tuple[int, ...], Any] = field(default_factory=dict)


class SparseFlashMLABackend(SparseAttention):
    """Sparse MLA by FlashMLA, for any batch: every token is a request of its own with the rows that were chosen for it.

    Over bfloat16 rows the prefill kernel runs all batches, over packed rows of 656 bytes the decode kernel does. A plan
    is made on the device alone.
    """

    def __init__(
        self,
        context: BackendContext,
        *,
        kernels: SparseKernels | None = None,
        index_multiprocessors: int | None = None,
    ) -> None:
        """``index_multiprocessors`` is for an index whose kernels are interpreted."""
        super().__init__(context)
        shape = MLAShape.of(context)
        self._packed = context.kv_dtype is DType.FP8_DS_MLA
        places = (-1, PAGE, 1) if self._packed else (-1, 1)
        self._caches = {
            layer_id: (rows := shape.pool.rows(layer_id)).view(*places, rows.shape[-1])
            for layer_id in shape.pool.layer_ids
        }
        self._kernels = FlashMLASparseKernels() if kernels is None else kernels
        by_deep_gemm = context.options_of(SparseOptions).index_kernel == "deep_gemm"
        if by_deep_gemm:
            import_library(load_deep_gemm, DEEP_GEMM)
        score = score_in_fp8 if by_deep_gemm else None
        self._index = SparseIndex(context, score=score, multiprocessors=index_multiprocessors)

    # Planning

    def plan(self, geometry: Geometry) -> Plan:
        if not geometry.rows:
            return Plan.of(self.backend_id, geometry)
        # What becomes of the batch's page table after this is not the plan's concern.
        index = self._index.plan(replace(geometry, page_table=geometry.page_table.clone()))
        return Plan.of(self.backend_id, geometry, Work(index), index.slots)

    # CUDA graphs

    def capture(self, geometry: Geometry, memory: None) -> Plan:
        """Each shape has a plan of its own, which reads the graph's page table."""
        index = self._index.plan(geometry)
        return Plan.of(self.backend_id, geometry, Work(index), index.slots)

    def refill(self, plan: Plan, geometry: Geometry) -> None:
        """From the page table and the lengths that the batch has when the graph runs. Schedules are made anew, by the
        first layer of the same graph."""
        work: Work = plan.metadata
        self._index.fill(work.index, geometry)
        work.schedules.clear()

    # Running

    def choose(self, index: IndexInputs, layer: LayerSpec, dims: IndexerDims, plan: Plan) -> SelectedRows:
        work: Work = plan.metadata
        width = _width(dims.topk) if self.hisparse is None else dims.topk
        return self._index.choose(work.index, index, layer, width)

    def attend(self, q: Tensor, layer: LayerSpec, plan: Plan, new: NewRows | None, extras: ForwardExtras) -> Tensor:
        work: Work = plan.metadata
        assert extras.selected is not None  # it was checked before
        slots = self._index.slots(work.index, extras.selected, _width(self._index.topk))
        cache = self._caches[layer.layer_id]
        queries, heads = padded_heads(q), q.shape[1]
        if self._packed:
            out, sums = self._attend_packed(queries, cache, slots, layer.scale, work)
        else:
            out, sums = self._kernels.attend_rows(queries, cache, slots, layer.scale)
        if extras.lse is not None:
            # Where a row sees no key the kernel says +inf, core -inf (C4).
            extras.lse.copy_(sums[:, :heads])
            extras.lse.masked_fill_(extras.lse == float("inf"), float("-inf"))
        return out[:, :heads]

    def _attend_packed(
        self, q: Tensor, cache: Tensor, slots: Tensor, scale: float, work: Work
    ) -> tuple[Tensor, Tensor]:
        parts = []
        for first in range(0, len(q), _MOST_ROWS):
            queries, where = q[first : first + _MOST_ROWS], slots[first : first + _MOST_ROWS]
            shape = (*queries.shape[:2], where.shape[1])
            if shape not in work.schedules:
                work.schedules[shape] = self._kernels.schedule()
            parts.append(self._kernels.attend_packed(queries, cache, where, scale, work.schedules[shape]))
        if len(parts) == 1:
            return parts[0]
        return torch.cat([out for out, _ in parts]), torch.cat([sums for _, sums in parts])


def _width(topk: int) -> int:
    """Columns of indices for this many rows."""
    return -(-topk // WIDTH) * WIDTH
