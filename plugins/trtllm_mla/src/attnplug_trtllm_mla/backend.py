"""The backend: pools, kernels and the fallback brought together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import (
    BackendContext,
    BackendError,
    BackendId,
    Captures,
    Claims,
    ExtendPath,
    ForwardBatch,
    ForwardExtras,
    ForwardMode,
    Geometry,
    GraphLevel,
    GraphLimits,
    LayerSpec,
    MLALayers,
    PageSizes,
    Plan,
    PlanError,
    PlannedBackend,
    RaggedCall,
    check_lse,
)
from attnplug_flashinfer_mla.backend import FlashInferMLABackend
from attnplug_flashinfer_mla.kernels import Shape
from attnplug_trtllm_mla.blackwell import KERNEL_PAGES
from attnplug_trtllm_mla.graphs import Captured, GraphMemory
from attnplug_trtllm_mla.kernels import DecodeKernel, Pages, RaggedKernel, to_float8
from attnplug_trtllm_mla.planner import DecodeCall, plan_requests, plan_rows, uniform_queries

_FEW_QUERIES = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)
"""Modes that bring a few rows a request: what the decode kernels are for."""


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What a variant is made of. Without ``ragged`` it decodes, and somebody else prefills."""

    decode: DecodeKernel
    ragged: RaggedKernel | None = None
    fallback: FlashInferMLABackend | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Metadata:
    """The planned call of a batch (``None`` where there is nothing to run), and where its new rows go."""

    call: DecodeCall | None
    new_slots: Tensor
    captured: Captured | None = None


