"""The ``flashinfer_mla`` backend: plans batches, captures CUDA graphs and runs FlashInfer's MLA wrappers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnplug import (
    SCRATCH,
    BackendContext,
    BackendError,
    Claims,
    ExtendPath,
    ForwardBatch,
    ForwardExtras,
    ForwardMode,
    Geometry,
    GraphLevel,
    GraphLimits,
    LayerSpec,
    MLAShape,
    NewRows,
    Plan,
    PlanError,
    PlannedAttention,
    Problem,
    RaggedCall,
    Serving,
)
from attnplug.kernels import check_lse
from attnplug_flashinfer_mla.graphs import CapturedMLABatch, MLAGraphMemory
from attnplug_flashinfer_mla.jit_modules import RAGGED_DIMS
from attnplug_flashinfer_mla.kernel_pool import KernelHandle, KernelPool
from attnplug_flashinfer_mla.kernels import (
    FlashInferMLAKernels,
    LatentCache,
    MLAKernelFactory,
    PagedKernel,
    RaggedKernel,
)
from attnplug_flashinfer_mla.options import FlashInferMLAOptions
from attnplug_flashinfer_mla.planner import padded_heads, plan_paged
from attnplug_flashinfer_mla.plugin import KERNEL, kernel_refusals


@dataclass(frozen=True, slots=True, eq=False)
class PlannedCall:
    """A planned paged kernel and the rows of q that it serves.

    ``heads`` may exceed the model's; q is then padded. The plan owns ``handle``, which keeps the kernel from being
    planned for another batch.
    """

    rows: slice
    heads: int
    handle: KernelHandle[PagedKernel] | CapturedMLABatch


@dataclass(frozen=True, slots=True, eq=False)
class PlannedRaggedCall:
    """A ragged call and the kernel that is planned for it."""

    call: RaggedCall
    handle: KernelHandle[RaggedKernel]

    @classmethod
    def of(cls, call: RaggedCall, pool: KernelPool[RaggedKernel]) -> PlannedRaggedCall:
        handle = pool.acquire()
        handle.kernel.plan(call)
        return cls(call, handle)


class MLAWrappers:
    """Kernel pools of one lane: decode and ragged always, paged prefill and verify unless ``skip_prefill`` (A1).

    ``mha_chunk_kv_cache`` runs the calls over prefix chunks. It exists if and only if chunked KV is on (A3).
    """

    def __init__(self, kernels: MLAKernelFactory, *, skip_prefill: bool, chunked: bool) -> None:
        self.kernels = kernels
        self.decode = KernelPool(lambda: kernels.paged(decode=True))
        self.ragged = KernelPool(kernels.ragged)
        self.prefill, self.verify = (
            None if skip_prefill else KernelPool(lambda: kernels.paged(decode=False)) for _ in range(2)
        )
        self.mha_chunk_kv_cache = KernelPool(kernels.ragged) if chunked else None

    def paged(self, mode: ForwardMode) -> KernelPool[PagedKernel] | None:
        if mode.is_decode:
            return self.decode
        return self.verify if mode is ForwardMode.TARGET_VERIFY else self.prefill


class FlashInferMLABackend(PlannedAttention):
    """MLA over FlashInfer's wrappers.

    The backend keeps no state of a batch; a plan owns the kernels that it runs on. ``kernels`` are the kernel
    factories, one per lane; by default FlashInfer's. Every lane has all wrappers that its role needs, whatever the
    options (A1).
    """

    def __init__(self, context: BackendContext, *, kernels: Sequence[MLAKernelFactory] | None = None) -> None:
        options = context.options_of(FlashInferMLAOptions)
        self._shape = shape = MLAShape.of(context)
        self._chunking_disabled_by = _chunking_disabled_by(context.serving, options)
        super().__init__(context, self._narrow_claims(context, options))
        self._caches = {
            layer_id: LatentCache.of(
                shape.pool.rows(layer_id).squeeze(2), shape.dims.kv_lora_rank, shape.pool.scale(layer_id)
            )
            for layer_id in shape.pool.layer_ids
        }
        skip_prefill, chunked = context.serving.skip_prefill, not self._chunking_disabled_by
        self.lanes = tuple(
            MLAWrappers(each, skip_prefill=skip_prefill, chunked=chunked)
            for each in kernels or _flashinfer_kernels(context, shape, options)
        )

    def _narrow_claims(self, context: BackendContext, options: FlashInferMLAOptions) -> Claims:
        """Return the spec's claims without what is disabled. MHA paths require ragged kernels for the model's dims."""
        declared, paths = context.declared.claims, {ExtendPath.ABSORBED}
        ragged = not (options.disable_ragged or context.serving.skip_prefill)
        if ragged and self._shape.ragged_dims in RAGGED_DIMS:
            paths |= {ExtendPath.ONE_SHOT} if self._chunking_disabled_by else set(ExtendPath)
        level = GraphLevel.NEVER if options.kernel == "cutlass" else declared.cuda_graph
        return replace(declared, cuda_graph=level, mla_extend=declared.mla_extend & paths)

    # Planning

    def plan(self, geometry: Geometry) -> Plan:
        if geometry.calls:  # planned by init_mha_chunk_metadata; the caller writes the rows
            return Plan.of(self.backend_id, geometry)
        mode = geometry.mode
        planned = plan_paged(geometry, self._shape.heads, causal=not mode.is_decode)
        calls = []
        for call in planned.calls:
            handle = self._pool_for(geometry).acquire()
            handle.kernel.plan(call)
            calls.append(PlannedCall(call.rows, call.heads, handle))
        return Plan.of(self.backend_id, geometry, tuple(calls), planned.new_slots)

    def _pool_for(self, geometry: Geometry) -> KernelPool[PagedKernel]:
        pool = self.lanes[geometry.lane].paged(geometry.mode)
        if pool is None:
            raise PlanError(
                f"backend {self.backend_id.name} was built with skip_prefill=True, for a draft worker: it plans "
                f"decode, not {geometry.mode}; build it without skip_prefill, or use another backend for prefill"
            )
        return pool

    def init_mha_chunk_metadata(
        self, forward_batch: ForwardBatch, disable_flashinfer_ragged: bool = False
    ) -> Plan | None:
        """Plan the ragged calls of a one-shot or chunked extend. Returns ``None`` for an absorbed one.

        With ``disable_flashinfer_ragged``, another kernel runs the causal call over new rows, and only prefix chunks
        are planned.
        """
        geometry = forward_batch.geometry
        self.check_geometry(geometry)
        wrappers, first, chunks = self.lanes[geometry.lane], geometry.calls[:1], geometry.calls[1:]
        chunk_pool = wrappers.mha_chunk_kv_cache
        if chunks and chunk_pool is None:
            supported = " or ".join(sorted(self.claims.mla_extend))
            raise PlanError(
                f"backend {self.backend_id.name} has chunked KV disabled by {', '.join(self._chunking_disabled_by)}, "
                f"but the batch was prepared for {len(chunks)} prefix chunks; it can run this extend {supported}"
            )
        planned = {}
        if not disable_flashinfer_ragged:
            planned = {call.index: PlannedRaggedCall.of(call, wrappers.ragged) for call in first}
        if chunk_pool is not None:
            planned |= {call.index: PlannedRaggedCall.of(call, chunk_pool) for call in chunks}
        return Plan.of(self.backend_id, geometry, planned) if planned else None

    # CUDA graphs

    def reserve(self, limits: GraphLimits) -> MLAGraphMemory:
        if limits.max_bs * limits.pages * self._shape.page_size >= 1 << 32:
            raise BackendError(
                f"{limits.max_bs} captured requests of up to {self.context.limits.max_context} tokens exceed the "
                "kernels' 32-bit row index; capture smaller batches, or lower `context_length`",
                settings=["context_length"],
            )
        return MLAGraphMemory(limits, self.context.device)

    def capture(self, geometry: Geometry, memory: MLAGraphMemory) -> Plan:
        self._pool_for(geometry)  # raises PlanError for a mode that this backend was not built for
        heads = self._shape.heads if geometry.mode.is_decode else padded_heads(self._shape.heads)
        captured = memory.capture(geometry, self.lanes[geometry.lane].kernels, heads)
        call = PlannedCall(slice(0, geometry.rows), heads, captured)
        return Plan.of(self.backend_id, geometry, (call,), captured.slots)

    def refill(self, plan: Plan, geometry: Geometry) -> None:
        """Recompute page indices, slots and work list on the device, from the batch's page table and lengths."""
        plan.metadata[0].handle.fill(geometry)

    # Running

    def attend(self, q: Tensor, layer: LayerSpec, plan: Plan, new: NewRows | None, extras: ForwardExtras) -> Tensor:
        calls: tuple[PlannedCall, ...] | None = plan.metadata
        if calls is None:
            raise PlanError(
                f"the batch was planned to run as MHA, so {self.backend_id.name} has no plan to run it absorbed; "
                f"plan it again for the path {ExtendPath.ABSORBED}"
            )
        cache, q_rope, out, lse = self._caches[layer.layer_id], extras.q_rope, extras.out, extras.lse
        if out is None or not out.is_contiguous():
            out = q.new_empty(*q.shape[:2], self._shape.dims.kv_lora_rank)
        if len(calls) == 1:
            _run(calls[0], q, q_rope, cache, out, lse)
            return out
        for call in calls:
            rows = call.rows
            rope, sums = None if q_rope is None else q_rope[rows], None if lse is None else lse[rows]
            _run(call, q[rows], rope, cache, out[rows], sums)
        return out

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
        own = None if plan is None else plan.part_of(self.backend_id)
        calls: object = None if own is None else own.metadata
        planned: PlannedRaggedCall | None = calls.get(call.index) if isinstance(calls, dict) else None
        if planned is None or planned.call is not call:
            raise PlanError(
                f"call {call.index} of {call.query_rows} query rows has no plan of backend {self.backend_id.name}; "
                "pass the plan that init_mha_chunk_metadata returned for its batch"
            )
        call.check(q, k, v)
        if lse is not None:
            check_lse(lse, q)
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[-1])
        planned.handle.kernel.run(q, k, v, out, lse)
        return out


