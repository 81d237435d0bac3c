"""The ``flashinfer`` backend: plans batches, captures CUDA graphs and runs FlashInfer's paged wrappers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from attnplug import (
    SCRATCH,
    BackendContext,
    BackendError,
    ForwardExtras,
    Geometry,
    GraphLimits,
    LayerSpec,
    NewRows,
    Plan,
    PlannedAttention,
    PoolError,
    Problem,
)
from attnplug.kernels import torch_dtype
from attnplug_flashinfer.graphs import CapturedBatch, CapturedCall, PagedGraphMemory
from attnplug_flashinfer.kernels import (
    FA2,
    FlashInferEager,
    FlashInferKernels,
    KernelDTypes,
    PagedLayerCache,
    load_library,
)
from attnplug_flashinfer.options import FlashInferOptions
from attnplug_flashinfer.planner import plan_paged
from attnplug_flashinfer.plugin import DTYPES, FA3_SM, KERNEL, refusals
from attnplug_flashinfer.shapes import FlashInferLayerShape
from attnplug_flashinfer_mla.kernel_pool import KernelHandle, KernelPool


@dataclass(frozen=True, slots=True, eq=False)
class FlashInferMetadata:
    """A plan's metadata: a planned kernel per layer shape. ``captured`` is set for CUDA graphs.

    The plan owns the handles, which keep kernels from being planned for another batch.
    """

    calls: Mapping[FlashInferLayerShape, KernelHandle[FlashInferEager] | CapturedCall]
    captured: CapturedBatch | None = None


class PagedWrappers:
    """Kernel pools of one lane: for each layer shape, one for long extends and one for all other batches."""

    def __init__(self, kernels: FlashInferKernels, shapes: Sequence[FlashInferLayerShape]) -> None:
        self.kernels = kernels
        self._pools = {
            (shape, name): KernelPool(partial(kernels.eager, shape, name))
            for shape in shapes
            for name in {FA2, kernels.prefill}
        }

    def acquire(self, shape: FlashInferLayerShape, *, long: bool) -> KernelHandle[FlashInferEager]:
        return self._pools[shape, self.kernels.prefill if long else FA2].acquire()


class FlashInferBackend(PlannedAttention):
    """MHA and GQA over FlashInfer's paged wrappers.

    The backend keeps no state of a batch; a plan owns the kernels that it runs on. ``kernels`` are the kernel
    factories, one per lane; by default FlashInfer's.
    """

    def __init__(self, context: BackendContext, *, kernels: Sequence[FlashInferKernels] | None = None) -> None:
        super().__init__(context)
        pool, layers = context.pools.mha, context.model.full_layers
        if pool is None or not layers:
            raise PoolError(f"backend {context.name} requires a model with MHA layers and an MHA pool")
        self._caches = {layer.layer_id: PagedLayerCache.of(pool, layer) for layer in layers}
        self._shapes = tuple({cache.shape: None for cache in self._caches.values()})
        made = kernels or _flashinfer_kernels(context, list(self._caches.values()))
        self._lanes = [PagedWrappers(each, self._shapes) for each in made]

    # Planning

    def plan(self, geometry: Geometry) -> Plan:
        if not geometry.rows:
            return Plan.of(self.backend_id, geometry)
        call, slots = plan_paged(geometry)
        calls = {shape: self._lanes[geometry.lane].acquire(shape, long=call.long) for shape in self._shapes}
        for handle in calls.values():
            handle.kernel.plan(call)
        return Plan.of(self.backend_id, geometry, FlashInferMetadata(calls), slots)

    # CUDA graphs

    def reserve(self, limits: GraphLimits) -> PagedGraphMemory:
        return PagedGraphMemory(limits, self.context.device)

    def capture(self, geometry: Geometry, memory: PagedGraphMemory) -> Plan:
        captured = memory.capture(geometry, self._lanes[geometry.lane].kernels, self._shapes)
        return Plan.of(self.backend_id, geometry, FlashInferMetadata(captured.calls, captured), captured.slots)

    def refill(self, plan: Plan, geometry: Geometry) -> None:
        plan.metadata.captured.fill(geometry)

    # Running

    def attend(self, q: Tensor, layer: LayerSpec, plan: Plan, new: NewRows | None, extras: ForwardExtras) -> Tensor:
        cache, metadata, out = self._caches[layer.layer_id], plan.metadata, extras.out
        if out is not None and not out.is_contiguous():
            out = None
        attended: Tensor = metadata.calls[cache.shape].kernel.run(q, cache, out, extras.lse)
        return attended


def _flashinfer_kernels(context: BackendContext, caches: Sequence[PagedLayerCache]) -> list[FlashInferKernels]:
    options = context.options_of(FlashInferOptions)
    properties = torch.cuda.get_device_properties(context.device)
    problem = Problem(device="cuda", sm=10 * properties.major + properties.minor, kv_dtype=context.kv_dtype)
    for refusal in refusals(problem, None, options):
        raise BackendError(f"{refusal.message}; use {KERNEL}=auto, or leave it out", settings=[KERNEL])
    prefill: str = options.kernel
    same_strides = all(cache.keys.stride() == cache.values.stride() for cache in caches)
    if prefill == "auto":
        prefill = "fa3" if same_strides and problem.sm == FA3_SM and context.kv_dtype in DTYPES else FA2
    if prefill == "fa3" and not same_strides:
        raise BackendError(
            f"kernel=fa3 requires keys and values with the same strides; use {KERNEL}=auto, or leave it out",
            settings=[KERNEL],
        )
    dtypes = KernelDTypes(context.page_size, context.dtype, torch_dtype(context.kv_dtype))

    def of_lane(lane: int) -> FlashInferKernels:
        def scratch(nbytes: int) -> Tensor:
            return context.workspace.request(context.name, context.device, SCRATCH, nbytes, lane=lane).buffer

        return FlashInferKernels(load_library(), dtypes, scratch, properties.multi_processor_count, prefill)

    return [of_lane(lane) for lane in range(context.limits.lanes)]