class TRTLLMMLABackend(PlannedBackend):
    """MLA by kernels that read page tables themselves; what they do not serve runs on FlashInfer's (A4).

    Decode, and verify with equally many rows of every request, are one kernel call. Other absorbed batches go to the
    fallback, or, where that cannot read the cache, through the decode kernel with every row as a request of its own.
    """

    def __init__(self, context: BackendContext, parts: Parts) -> None:
        self.backend_id = BackendId(context.name)
        self._context, self._parts, self._fallback = context, parts, parts.fallback
        self._shape = Shape.of(context)
        self._layers = MLALayers(context)
        page_sizes = PageSizes.of(*KERNEL_PAGES)
        kernel_page = page_sizes.kernel_size(context.page_size)
        if kernel_page is None:
            message = f"page size {context.page_size} is not supported, only {page_sizes}"
            raise BackendError(message, settings=["page_size"])
        self._page_sizes = (context.page_size, kernel_page)
        pool, row_dim = self._layers.pool, self._shape.dims.row_dim
        self._pages = {
            layer_id: Pages(pool.rows(layer_id).view(-1, kernel_page, row_dim), pool.scale(layer_id))
            for layer_id in pool.layer_ids
        }
        self._float8 = self._shape.kv_dtype is torch.float8_e4m3fn
        self._captures: Captures[Captured] = Captures(self.backend_id)
        self._graph: GraphMemory | None = None
        self.claims = Claims(cuda_graph=GraphLevel.UNIFORM, page_sizes=page_sizes, mla_extend=self._extend_paths())

    @property
    def _prefills(self) -> bool:
        return self._parts.ragged is not None and not self._context.serving.skip_prefill

    def _extend_paths(self) -> frozenset[ExtendPath]:
        paths = {ExtendPath.ABSORBED}
        ragged = self._parts.ragged
        if ragged is not None and self._prefills and self._shape.ragged_dims in ragged.dims:
            paths.add(ExtendPath.ONE_SHOT)
            if not self._context.serving.disable_chunked_prefix_cache:
                paths.add(ExtendPath.CHUNKED)
        return frozenset(paths)

    # Planning

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan:
        geometry, mode = Geometry.of(batch, self._context.page_size), batch.forward_mode
        queries = uniform_queries(geometry) if mode in _FEW_QUERIES else None
        if not self._prefills and mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
            raise self._refusal(mode)
        if not geometry.query_rows or _runs_as_mha(batch):  # core writes the rows of what runs as MHA
            call, slots = None, geometry.page_table.new_empty(0, dtype=torch.int64)
        elif queries is not None:
            call, slots = plan_requests(geometry, queries, self._page_sizes[1])
        elif self._fallback is not None and not self._float8 and not self._context.serving.skip_prefill:
            plan = self._fallback.init_forward_metadata(batch)
            return Plan(self.backend_id, mode, plan.query_rows, plan.kv_rows, parts=(plan,))
        else:  # FlashInfer reads no fp8 cache on these GPUs
            call, slots = plan_rows(geometry, self._page_sizes[1])
        return Plan(self.backend_id, mode, geometry.query_rows, geometry.kv_rows, Metadata(call, slots))

    def _refusal(self, mode: ForwardMode) -> PlanError:
        name = self.backend_id.name
        if self._parts.ragged is None:
            return PlanError(
                f"backend {name} decodes and verifies, it does not {mode}; choose another for that, such as "
                "`prefill_attention_backend` trtllm_mla",
                settings=["prefill_attention_backend"],
            )
        return PlanError(
            f"backend {name} was built with skip_prefill=True, for a draft's worker: it does not {mode}; build it "
            "without, or let another backend prefill"
        )

    def init_mha_chunk_metadata(self, forward_batch: ForwardBatch) -> Plan | None:
        """Chunks for the fallback, where it must take them (A4); else nothing: the ragged kernel takes calls unplanned.

        It must where a graph captures the prefill; the first call, over the new rows, is our own kernel's even then.
        Where chunks over a prefix are disabled it has no runner for them (A3), so there is nobody to plan for.
        """
        fallback, extend = self._fallback, forward_batch.mla_plan
        if extend is None:
            raise PlanError(
                f"backend {self.backend_id.name} was asked to plan the chunks of a batch that was not prepared for "
                "MLA; call MLAAttention.prepare(batch), which does both"
            )
        if fallback is None or fallback.mha_chunk_kv_cache is None or not forward_batch.captured:
            return None
        return fallback.init_mha_chunk_metadata(forward_batch, disable_flashinfer_ragged=True)

    # CUDA graphs

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Buffers for captured batches of up to ``max_bs`` requests and ``max_num_tokens`` rows."""
        context = self._context
        longest = context.limits.max_context
        self._captures.reserve(GraphLimits(max_bs, max_num_tokens, -(-longest // context.page_size)))
        self._graph = GraphMemory(max_bs, max_num_tokens, longest, self._page_sizes, context.device)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> Plan:
        """The plan of a captured shape, always the same: what changes from replay to replay is made in the graph."""
        return self._captures.find(forward_batch, in_capture, self._capture).plan

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Tables, lengths and slots, from what the batch holds when the graph runs."""
        captured = self._captures.find(forward_batch, False, self._capture)
        captured.fill(forward_batch.page_table, forward_batch.seq_lens, self._page_sizes)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Padded requests have no rows: nothing is written for them, and their output is zero."""
        return 0

    def _capture(self, batch: ForwardBatch) -> Captured:
        assert self._graph is not None
        captured = self._graph.capture(batch)
        metadata = Metadata(captured.call, captured.slots, captured)
        captured.plan = Plan(self.backend_id, batch.forward_mode, batch.num_tokens, None, metadata)
        return captured

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
        if plan.parts:
            assert self._fallback is not None
            return self._fallback.forward_extend(q, k, v, layer, batch, save_kv_cache=save_kv_cache, extras=extras)
        metadata: Metadata = plan.metadata
        self._layers.check(layer, q)
        pages, planned = self._pages[layer.layer_id], plan.query_rows
        if metadata.call is None and planned:
            raise PlanError(
                f"the batch was planned to run as MHA, so {self.backend_id.name} has no plan to run it absorbed; "
                "prepare it for that, or clear batch.mla_plan before planning"
            )
        captured = metadata.captured
        if save_kv_cache:
            self._layers.save(layer, metadata.new_slots, k, v, planned)
        lse = self._layers.lse(q, extras)
        out = q.new_empty(q.shape[0], q.shape[1], self._shape.dims.kv_lora_rank)
        if q.shape[0] != planned:
            out[planned:] = 0  # rows behind the plan are padding (B5)
            if lse is not None:
                lse[planned:] = float("-inf")
        if metadata.call is not None:
            self._run(metadata.call, q[:planned], pages, out[:planned], None if lse is None else lse[:planned])
        if captured is not None:
            out[:planned].masked_fill_(captured.dead[:, None, None], 0.0)
            if lse is not None:
                lse[:planned].masked_fill_(captured.dead[:, None], float("-inf"))
        return out

    def _run(self, call: DecodeCall, q: Tensor, pages: Pages, out: Tensor, lse: Tensor | None) -> None:
        kernel, heads = self._parts.decode, q.shape[1]
        if kernel.heads != heads:
            return self._run_padded(call, q, pages, out, lse)
        if self._float8:
            q = to_float8(q)
        q, result = (rows.unflatten(0, (call.requests, call.queries)) for rows in (q, out))
        most = kernel.most_requests(call.queries, lse is not None)
        for first in range(0, call.requests, most):
            part = slice(first, min(first + most, call.requests))
            sums = None if lse is None else lse[part.start * call.queries : part.stop * call.queries]
            kernel.run(q[part], pages, call.part(part), result[part], sums)
        return None

    def _run_padded(self, call: DecodeCall, q: Tensor, pages: Pages, out: Tensor, lse: Tensor | None) -> None:
        heads, wanted = q.shape[1], self._parts.decode.heads
        padded = q.new_zeros(q.shape[0], wanted, q.shape[2])
        padded[:, :heads] = q
        wide = out.new_empty(q.shape[0], wanted, out.shape[2])
        wide_lse = None if lse is None else lse.new_empty(q.shape[0], wanted)
        self._run(call, padded, pages, wide, wide_lse)
        out.copy_(wide[:, :heads])
        if lse is not None and wide_lse is not None:
            lse.copy_(wide_lse[:, :heads])

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
        """One call of an MLA prefill as MHA: by our own kernel, or, for chunks that it planned, by the fallback."""
        fallback, ragged = self._fallback, self._parts.ragged
        if call.index and fallback is not None and batch.chunk_plan is not None:
            return fallback.forward_ragged(q, k, v, layer, batch, call, lse)
        if ragged is None:
            raise self._refusal(batch.forward_mode)
        if lse is not None:
            check_lse(lse, q)
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[-1])
        ragged.run(q, k, v, call, out, lse)
        return out


def _runs_as_mha(batch: ForwardBatch) -> bool:
    return batch.mla_plan is not None and batch.mla_plan.path is not ExtendPath.ABSORBED
