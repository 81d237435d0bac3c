"""The backend: pool, kernels and plans brought together."""

from __future__ import annotations

import torch
from torch import Tensor

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
from attnplug_flashmla.kernels import Call, FlashMLAKernels, Kernels, wait_for_kernels
from attnplug_flashmla.planner import Pages
from attnplug_flashmla.plugin import PAGE

_UNIFORM = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)


class FlashMLABackend(PlannedAttention):
    """MLA decode by FlashMLA, for batches in which every request has the same small number of new tokens.

    All it knows of a batch is in the batch's plan, which is made on the device alone. A plan needs no lengths on the
    host, and a captured plan follows whatever lengths its graph finds.
    """

    def __init__(self, context: BackendContext, *, kernels: Kernels | None = None) -> None:
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
        pages = Pages.reserve(requests, geometry.rows, columns * self._page_size // PAGE, geometry.device)
        return self._planned(geometry, pages, pages.slots if geometry.slots is None else geometry.slots)

    def _planned(self, geometry: Geometry, memory: Pages, new_slots: Tensor) -> Plan:
        if geometry.mode not in _UNIFORM or geometry.new_lens is not None:
            different = "" if geometry.new_lens is None else " with new_lens, by which requests may differ"
            raise PlanError(
                f"backend {self.backend_id.name} plans {', '.join(_UNIFORM)}, with the same number of new tokens per "
                f"request, but this is a batch in mode {geometry.mode}{different}; let the prefill backend take it"
            )
        pages = memory.part(geometry.requests, geometry.max_new)
        pages.fill(geometry.page_table, geometry.seq_lens, self._page_size)
        schedule = self._kernels.schedule(pages.kv_lens, pages.queries)
        call = Call(pages.queries, pages.kv_lens, pages.table, schedule)
        return Plan.of(self.backend_id, geometry, call, new_slots)

    # CUDA graphs

    def reserve(self, limits: GraphLimits) -> Pages:
        width = limits.pages * self._page_size // PAGE
        return Pages.reserve(limits.max_bs, limits.max_num_tokens, width, self.context.device)

    def capture(self, geometry: Geometry, memory: Pages) -> Plan:
        """Uses memory that all shapes of the lane share, except for the schedule: its size depends on the shape."""
        return self._planned(geometry, memory, memory.slots[: geometry.rows])

    def refill(self, plan: Plan, geometry: Geometry) -> None:
        """Pages, slots and schedule, from the page table and the lengths that the batch has when the graph runs."""
        call: Call = plan.metadata
        assert plan.new_slots is not None
        pages = Pages(call.queries, call.kv_lens, call.page_table, plan.new_slots)
        pages.fill(geometry.page_table, geometry.seq_lens, self._page_size)
        if geometry.slots is not None:
            pages.slots.copy_(geometry.slots)
        call.schedule.become(self._kernels.schedule(call.kv_lens, call.queries))

    # Running

    def attend(self, q: Tensor, layer: LayerSpec, plan: Plan, new: NewRows | None, extras: ForwardExtras) -> Tensor:
        q = ready(q, extras.q_rope)
        attended, sums = self._kernels.attend(q, self._caches[layer.layer_id], plan.metadata, layer.scale)
        if extras.lse is not None:
            # Where a row sees no key the kernel says +inf, core -inf (C4).
            extras.lse.copy_(sums.transpose(1, 2).reshape(extras.lse.shape))
            extras.lse.masked_fill_(extras.lse == float("inf"), float("-inf"))
        return attended


def ready(q: Tensor, q_rope: Tensor | None) -> Tensor:
    """q as FlashMLA takes it. Every kernel before has ended when it runs: joining is a plain launch."""
    if q_rope is not None:
        return join(q, q_rope)
    wait_for_kernels(q.device)
    return q


def join(q: Tensor, q_rope: Tensor) -> Tensor:
    """Both parts of q as FlashMLA takes them, in new memory: ``[rows, heads, row_dim]`` contiguous.

    By a kernel of our own: on an H200, torch.cat takes 21 µs for 64 rows of 128 heads, in every layer.
    """
    if q.device.type != "cuda" or q.stride(2) != 1 or q_rope.stride(2) != 1:
        return torch.cat((q, q_rope), -1)
    from attnplug_flashmla.triton_kernels import launch_join

    return launch_join(q, q_rope)


def _kernel_pages(pool: MLAPool, layer_id: int) -> Tensor:
    """A layer's cache ``[pages, 64, 1, row_dim]``, whatever multiple of 64 the manager's pages are."""
    layout = pool.layout(layer_id).split(PAGE)
    return pool.rows(layer_id).as_strided(layout.shape, layout.strides)
