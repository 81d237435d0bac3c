"""The backend: pool, kernels and plans brought together."""

from __future__ import annotations

import torch
from torch import Tensor

from attnplug import (
    BackendContext,
    BackendId,
    Captures,
    Claims,
    ForwardBatch,
    ForwardExtras,
    ForwardMode,
    Geometry,
    GraphLevel,
    GraphLimits,
    LayerSpec,
    MLALayers,
    MLAPool,
    PageSizes,
    Plan,
    PlanError,
    PlannedBackend,
)
from attnplug_flashmla.kernels import PAGE, Call, FlashMLAKernels, Kernels
from attnplug_flashmla.planner import Captured, Metadata, Pages

_UNIFORM = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)


class FlashMLABackend(PlannedBackend):
    """MLA decode by FlashMLA: batches with equally many new tokens of every request, one or a few.

    What it knows of a batch is in the batch's plan, made on the device alone: a plan needs no length on the host, and a
    captured one follows whatever lengths its graph finds.
    """

    def __init__(self, context: BackendContext, *, kernels: Kernels | None = None) -> None:
        self.backend_id = BackendId(context.name)
        self._layers = MLALayers(context)
        pool = self._layers.pool
        self._page_size, self._device = context.page_size, context.device
        self._max_context = context.limits.max_context
        self._caches = {layer_id: _kernel_pages(pool, layer_id) for layer_id in pool.layer_ids}
        self._kernels = FlashMLAKernels(self._layers.heads, self._layers.kv_lora_rank) if kernels is None else kernels
        self._captures: Captures[Captured] = Captures(self.backend_id)
        self._graph: Pages | None = None
        self.claims = Claims(cuda_graph=GraphLevel.UNIFORM, page_sizes=PageSizes.of(PAGE), mla_extend=frozenset())

    # Planning

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan:
        queries = self._queries(batch)
        kv_rows = None
        if batch.seq_lens_cpu is not None:  # without it, looking at the lengths would be waiting for the device
            kv_rows = Geometry.of(batch, self._page_size).kv_rows
        rows = batch.batch_size * queries
        return Plan(self.backend_id, batch.forward_mode, rows, kv_rows, self._metadata(batch, queries))

    def _queries(self, batch: ForwardBatch) -> int:
        """New tokens of every request of a batch."""
        mode = batch.forward_mode
        if mode is ForwardMode.IDLE:
            return 0
        self._check_mode(mode)
        if mode.is_decode:
            return 1
        lens: set[int] = set(batch.query_lens_cpu().tolist())
        if len(lens) > 1:
            raise PlanError(
                f"backend {self.backend_id.name} takes batches with equally many new tokens of every request, not "
                f"{', '.join(map(str, sorted(lens)))} in one; let the prefill backend take this {mode}"
            )
        return lens.pop() if lens else 0

    def _check_mode(self, mode: ForwardMode) -> None:
        if mode not in _UNIFORM:
            raise PlanError(
                f"backend {self.backend_id.name} plans {', '.join(_UNIFORM)}, not {mode}; "
                "choose another backend with `prefill_attention_backend`",
                settings=["prefill_attention_backend"],
            )

    def _metadata(self, batch: ForwardBatch, queries: int) -> Metadata:
        requests, (_, columns) = batch.batch_size, batch.page_table.shape
        pages = Pages.reserve(requests, requests * queries, columns * self._page_size // PAGE, batch.page_table.device)
        if not pages.slots.numel():
            return Metadata(pages.slots, None)
        pages = pages.part(requests, queries)
        pages.fill(batch.page_table, batch.seq_lens, self._page_size)
        schedule = self._kernels.schedule(pages.kv_lens, queries)
        return Metadata(pages.slots, Call(queries, pages.kv_lens, pages.table, schedule))

    # CUDA graphs

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Memory for captured batches of up to ``max_bs`` requests and ``max_num_tokens`` rows."""
        pages = -(-self._max_context // self._page_size)
        self._captures.reserve(GraphLimits(max_bs, max_num_tokens, pages))
        self._graph = Pages.reserve(max_bs, max_num_tokens, pages * self._page_size // PAGE, self._device)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> Plan:
        """The plan of a captured shape, always the same: what changes from replay to replay is made in the graph."""
        return self._captures.find(forward_batch, in_capture, self._capture).plan

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Pages, slots and schedule, from the page table and lengths that the batch has when the graph runs."""
        captured = self._captures.find(forward_batch, False, self._capture)
        captured.fill(forward_batch, self._page_size, self._kernels)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Padded requests have no rows: nothing is read or written for them."""
        return 0

    def _capture(self, batch: ForwardBatch) -> Captured:
        """A shape's plan. Its memory is a part of what all shapes share: graphs run one after the other."""
        assert self._graph is not None
        queries = batch.num_tokens // batch.batch_size
        pages = self._graph.part(batch.batch_size, queries)
        pages.fill(batch.page_table, batch.seq_lens, self._page_size)
        # A schedule's size depends on the shape, so each has one of its own.
        call = Call(queries, pages.kv_lens, pages.table, self._kernels.schedule(pages.kv_lens, queries))
        metadata = Metadata(pages.slots, call)
        return Captured(pages, call, Plan(self.backend_id, batch.forward_mode, batch.num_tokens, None, metadata))

    # Running

    def run_plan(
        self,
        plan: Plan,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        save_kv_cache: bool,
        extras: ForwardExtras | None,
    ) -> Tensor:
        metadata: Metadata = plan.metadata
        self._layers.check(layer, q)
        cache, rows = self._caches[layer.layer_id], plan.query_rows
        if save_kv_cache:
            self._layers.save(layer, metadata.new_slots, k, v, rows)
        lse = self._layers.lse(q, extras)
        if metadata.call is None:
            if lse is not None:
                lse.fill_(float("-inf"))
            return q.new_zeros(q.shape[0], q.shape[1], self._layers.kv_lora_rank)
        attended, sums = self._kernels.attend(q[:rows], cache, metadata.call, layer.scale)
        if lse is not None:
            # Where a row sees no key the kernel says +inf, core -inf (C4); the tail is padding.
            lse[:rows] = sums.transpose(1, 2).reshape(rows, -1)
            lse.masked_fill_(lse == float("inf"), float("-inf"))
            lse[rows:] = float("-inf")
        if q.shape[0] == rows:
            return attended
        return torch.cat([attended, attended.new_zeros(q.shape[0] - rows, *attended.shape[1:])])  # B5


def _kernel_pages(pool: MLAPool, layer_id: int) -> Tensor:
    """A layer's cache ``[pages, 64, 1, row_dim]``, whatever multiple of 64 the manager's pages are."""
    layout = pool.layout(layer_id).split(PAGE)
    return pool.rows(layer_id).as_strided(layout.shape, layout.strides)
