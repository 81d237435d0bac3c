"""The backend: pool, wrappers and plans brought together."""

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
from attnplug_flashinfer.graphs import Captured, CapturedCall, GraphMemory
from attnplug_flashinfer.kernels import FA2, Cache, CacheType, FlashInferEager, FlashInferKernels, load_library
from attnplug_flashinfer.options import FlashInferOptions
from attnplug_flashinfer.planner import plan_paged
from attnplug_flashinfer.plugin import DTYPES, FA3_SM, KERNEL, refusals
from attnplug_flashinfer.shapes import LayerShape
from attnplug_flashinfer_mla.leases import Lease, Leases


@dataclass(frozen=True, slots=True, eq=False)
class Metadata:
    """What a plan holds: a planned kernel for each shape of layers, and how a captured batch is filled."""

    calls: Mapping[LayerShape, Lease[FlashInferEager] | CapturedCall]
    captured: Captured | None = None


class Wrappers:
    """What plans of one lane run on: for each shape of layers, kernels for long extends and for all other batches."""

    def __init__(self, kernels: FlashInferKernels, shapes: Sequence[LayerShape]) -> None:
        self.kernels = kernels
        self._leases = {
            (shape, name): Leases(partial(kernels.eager, shape, name))
            for shape in shapes
            for name in {FA2, kernels.prefill}
        }

    def lend(self, shape: LayerShape, *, long: bool) -> Lease[FlashInferEager]:
        return self._leases[shape, self.kernels.prefill if long else FA2].lend()


class FlashInferBackend(PlannedAttention):
    """MHA and GQA over FlashInfer's wrappers. All it knows of a batch is in the batch's plan.

    ``kernels`` holds one maker of kernels per lane.
    """

    def __init__(self, context: BackendContext, *, kernels: Sequence[FlashInferKernels] | None = None) -> None:
        super().__init__(context)
        pool, layers = context.pools.mha, context.model.full_layers
        if pool is None or not layers:
            raise PoolError(f"backend {context.name} serves MHA layers, and needs a model and a pool with some")
        self._caches = {layer.layer_id: Cache.of(pool, layer) for layer in layers}
        self._shapes = tuple({cache.shape: None for cache in self._caches.values()})
        made = kernels or _flashinfer_kernels(context, list(self._caches.values()))
        self._lanes = [Wrappers(each, self._shapes) for each in made]

    # Planning

    def plan(self, geometry: Geometry) -> Plan:
        if not geometry.rows:
            return Plan.of(self.backend_id, geometry)
        call, slots = plan_paged(geometry)
        calls = {shape: self._lanes[geometry.lane].lend(shape, long=call.long) for shape in self._shapes}
        for lease in calls.values():
            lease.kernel.plan(call)
        return Plan.of(self.backend_id, geometry, Metadata(calls), slots)

    # CUDA graphs

    def reserve(self, limits: GraphLimits) -> GraphMemory:
        return GraphMemory(limits, self.context.device)

    def capture(self, geometry: Geometry, memory: GraphMemory) -> Plan:
        captured = memory.capture(geometry, self._lanes[geometry.lane].kernels, self._shapes)
        return Plan.of(self.backend_id, geometry, Metadata(captured.calls, captured), captured.slots)

    def refill(self, plan: Plan, geometry: Geometry) -> None:
        plan.metadata.captured.fill(geometry)

    # Running

    def attend(self, q: Tensor, layer: LayerSpec, plan: Plan, new: NewRows | None, extras: ForwardExtras) -> Tensor:
        cache, metadata, out = self._caches[layer.layer_id], plan.metadata, extras.out
        if out is not None and not out.is_contiguous():
            out = None
        attended: Tensor = metadata.calls[cache.shape].kernel.run(q, cache, out, extras.lse)
        return attended


def _flashinfer_kernels(context: BackendContext, caches: Sequence[Cache]) -> list[FlashInferKernels]:
    options = context.options_of(FlashInferOptions)
    properties = torch.cuda.get_device_properties(context.device)
    problem = Problem(device="cuda", sm=10 * properties.major + properties.minor, kv_dtype=context.kv_dtype)
    for refusal in refusals(problem, None, options):
        raise BackendError(f"{refusal.message}; use {KERNEL}=auto, or leave it out", settings=[KERNEL])
    prefill: str = options.kernel
    fit = all(cache.keys.stride() == cache.values.stride() for cache in caches)
    if prefill == "auto":
        prefill = "fa3" if fit and problem.sm == FA3_SM and context.kv_dtype in DTYPES else FA2
    if prefill == "fa3" and not fit:
        raise BackendError(
            f"kernel=fa3 reads keys and values of the same strides, and these differ; use {KERNEL}=auto, or leave it "
            "out",
            settings=[KERNEL],
        )
    kind = CacheType(context.page_size, context.dtype, torch_dtype(context.kv_dtype))

    def of_lane(lane: int) -> FlashInferKernels:
        def scratch(nbytes: int) -> Tensor:
            return context.workspace.request(context.name, context.device, SCRATCH, nbytes, lane=lane).buffer

        return FlashInferKernels(load_library(), kind, scratch, properties.multi_processor_count, prefill)

    return [of_lane(lane) for lane in range(context.limits.lanes)]
