"""The ``flashmla`` backend: dense MLA decode and verify, planned on the device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnplug import (
    BackendContext,
    ForwardExtras,
    ForwardMode,
    Geometry,
    GraphLimits,
    LayerSpec,
    MLAPool,
    MLAShape,
    NewRows,
    Plan,
    PlanError,
    PlannedAttention,
)
from attnplug_flashmla.kernels import DenseKernels, FlashMLACall, FlashMLAKernels, wait_for_kernels
from attnplug_flashmla.planner import DecodePages
from attnplug_flashmla.plugin import PAGE

_UNIFORM = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)


class FlashMLABackend(PlannedAttention):
    """MLA decode by FlashMLA, for batches in which every request has the same small number of new tokens.

    The backend keeps no state of a batch. Plans are computed on the device and need no host lengths, so a captured plan
    serves any lengths. ``kernels`` replaces the library in tests.
    """

    def __init__(self, context: BackendContext, *, kernels: DenseKernels | None = None) -> None:
        super().__init__(context)
        shape = MLAShape.of(context)
        self._page_size = shape.page_size
        self._caches = {layer_id: _kernel_pages(shape.pool, layer_id) for layer_id in shape.pool.layer_ids}
        self._kernels = FlashMLAKernels(shape.heads, shape.dims.kv_lora_rank) if kernels is None else kernels

    # Planning

    def plan(self, geometry: Geometry) -> Plan:
        if not geometry.rows:
            return Plan.of(self.backend_id, geometry)
        requests, columns = geometry.page_table.shape
        pages = DecodePages.reserve(requests, geometry.rows, columns * self._page_size // PAGE, geometry.device)
        return self._planned(geometry, pages, pages.slots if geometry.slots is None else geometry.slots)

    def _planned(self, geometry: Geometry, memory: DecodePages, new_slots: Tensor) -> Plan:
        if geometry.mode not in _UNIFORM or geometry.new_lens is not None:
            different = "" if geometry.new_lens is None else " with new_lens, by which requests may differ"
            raise PlanError(
                f"backend {self.backend_id.name} plans {', '.join(_UNIFORM)}, with the same number of new tokens per "
                f"request, but this is a batch in mode {geometry.mode}{different}; plan it with the prefill backend"
            )
        pages = memory.part(geometry.requests, geometry.max_new)
        pages.fill(geometry.page_table, geometry.seq_lens, self._page_size)
        schedule = self._kernels.schedule(pages.kv_lens, pages.queries)
        call = FlashMLACall(pages.queries, pages.kv_lens, pages.table, schedule)
        return Plan.of(self.backend_id, geometry, call, new_slots)

    # CUDA graphs

    def reserve(self, limits: GraphLimits) -> DecodePages:
        width = limits.pages * self._page_size // PAGE
        return DecodePages.reserve(limits.max_bs, limits.max_num_tokens, width, self.context.device)

    def capture(self, geometry: Geometry, memory: DecodePages) -> Plan:
        """Plan a captured shape in the lane's shared memory.

        Only the schedule, whose size depends on the shape, is new.
        """
        return self._planned(geometry, memory, memory.slots[: geometry.rows])

    def refill(self, plan: Plan, geometry: Geometry) -> None:
        """Recompute pages, slots and schedule on the device, from the batch's page table and lengths."""
        call: FlashMLACall = plan.metadata
        assert plan.new_slots is not None
        pages = DecodePages(call.queries, call.kv_lens, call.page_table, plan.new_slots)
        pages.fill(geometry.page_table, geometry.seq_lens, self._page_size)
        if geometry.slots is not None:
            pages.slots.copy_(geometry.slots)
        call.schedule.copy_from(self._kernels.schedule(call.kv_lens, call.queries))

    # Running

    def attend(self, q: Tensor, layer: LayerSpec, plan: Plan, new: NewRows | None, extras: ForwardExtras) -> Tensor:
        q = prepare_query(q, extras.q_rope)
        attended, sums = self._kernels.attend(q, self._caches[layer.layer_id], plan.metadata, layer.scale)
        if extras.lse is not None:
            # For a row that sees no key the kernel returns +inf, the contract requires -inf (C4).
            extras.lse.copy_(sums.transpose(1, 2).reshape(extras.lse.shape))
            extras.lse.masked_fill_(extras.lse == float("inf"), float("-inf"))
        return attended


def prepare_query(q: Tensor, q_rope: Tensor | None) -> Tensor:
    """Return q as FlashMLA takes it, behind a barrier: joining is a plain launch (see ``wait_for_kernels``)."""
    if q_rope is not None:
        return join_query(q, q_rope)
    wait_for_kernels(q.device)
    return q


def join_query(q: Tensor, q_rope: Tensor, padded_heads: int | None = None) -> Tensor:
    """Concatenate q and ``q_rope`` to ``[rows, heads, row_dim]``, contiguous, in new memory. Further heads, up to
    ``padded_heads``, are zeros.

    On CUDA by a Triton kernel: on an H200, torch.cat takes 21 µs for 64 rows of 128 heads in every layer.
    """
    if q.device.type != "cuda" or q.stride(2) != 1 or q_rope.stride(2) != 1:
        joined = torch.cat((q, q_rope), -1)
        return joined if padded_heads is None else pad(joined, (0, 0, 0, padded_heads - q.shape[1]))
    from attnplug_flashmla.triton_kernels import launch_join

    return launch_join(q, q_rope, padded_heads)


def _kernel_pages(pool: MLAPool, layer_id: int) -> Tensor:
    """Return a layer's cache as ``[pages, 64, 1, row_dim]``. The pool's page size is a multiple of 64."""
    layout = pool.layout(layer_id).split(PAGE)
    return pool.rows(layer_id).as_strided(layout.shape, layout.strides)
