"""The ``trtllm_mla`` backend: plans batches for Blackwell kernels and delegates the rest to ``flashinfer_mla``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnplug import (
    BackendContext,
    BackendError,
    ExtendPath,
    ForwardBatch,
    ForwardExtras,
    ForwardMode,
    Geometry,
    GraphLimits,
    LayerSpec,
    MLAShape,
    NewRows,
    Plan,
    PlanError,
    PlannedAttention,
    RaggedCall,
)
from attnplug.kernels import check_lse
from attnplug_flashinfer_mla.backend import FlashInferMLABackend
from attnplug_trtllm_mla.graphs import CapturedDecode, DecodeGraphMemory
from attnplug_trtllm_mla.kernels import DecodeKernel, LatentPages, RaggedPrefillKernel, to_float8
from attnplug_trtllm_mla.planner import DecodeCall, plan_requests, plan_rows, table_width, uniform_queries

_FEW_QUERIES = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)
"""Modes with few rows per request, which the decode kernels serve."""


@dataclass(frozen=True, slots=True, eq=False)
class LaneKernels:
    """Kernels of one lane. Without ``ragged`` the backend only decodes, and another backend prefills."""

    decode: DecodeKernel
    ragged: RaggedPrefillKernel | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TRTLLMMLAMetadata:
    """A plan's metadata: the decode call and the kernel that runs it. ``captured`` is set for CUDA graphs."""

    kernel: DecodeKernel
    call: DecodeCall
    captured: CapturedDecode | None = None


