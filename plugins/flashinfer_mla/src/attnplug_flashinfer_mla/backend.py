"""The backend: pools, wrappers and plans brought together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import (
    SCRATCH,
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
    Plan,
    PlanError,
    PlannedBackend,
    Problem,
    RaggedCall,
    Serving,
    check_lse,
)
from attnplug_flashinfer_mla.graphs import Captured, GraphMemory
from attnplug_flashinfer_mla.kernels import Cache, FlashInferKernels, Kernels, PagedKernel, RaggedKernel, Shape
from attnplug_flashinfer_mla.leases import Lease, Leases
from attnplug_flashinfer_mla.options import FlashInferMLAOptions
from attnplug_flashinfer_mla.planner import PagedCalls, padded_heads, plan_paged
from attnplug_flashinfer_mla.plugin import KERNEL, kernel_refusals

_RAGGED_DIMS = frozenset({(192, 128)})
"""Widths of keys and values that the ragged kernels were proven with; other models extend absorbed."""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedCall:
    """Which rows of q a kernel was planned for, and with how many heads."""

    rows: slice
    heads: int
    lease: Lease[PagedKernel] | Captured


@dataclass(frozen=True, slots=True, eq=False)
class PagedMetadata:
    """The planned calls of a batch, and ``new_slots`` ``[rows]`` int64; -1 among them in captured batches only."""

    calls: tuple[PlannedCall, ...]
    new_slots: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PlannedRagged:
    call: RaggedCall
    lease: Lease[RaggedKernel]

    @classmethod
    def of(cls, call: RaggedCall, leases: Leases[RaggedKernel]) -> PlannedRagged:
        lease = leases.lend()
        lease.kernel.plan(call)
        return cls(call, lease)


class ChunkKVRunner:
    """Plans the calls over prefix chunks; exists only where chunked KV is enabled (A3)."""

    def __init__(self, kernels: Kernels) -> None:
        self._leases: Leases[RaggedKernel] = Leases(kernels.ragged)

    def plan(self, call: RaggedCall) -> PlannedRagged:
        return PlannedRagged.of(call, self._leases)


class FlashInferMLABackend(PlannedBackend):
    """MLA over FlashInfer's wrappers. What it knows of a batch is in the batch's plan.

    Whatever the switches, the constructor makes every wrapper that its role needs (A1): decode and ragged always, paged
    prefill and verify unless ``serving.skip_prefill``, the chunk runner exactly under A3.
    """

    def __init__(self, context: BackendContext, *, kernels: Kernels | None = None) -> None:
        options = context.options if context.options is not None else FlashInferMLAOptions()
        self.backend_id = BackendId(context.name)
        self._context = context
        self._shape = Shape.of(context)
        self._layers = MLALayers(context)
        pool, rank = self._layers.pool, self._shape.dims.kv_lora_rank
        self._caches = {
            layer_id: Cache.of(pool.rows(layer_id).squeeze(2), rank, pool.scale(layer_id))
            for layer_id in pool.layer_ids
        }
        if kernels is None:
            kernels = _flashinfer_kernels(context, self._shape, options)
        self._kernels = kernels
        serving = context.serving
        self._switches = _switches(serving, options)
        self._decode = Leases(lambda: kernels.paged(decode=True))
        self._ragged = Leases(kernels.ragged)
        self._prefill, self._verify = (
            None if serving.skip_prefill else Leases(lambda: kernels.paged(decode=False)) for _ in range(2)
        )
        self.mha_chunk_kv_cache = None if self._switches else ChunkKVRunner(kernels)
        self._captures: Captures[Captured] = Captures(self.backend_id)
        self._graph: GraphMemory | None = None
        self.claims = Claims(
            cuda_graph=GraphLevel.NEVER if options.kernel == "cutlass" else GraphLevel.UNIFORM,
            mla_extend=self._extend_paths(serving, options),
        )

    def _extend_paths(self, serving: Serving, options: FlashInferMLAOptions) -> frozenset[ExtendPath]:
        """One-shot takes the ragged wrapper, chunks the runner, both a kernel for these widths."""
        paths = {ExtendPath.ABSORBED}
        if not (options.disable_ragged or serving.skip_prefill) and self._shape.ragged_dims in _RAGGED_DIMS:
            paths.add(ExtendPath.ONE_SHOT)
            if self.mha_chunk_kv_cache is not None:
                paths.add(ExtendPath.CHUNKED)
        return frozenset(paths)

    # Planning

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan:
        geometry = Geometry.of(batch, self._shape.page_size)
        decode = batch.forward_mode.is_decode
        if _runs_as_mha(batch):  # its calls are in the chunk plan, and core writes its rows
            planned = PagedCalls((), geometry.page_table.new_empty(0, dtype=torch.int64))
        else:
            planned = plan_paged(geometry, self._shape.heads, causal=not decode)
        calls = []
        for call in planned.calls:
            lease = self._leases(batch.forward_mode).lend()
            lease.kernel.plan(call)
            calls.append(PlannedCall(call.rows, call.heads, lease))
        return Plan(
            planner=self.backend_id,
            mode=batch.forward_mode,
            query_rows=geometry.query_rows,
            kv_rows=geometry.kv_rows,
            metadata=PagedMetadata(tuple(calls), planned.new_slots),
        )

    def _leases(self, mode: ForwardMode) -> Leases[PagedKernel]:
        leases = self._prefill
        if mode.is_decode:
            leases = self._decode
        elif mode is ForwardMode.TARGET_VERIFY:
            leases = self._verify
        if leases is None:
            raise PlanError(
                f"backend {self.backend_id.name} was built with skip_prefill=True, for a draft's worker: it plans "
                f"decode, not {mode}; build it without, or let another backend prefill"
            )
        return leases

    def init_mha_chunk_metadata(
        self, forward_batch: ForwardBatch, disable_flashinfer_ragged: bool = False
    ) -> Plan | None:
        """Plan the ragged calls of a one-shot or chunked extend; ``None`` for an absorbed one, which has none.

        With ``disable_flashinfer_ragged`` the causal call over new rows is somebody else's: only chunks are planned.
        """
        extend = forward_batch.mla_plan
        if extend is None:
            raise PlanError(
                f"backend {self.backend_id.name} was asked to plan the chunks of a batch that was not prepared for "
                "MLA; call MLAAttention.prepare(batch), which does both"
            )
        if extend.path is ExtendPath.ABSORBED:
            return None
        first, *chunks = extend.calls
        planned: dict[int, PlannedRagged] = {}
        if not disable_flashinfer_ragged:
            planned[first.index] = PlannedRagged.of(first, self._ragged)
        if chunks and self.mha_chunk_kv_cache is None:
            able = " or ".join(sorted(self.claims.mla_extend))
            raise PlanError(
                f"backend {self.backend_id.name} has chunked KV off ({', '.join(self._switches)}), and the batch was "
                f"prepared for {len(chunks)} prefix chunks; it can run this extend {able}"
            )
        for call in chunks:
            assert self.mha_chunk_kv_cache is not None
            planned[call.index] = self.mha_chunk_kv_cache.plan(call)
        if not planned:
            return None
        return Plan(
            planner=self.backend_id,
            mode=forward_batch.forward_mode,
            query_rows=first.query_rows,
            kv_rows=sum(call.kv_rows for call in extend.calls),
            metadata=planned,
        )

    # CUDA graphs

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Buffers for captured batches of up to ``max_bs`` requests and ``max_num_tokens`` rows."""
        if self.claims.cuda_graph is GraphLevel.NEVER:
            raise BackendError("kernel=cutlass decodes outside of CUDA graphs only; use kernel=auto")
        pages = -(-self._context.limits.max_context // self._shape.page_size)
        if max_bs * pages * self._shape.page_size >= 1 << 32:
            raise BackendError(
                f"{max_bs} captured requests of up to {self._context.limits.max_context} tokens are more rows than the "
                "kernels can count; capture smaller batches, or lower `context_length`",
                settings=["context_length"],
            )
        self._captures.reserve(GraphLimits(max_bs, max_num_tokens, pages))
        self._graph = GraphMemory(max_bs, max_num_tokens, pages, self._context.device)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> Plan:
        """The plan of a captured shape, always the same: what changes from replay to replay is made in the graph."""
        return self._captures.find(forward_batch, in_capture, self._capture).plan

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Page indices, slots and work list, from the page table and lengths that the batch has when the graph runs."""
        captured = self._captures.find(forward_batch, False, self._capture)
        captured.fill(forward_batch.page_table, forward_batch.seq_lens, self._shape.page_size)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Padded requests have no rows: nothing is read or written for them."""
        return 0

    def _capture(self, batch: ForwardBatch) -> Captured:
        assert self._graph is not None
        mode = batch.forward_mode
        self._leases(mode)  # refuses what this backend was not built for
        heads = self._shape.heads if mode.is_decode else padded_heads(self._shape.heads)
        captured = self._graph.capture(batch, self._kernels, heads, self._shape.page_size)
        call = PlannedCall(slice(0, batch.num_tokens), heads, captured)
        captured.plan = Plan(
            planner=self.backend_id,
            mode=mode,
            query_rows=batch.num_tokens,
            kv_rows=None,
            metadata=PagedMetadata((call,), captured.slots),
        )
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
        metadata: PagedMetadata = plan.metadata
        self._layers.check(layer, q)
        cache, planned = self._caches[layer.layer_id], plan.query_rows
        if not metadata.calls and planned:
            raise PlanError(
                f"the batch was planned to run as MHA, so {self.backend_id.name} has no plan to run it absorbed; "
                "prepare it for that, or clear batch.mla_plan before planning"
            )
        if save_kv_cache:
            self._layers.save(layer, metadata.new_slots, k, v, planned)
        lse = self._layers.lse(q, extras)
        if q.shape[0] == planned and len(metadata.calls) == 1:
            return _run(metadata.calls[0], q, cache, None, lse)
        out = q.new_empty(q.shape[0], q.shape[1], self._shape.dims.kv_lora_rank)
        out[planned:] = 0  # rows behind the plan are padding (B5)
        if lse is not None:
            lse[planned:] = float("-inf")
        for call in metadata.calls:
            _run(call, q[call.rows], cache, out[call.rows], None if lse is None else lse[call.rows])
        return out

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
        plan = None if batch.chunk_plan is None else batch.chunk_plan.part_of(self.backend_id)
        planned: PlannedRagged | None = None if plan is None else plan.metadata.get(call.index)
        if planned is None or planned.call is not call:
            raise PlanError(
                f"call {call.index} of {call.query_rows} query rows has no plan of backend {self.backend_id.name}; "
                "assign the result of init_mha_chunk_metadata(batch) to batch.chunk_plan before the first layer"
            )
        if lse is not None:
            check_lse(lse, q)
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[-1])
        planned.lease.kernel.run(q, k, v, out, lse)
        return out


