"""The ``flashmla_sparse`` backend: MLA over the rows that an index selects, by FlashMLA's sparse kernels."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attnplug import BackendContext, ForwardExtras, Geometry, LayerSpec, MLAShape, NewRows, Plan
from attnplug.kernels import import_library
from attnplug.sparse import IndexerDims, IndexInputs, SelectedRows
from attnplug_flashmla.backend import join_query
from attnplug_flashmla.deep_gemm_index import load_deep_gemm, score_in_fp8
from attnplug_flashmla.options import SparseOptions
from attnplug_flashmla.plugin import DEEP_GEMM, PAGE
from attnplug_flashmla.sparse_kernels import WIDTH, FlashMLASparseKernels, SparseKernels, pad_heads, padded_heads
from attnplug_sparse.attention import SparseAttention
from attnplug_sparse.index import IndexPlan, SparseIndex
from attnplug_sparse.plugin import FP8_DS_MLA

_MAX_ROWS = 512
"""Maximum rows per call of the decode kernel, whose float32 partial results take 128 MiB for 128 heads."""


@dataclass(frozen=True, slots=True, eq=False)
class SparseMetadata:
    """A plan's metadata: the index plan, and the kernel's schedules by call shape, which the first layer computes."""

    index: IndexPlan
    schedules: dict[tuple[int, ...], Any] = field(default_factory=dict)


class SparseFlashMLABackend(SparseAttention):
    """Sparse MLA by FlashMLA, for any batch. Every token is a request of its own with the rows selected for it.

    The prefill kernel runs all batches over bfloat16 rows, the decode kernel all batches over packed rows of 656 bytes
    (``fp8_ds_mla``). Plans are computed on the device and need no host lengths.
    """

    def __init__(
        self,
        context: BackendContext,
        *,
        kernels: SparseKernels | None = None,
        index_multiprocessors: int | None = None,
    ) -> None:
        """``kernels`` and ``index_multiprocessors`` are for tests without a GPU."""
        super().__init__(context)
        shape = MLAShape.of(context)
        self._packed = context.kv_dtype == FP8_DS_MLA.name
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
        # The plan must not depend on later changes to the batch's page table.
        index = self._index.plan(replace(geometry, page_table=geometry.page_table.clone()))
        return Plan.of(self.backend_id, geometry, SparseMetadata(index), index.slots)

    # CUDA graphs

    def capture(self, geometry: Geometry, memory: None) -> Plan:
        """Plan a captured shape. The plan reads the graph's page table."""
        index = self._index.plan(geometry)
        return Plan.of(self.backend_id, geometry, SparseMetadata(index), index.slots)

    def refill(self, plan: Plan, geometry: Geometry) -> None:
        """Refill the index plan. The first layer of the same graph recomputes the schedules."""
        metadata: SparseMetadata = plan.metadata
        self._index.fill(metadata.index, geometry)
        metadata.schedules.clear()

    # Running

    def choose(self, index: IndexInputs, layer: LayerSpec, dims: IndexerDims, plan: Plan) -> SelectedRows:
        metadata: SparseMetadata = plan.metadata
        width = _padded_width(dims.topk) if self.coordinator is None else dims.topk
        return self._index.choose(metadata.index, index, layer, width)

    def attend(self, q: Tensor, layer: LayerSpec, plan: Plan, new: NewRows | None, extras: ForwardExtras) -> Tensor:
        metadata: SparseMetadata = plan.metadata
        assert extras.selected is not None  # SparseAttention has checked it
        slots = self._index.slots(metadata.index, extras.selected, _padded_width(self._index.topk))
        cache = self._caches[layer.layer_id]
        heads = q.shape[1]
        queries = pad_heads(q) if extras.q_rope is None else join_query(q, extras.q_rope, padded_heads(heads))
        if self._packed:
            out, sums = self._attend_packed(queries, cache, slots, layer.scale, metadata)
        else:
            out, sums = self._kernels.attend_rows(queries, cache, slots, layer.scale)
        if extras.lse is not None:
            # For a row that sees no key the kernel returns +inf, the contract requires -inf (C4).
            extras.lse.copy_(sums[:, :heads])
            extras.lse.masked_fill_(extras.lse == float("inf"), float("-inf"))
        return out[:, :heads]

    def _attend_packed(
        self, q: Tensor, cache: Tensor, slots: Tensor, scale: float, metadata: SparseMetadata
    ) -> tuple[Tensor, Tensor]:
        parts = []
        for first in range(0, len(q), _MAX_ROWS):
            queries, where = q[first : first + _MAX_ROWS], slots[first : first + _MAX_ROWS]
            shape = (*queries.shape[:2], where.shape[1])
            if shape not in metadata.schedules:
                metadata.schedules[shape] = self._kernels.schedule()
            parts.append(self._kernels.attend_packed(queries, cache, where, scale, metadata.schedules[shape]))
        if len(parts) == 1:
            return parts[0]
        return torch.cat([out for out, _ in parts]), torch.cat([sums for _, sums in parts])


def _padded_width(topk: int) -> int:
    """Return ``topk`` rounded up to the kernels' index width."""
    return -(-topk // WIDTH) * WIDTH