class TRTLLMMLABackend(PlannedAttention):
    """MLA by kernels that read page tables directly. Batches that they do not serve run on ``fallback`` (A4).

    Decode, and verify with the same number of rows per request, are one kernel call. Other absorbed batches run on the
    fallback. If it cannot read the cache (fp8), the decode kernel runs them with every row as a request of its own.
    ``lanes`` are the kernels of each lane. Variants with other kernels (``cutedsl_mla``, ``tokenspeed_mla``) reuse this
    class.
    """

    def __init__(
        self, context: BackendContext, lanes: Sequence[LaneKernels], fallback: FlashInferMLABackend | None = None
    ) -> None:
        self._shape, self.lanes, self._fallback = MLAShape.of(context), lanes, fallback
        self._prefills = lanes[0].ragged is not None and not context.serving.skip_prefill
        declared = context.declared.claims
        super().__init__(context, replace(declared, mla_extend=declared.mla_extend & self._extend_paths()))
        page_sizes = declared.page_sizes
        kernel_page = page_sizes.kernel_size(context.page_size)
        if kernel_page is None:
            message = f"page size {context.page_size} is not supported, only {page_sizes}"
            raise BackendError(message, settings=["page_size"])
        self._kernel_page = kernel_page
        pool, row_dim = self._shape.pool, self._shape.dims.row_dim
        self._pages = {
            layer_id: LatentPages(pool.rows(layer_id).view(-1, kernel_page, row_dim), pool.scale(layer_id))
            for layer_id in pool.layer_ids
        }
        self._float8 = self._shape.kv_dtype is torch.float8_e4m3fn

    def _extend_paths(self) -> frozenset[ExtendPath]:
        """Return the supported extend paths.

        Chunked requires the fallback, which runs a captured prefill's chunks (A4).
        """
        paths, ragged, fallback = {ExtendPath.ABSORBED}, self.lanes[0].ragged, self._fallback
        if ragged is not None and self._prefills and self._shape.ragged_dims in ragged.dims:
            paths.add(ExtendPath.ONE_SHOT)
            if fallback is not None and ExtendPath.CHUNKED in fallback.claims.mla_extend:
                paths.add(ExtendPath.CHUNKED)
        return frozenset(paths)

    def warm_up(self) -> None:
        """Decode with every power of two of requests and of rows, for kernels that are compiled when they first run.

        How a call is split over multiprocessors is part of a compiled kernel, and depends on both numbers. The calls
        read one row of page 0, whatever it holds. Kernels of a verify are compiled by the host's warm-up, which knows
        its number of rows.
        """
        limits, shape, pages = self.context.limits, self._shape, next(iter(self._pages.values()))
        longest = [1 << power for power in range(7, (limits.max_context - 1).bit_length())]  # from one tile on
        for count in (1 << power for power in range(limits.max_requests.bit_length())):
            q = torch.zeros(count, shape.heads, shape.dims.row_dim, dtype=shape.dtype, device=self.context.device)
            out = q.new_empty(count, shape.heads, shape.dims.kv_lora_rank)
            lens = torch.ones(count, dtype=torch.int32, device=q.device)
            for rows in (*longest, limits.max_context):
                width = table_width(rows, self._kernel_page)
                tables = torch.zeros(count, width, dtype=torch.int32, device=q.device)
                self._run(self.lanes[0].decode, DecodeCall(1, tables, lens, rows), q, pages, out, None)

    # Planning

    def plan(self, geometry: Geometry) -> Plan:
        mode, fallback = geometry.mode, self._fallback
        if not self._prefills and mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
            raise self._refusal(mode)
        if not geometry.rows or geometry.calls:  # core writes the new rows of MHA extends
            return Plan.of(self.backend_id, geometry)
        queries = uniform_queries(geometry) if mode in _FEW_QUERIES else None
        if queries is not None:
            call, slots = plan_requests(geometry, queries, self._kernel_page)
        elif fallback is not None and not self._float8 and not self.context.serving.skip_prefill:
            theirs = fallback.plan(geometry)
            return replace(Plan.of(self.backend_id, geometry, None, theirs.new_slots), parts=(theirs,))
        else:  # FlashInfer reads no fp8 cache on these GPUs
            call, slots = plan_rows(geometry, self._kernel_page)
        return Plan.of(self.backend_id, geometry, TRTLLMMLAMetadata(self.lanes[geometry.lane].decode, call), slots)

    def _refusal(self, mode: str) -> PlanError:
        name = self.backend_id.name
        if self.lanes[0].ragged is None:
            return PlanError(
                f"backend {name} decodes and verifies, it does not {mode}; choose another backend for it, such as "
                "`prefill_attention_backend` trtllm_mla",
                settings=["prefill_attention_backend"],
            )
        return PlanError(
            f"backend {name} was built with skip_prefill=True, for a draft worker: it does not {mode}; build it "
            "without skip_prefill, or use another backend for prefill"
        )

    def init_mha_chunk_metadata(self, forward_batch: ForwardBatch) -> Plan | None:
        """Plan the prefix chunks that the fallback runs (A4). Returns ``None`` if it runs none.

        The fallback runs them if chunked prefix caching is disabled and there is a prefix, or if a CUDA graph captures
        the prefill. The first call, over the new rows, always runs on our ragged kernel, which needs no plan.
        """
        geometry, fallback = forward_batch.geometry, self._fallback
        disabled = self.context.serving.disable_chunked_prefix_cache and _has_prefix(geometry.calls)
        if fallback is None or not (disabled or geometry.captured):
            return None
        return fallback.init_mha_chunk_metadata(forward_batch, disable_flashinfer_ragged=True)

    # CUDA graphs

    def reserve(self, limits: GraphLimits) -> DecodeGraphMemory:
        return DecodeGraphMemory(limits, self.context.limits.max_context, self._kernel_page, self.context.device)

    def capture(self, geometry: Geometry, memory: DecodeGraphMemory) -> Plan:
        captured = memory.capture(geometry)
        metadata = TRTLLMMLAMetadata(self.lanes[geometry.lane].decode, captured.call, captured)
        return Plan.of(self.backend_id, geometry, metadata, captured.slots)

    def refill(self, plan: Plan, geometry: Geometry) -> None:
        """Recompute block tables, lengths and slots on the device, from the batch's page table and lengths."""
        plan.metadata.captured.fill(geometry, self._kernel_page)

    # Running

    def attend(self, q: Tensor, layer: LayerSpec, plan: Plan, new: NewRows | None, extras: ForwardExtras) -> Tensor:
        if plan.parts:
            assert self._fallback is not None
            return self._fallback.attend(q, layer, plan.parts[0], new, extras)
        metadata: TRTLLMMLAMetadata | None = plan.metadata
        if metadata is None:
            raise PlanError(
                f"the batch was planned to run as MHA, so {self.backend_id.name} has no plan to run it absorbed; "
                f"plan it again for the path {ExtendPath.ABSORBED}"
            )
        out, lse, captured = extras.out, extras.lse, metadata.captured
        if out is None or not out.is_contiguous():
            out = q.new_empty(*q.shape[:2], self._shape.dims.kv_lora_rank)
        self._run(metadata.kernel, metadata.call, q, self._pages[layer.layer_id], out, lse)
        if captured is not None:
            out.masked_fill_(captured.padding[:, None, None], 0.0)
            if lse is not None:
                lse.masked_fill_(captured.padding[:, None], float("-inf"))
        return out

    def _run(
        self, kernel: DecodeKernel, call: DecodeCall, q: Tensor, pages: LatentPages, out: Tensor, lse: Tensor | None
    ) -> None:
        if kernel.heads != q.shape[1]:
            return self._run_padded(kernel, call, q, pages, out, lse)
        if self._float8:
            q = to_float8(q)
        q, result = (rows.unflatten(0, (call.requests, call.queries)) for rows in (q, out))
        most = kernel.max_requests(call.queries, lse is not None)
        for first in range(0, call.requests, most):
            part = slice(first, min(first + most, call.requests))
            sums = None if lse is None else lse[part.start * call.queries : part.stop * call.queries]
            kernel.run(q[part], pages, call.select(part), result[part], sums)
        return None

    def _run_padded(
        self, kernel: DecodeKernel, call: DecodeCall, q: Tensor, pages: LatentPages, out: Tensor, lse: Tensor | None
    ) -> None:
        heads, wanted = q.shape[1], kernel.heads
        padded = q.new_zeros(q.shape[0], wanted, q.shape[2])
        padded[:, :heads] = q
        wide = out.new_empty(q.shape[0], wanted, out.shape[2])
        wide_lse = None if lse is None else lse.new_empty(q.shape[0], wanted)
        self._run(kernel, call, padded, pages, wide, wide_lse)
        out.copy_(wide[:, :heads])
        if lse is not None and wide_lse is not None:
            lse.copy_(wide_lse[:, :heads])

    def forward_ragged(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: LayerSpec,
        call: RaggedCall,
        plan: Plan | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Run one call of an MLA prefill as MHA, on the fallback if it planned the call, else on our ragged kernel."""
        self.check_lane(call.lane)
        fallback, ragged = self._fallback, self.lanes[call.lane].ragged
        if call.index and plan is not None and fallback is not None:
            return fallback.forward_ragged(q, k, v, layer, call, plan, lse)
        if ragged is None:
            raise self._refusal("prefill")
        call.check(q, k, v)
        if lse is not None:
            check_lse(lse, q)
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[-1])
        ragged.run(q, k, v, call, out, lse)
        return out


def _has_prefix(calls: tuple[RaggedCall, ...]) -> bool:
    """Return True if some request of an MHA extend has cached rows."""
    return len(calls) > 1 or any(call.kv_rows > call.query_rows for call in calls)