def _run(call: PlannedCall, q: Tensor, cache: Cache, out: Tensor | None, lse: Tensor | None) -> Tensor:
    heads = q.shape[1]
    if call.heads == heads:
        return call.lease.kernel.run(q, cache, out, lse)
    padded = q.new_zeros(q.shape[0], call.heads, q.shape[2])
    padded[:, :heads] = q
    wide_lse = None if lse is None else lse.new_empty(q.shape[0], call.heads)
    wide = call.lease.kernel.run(padded, cache, None, wide_lse)[:, :heads]
    if lse is not None and wide_lse is not None:
        lse.copy_(wide_lse[:, :heads])
    return wide.contiguous() if out is None else out.copy_(wide)


def _runs_as_mha(batch: ForwardBatch) -> bool:
    return batch.mla_plan is not None and batch.mla_plan.path is not ExtendPath.ABSORBED


def _flashinfer_kernels(context: BackendContext, shape: Shape, options: FlashInferMLAOptions) -> FlashInferKernels:
    kernel: str = options.kernel
    major, minor = torch.cuda.get_device_capability(context.device)
    sm = 10 * major + minor
    problem = Problem(context.model, "cuda", sm, page_size=context.page_size, tensor_parallel=context.parallel.size)
    for refusal in kernel_refusals(problem, options):
        raise BackendError(f"{refusal.message}; use {KERNEL}=auto, or leave it out", settings=[KERNEL])
    if kernel == "auto":
        kernel = "fa3" if sm == 90 else "fa2"
    processors = torch.cuda.get_device_properties(context.device).multi_processor_count
    least = -(-2 * processors * 64 * (2 * shape.dims.kv_lora_rank + 4) // 2**20)  # parts of divided tiles
    if options.workspace_mib < least:
        raise BackendError(
            f"flashinfer_mla.workspace_mib={options.workspace_mib} is too little for {processors} multiprocessors; "
            f"give {least} or more",
            settings=["flashinfer_mla.workspace_mib"],
        )
    workspace = context.workspace.request(context.name, context.device, SCRATCH, options.workspace_mib << 20)
    return FlashInferKernels(shape, workspace.buffer, kernel)


def _switches(serving: Serving, options: FlashInferMLAOptions) -> list[str]:
    """What turns chunked KV off (A3), in words; nothing where it is on."""
    off = {
        "skip_prefill": serving.skip_prefill,
        "disaggregation_mode=decode": serving.disaggregation_mode == "decode",
        "disable_chunked_prefix_cache": serving.disable_chunked_prefix_cache,
        "disable_ragged": options.disable_ragged,
    }
    return [name for name, is_off in off.items() if is_off]
