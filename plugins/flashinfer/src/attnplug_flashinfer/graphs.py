"""CUDA graph support: static buffers and plans of captured batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import BackendError, Geometry, GraphLimits
from attnplug_flashinfer.device_planner import fill_work_list
from attnplug_flashinfer.kernels import FlashInferCaptured, FlashInferKernels, PagedGraphBuffers
from attnplug_flashinfer.shapes import FlashInferLayerShape
from attnplug_flashinfer.work_list import PageCounts, PagedWorkList, UniformPagedBatch, work_list_problem
from attnplug_flashinfer_mla.device_planner import fill_indices
from attnplug_flashinfer_mla.lengths import CallLengths


@dataclass(frozen=True, slots=True, eq=False)
class CapturedCall:
    """Planned kernel and work list of one captured batch shape, for layers of one shape."""

    kernel: FlashInferCaptured
    batch: UniformPagedBatch
    work_list: PagedWorkList


@dataclass(frozen=True, slots=True, eq=False)
class CapturedBatch:
    """Planned kernels and static buffers of one captured batch shape.

    Everything that changes from replay to replay is computed inside the graph by :meth:`fill`.
    """

    calls: dict[FlashInferLayerShape, CapturedCall]
    qo_indptr: Tensor
    buffers: PagedGraphBuffers
    slots: Tensor

    def fill(self, geometry: Geometry) -> None:
        """Fill the kernels' inputs from the batch's page table and lengths: one launch per layer shape and one more.

        The page indices come last. Attention kernels may start early (programmatic dependent launch) and read lengths
        and work lists before they wait for the previous kernel, which therefore must not fill these.
        """
        kv_lens, counts, width = geometry.seq_lens, self.buffers.counts, geometry.page_table.shape[1]
        for call in self.calls.values():
            fill_work_list(call.work_list, call.batch, kv_lens, width, counts)
        lengths = CallLengths(self.qo_indptr, counts.kv_indptr, kv_lens)
        fill_indices(geometry.page_table, lengths, geometry.page_size, self.buffers.kv_indices, self.slots)
        if geometry.slots is not None:
            self.slots.copy_(geometry.slots)


class PagedGraphMemory:
    """Static buffers of one lane, shared by all captured shapes because a lane's graphs run one after the other."""

    def __init__(self, limits: GraphLimits, device: torch.device) -> None:
        self._kv_indices = torch.zeros(limits.max_bs * limits.pages, dtype=torch.int32, device=device)
        self._slots = torch.full((limits.max_num_tokens,), -1, dtype=torch.int64, device=device)
        self._device = device

    def capture(
        self, geometry: Geometry, kernels: FlashInferKernels, shapes: Iterable[FlashInferLayerShape]
    ) -> CapturedBatch:
        """Create and plan the kernels of a new batch shape."""
        requests, rows, device = geometry.requests, geometry.rows, self._device
        queries = rows // requests
        counts = PageCounts(
            torch.zeros(requests + 1, dtype=torch.int32, device=device),
            torch.zeros(requests, dtype=torch.int32, device=device),
        )
        buffers = PagedGraphBuffers(counts, self._kv_indices)
        # Dummy lengths: short and all different, so that the check of the layout can distinguish requests.
        most = geometry.page_table.shape[1] * geometry.page_size
        kv_lens = (queries + torch.arange(requests, dtype=torch.int32) % 128).clamp(max=most)
        calls = {}
        for shape in shapes:
            batch = UniformPagedBatch(requests, queries, shape.group, geometry.page_size, shape.window_left)
            kernel = kernels.captured(shape, batch, buffers)
            calls[shape] = CapturedCall(kernel, batch, _check_layout(kernel.plan(kv_lens), batch, kv_lens))
        qo_indptr = torch.arange(requests + 1, dtype=torch.int32, device=device) * queries
        return CapturedBatch(calls, qo_indptr, buffers, self._slots[:rows])


def _check_layout(work_list: PagedWorkList | None, batch: UniformPagedBatch, kv_lens: Tensor) -> PagedWorkList:
    """Return the library's work list. Raises ``BackendError`` if it is not laid out as we fill it."""
    problem = "PrefillPlanInfo has other fields" if work_list is None else work_list_problem(work_list, batch, kv_lens)
    if work_list is None or problem:
        raise BackendError(
            f"the installed flashinfer uses an unknown work list layout: {problem}; run without CUDA graphs"
        )
    return work_list