def _run(
    call: PlannedCall, q: Tensor, q_rope: Tensor | None, cache: LatentCache, out: Tensor, lse: Tensor | None
) -> None:
    kernel, (rows, heads, width) = call.handle.kernel, q.shape
    if call.heads == heads:
        kernel.run(q, q_rope, cache, out, lse)
        return
    padded = q.new_zeros(rows, call.heads, cache.rows.shape[-1])
    padded[:, :heads, :width] = q
    if q_rope is not None:
        padded[:, :heads, width:] = q_rope
    wide = out.new_empty(rows, call.heads, out.shape[2])
    wide_lse = None if lse is None else lse.new_empty(rows, call.heads)
    kernel.run(padded, None, cache, wide, wide_lse)
    out.copy_(wide[:, :heads])
    if lse is not None and wide_lse is not None:
        lse.copy_(wide_lse[:, :heads])


def _flashinfer_kernels(
    context: BackendContext, shape: MLAShape, options: FlashInferMLAOptions
) -> list[FlashInferMLAKernels]:
    kernel: str = options.kernel
    major, minor = torch.cuda.get_device_capability(context.device)
    sm = 10 * major + minor
    problem = Problem(context.model, "cuda", sm, page_size=context.page_size)  # the model is this rank's
    for refusal in kernel_refusals(problem, options):
        raise BackendError(f"{refusal.message}; use {KERNEL}=auto, or leave it out", settings=[KERNEL])
    if kernel == "auto":
        kernel = "fa3" if sm == 90 else "fa2"
    processors = torch.cuda.get_device_properties(context.device).multi_processor_count
    least = -(-2 * processors * 64 * (2 * shape.dims.kv_lora_rank + 4) // 2**20)  # partial results of split tiles
    if options.workspace_mib < least:
        raise BackendError(
            f"flashinfer_mla.workspace_mib={options.workspace_mib} is too small for {processors} multiprocessors; "
            f"set {least} or more",
            settings=["flashinfer_mla.workspace_mib"],
        )
    request, nbytes = context.workspace.request, options.workspace_mib << 20
    return [
        FlashInferMLAKernels(shape, request(context.name, context.device, SCRATCH, nbytes, lane=lane).buffer, kernel)
        for lane in range(context.limits.lanes)
    ]


def _chunking_disabled_by(serving: Serving, options: FlashInferMLAOptions) -> list[str]:
    """Return the names of the settings that disable chunked KV (A3); empty if it is enabled."""
    off = {
        "skip_prefill": serving.skip_prefill,
        "disaggregation_mode=decode": serving.disaggregation_mode == "decode",
        "disable_chunked_prefix_cache": serving.disable_chunked_prefix_cache,
        "disable_ragged": options.disable_ragged,
    }
    return [name for name, is_off in off.items() if is_off]
