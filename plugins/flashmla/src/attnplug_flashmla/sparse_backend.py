"""The backend for sparse models: index keys, plans and FlashMLA's sparse kernels brought together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnplug import (
    BackendContext,
    DType,
    ForwardExtras,
    Geometry,
    GraphLimits,
    IndexerDims,
    IndexInputs,
    LayerSpec,
    MLAShape,
    NewRows,
    Plan,
    SelectedPositions,
    SelectedRows,
    SelectedSlots,
    SparseAttention,
    import_library,
)
from attnplug_flashmla.deep_gemm_index import load_deep_gemm, score_keys_in_fp8
from attnplug_flashmla.options import SparseOptions
from attnplug_flashmla.plugin import DEEP_GEMM, PAGE
from attnplug_flashmla.scoring import Score, choose_rows, score_keys, translate
from attnplug_flashmla.sparse_kernels import WIDTH, FlashMLASparseKernels, SparseKernels, padded_heads
from attnplug_flashmla.sparse_planner import Tokens

_MOST_ROWS = 512
"""Rows of one call of the decode kernel: it holds partial results of all of them in float32, 128 MiB for 128 heads."""


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What a plan says: the new tokens, and the schedules that the kernel makes for them, by shape of a call."""

    tokens: Tokens
    schedules: dict[tuple[int, ...], Any] = field(default_factory=dict)


class SparseFlashMLABackend(SparseAttention):
    """Sparse MLA by FlashMLA, for any batch: every token is a request of its own with the rows that were chosen for it.

    Over bfloat16 rows the prefill kernel runs all batches, over packed rows of 656 bytes the decode kernel does. A plan
    is made on the device alone.
    """

    def __init__(self, context: BackendContext, *, kernels: SparseKernels | None = None) -> None:
        super().__init__(context)
        shape = MLAShape.of(context)
        self._packed, self._page_size = context.kv_dtype is DType.FP8_DS_MLA, shape.page_size
        places = (-1, PAGE, 1) if self._packed else (-1, 1)
        self._caches = {
            layer_id: (rows := shape.pool.rows(layer_id)).view(*places, rows.shape[-1])
            for layer_id in shape.pool.layer_ids
        }
        self._kernels = FlashMLASparseKernels() if kernels is None else kernels
        self._score: Score = score_keys
        if context.options_of(SparseOptions).index_kernel == "deep_gemm":
            import_library(load_deep_gemm, DEEP_GEMM)
            self._score = score_keys_in_fp8

    # Planning

    def plan(self, geometry: Geometry) -> Plan:
        if not geometry.rows:
            return Plan.of(self.backend_id, geometry)
        requests, pages = geometry.page_table.shape
        return self._planned(geometry, Tokens.reserve(requests, geometry.rows, pages, self._page_size, geometry.device))

    def _planned(self, geometry: Geometry, memory: Tokens) -> Plan:
        tokens = memory.part(geometry)
        tokens.fill(geometry)
        return Plan.of(self.backend_id, geometry, Work(tokens), tokens.slots)

    # CUDA graphs

    def reserve(self, limits: GraphLimits) -> Tokens:
        return Tokens.reserve(limits.max_bs, limits.max_num_tokens, limits.pages, self._page_size, self.context.device)

    def capture(self, geometry: Geometry, memory: Tokens) -> Plan:
        return self._planned(geometry, memory)

    def refill(self, plan: Plan, geometry: Geometry) -> None:
        """Tokens, from the page table and the lengths that the batch has when the graph runs. Schedules are made anew,
        by the first layer of the same graph."""
        work: Work = plan.metadata
        work.tokens.fill(geometry)
        work.schedules.clear()

    # Running

    def choose(self, index: IndexInputs, layer: LayerSpec, dims: IndexerDims, plan: Plan) -> SelectedRows:
        work: Work = plan.metadata
        assert self.index_keys is not None
        # A coordinator finds rows by their positions: what the page table says of them is true of index keys alone.
        by_slots = self.context.coordinator is None
        width = _width(dims.topk) if by_slots else dims.topk
        found = choose_rows(
            self._score, index, self.index_keys, layer.layer_id, dims, work.tokens, width, by_slots=by_slots
        )
        return SelectedSlots(found) if by_slots else SelectedPositions(found)

    def attend(self, q: Tensor, layer: LayerSpec, plan: Plan, new: NewRows | None, extras: ForwardExtras) -> Tensor:
        work: Work = plan.metadata
        assert extras.selected is not None  # it was checked before
        slots, cache = _slots(extras.selected, work.tokens), self._caches[layer.layer_id]
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


def _slots(selected: SelectedRows, tokens: Tokens) -> Tensor:
    """What was selected as the kernels take it."""
    slots = selected.slots if isinstance(selected, SelectedSlots) else translate(selected.positions, tokens)
    missing = _width(max(slots.shape[1], 1)) - slots.shape[1]
    return pad(slots, (0, missing), value=-1) if missing else slots.contiguous()
