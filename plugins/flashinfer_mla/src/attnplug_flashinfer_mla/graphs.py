"""CUDA graph support: static buffers and plans of captured batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import BackendError, Geometry, GraphLimits, PlanError
from attnplug_flashinfer_mla.device_planner import fill_indices, fill_work_list
from attnplug_flashinfer_mla.kernels import MLAGraphBuffers, MLAKernelFactory, PagedKernel
from attnplug_flashinfer_mla.lengths import CallLengths
from attnplug_flashinfer_mla.planner import MLAPagedCall
from attnplug_flashinfer_mla.work_list import MAX_WORK_ITEMS, MLAWorkList, UniformMLABatch, work_list_problem


@dataclass(frozen=True, slots=True, eq=False)
class CapturedMLABatch:
    """Planned kernel and static buffers of one captured batch shape.

    The page indices of request i start at ``i * pages`` of ``kv_indices``, so their offsets are constant. Everything
    that changes is computed inside the graph by :meth:`fill`.
    """

    kernel: PagedKernel
    batch: UniformMLABatch
    work_list: MLAWorkList
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    slots: Tensor

    def fill(self, geometry: Geometry) -> None:
        """Fill the kernels' inputs from the batch's page table and lengths: two launches, captured in the graph."""
        kv_lens = geometry.seq_lens
        lengths = CallLengths(self.qo_indptr, self.kv_indptr, kv_lens)
        fill_indices(geometry.page_table, lengths, geometry.page_size, self.kv_indices, self.slots)
        if geometry.slots is not None:
            self.slots.copy_(geometry.slots)
        fill_work_list(self.work_list, self.batch, kv_lens)


class MLAGraphMemory:
    """Static buffers of one lane, shared by all captured shapes because a lane's graphs run one after the other."""

    def __init__(self, limits: GraphLimits, device: torch.device) -> None:
        self.pages = limits.pages
        self._kv_indices = torch.zeros(limits.max_bs * limits.pages, dtype=torch.int32, device=device)
        self._slots = torch.full((limits.max_num_tokens,), -1, dtype=torch.int64, device=device)
        self._device = device

    def capture(self, geometry: Geometry, kernels: MLAKernelFactory, heads: int) -> CapturedMLABatch:
        """Create and plan the kernel of a new batch shape."""
        requests, rows, decode = geometry.requests, geometry.rows, geometry.mode.is_decode
        shape = UniformMLABatch(requests, rows // requests, heads, not decode, self.pages)
        lengths = self._lengths(shape, geometry.page_size)
        reserved = CallLengths(*(p.to(self._device) for p in (lengths.qo_indptr, lengths.kv_indptr, lengths.kv_lens)))
        kernel = kernels.paged(decode=decode, graph=MLAGraphBuffers(reserved, self._kv_indices))
        kv_indices = self._kv_indices[: int(lengths.kv_indptr[-1])]
        kernel.plan(
            MLAPagedCall(slice(0, rows), heads, not decode, lengths, kv_indices, geometry.page_table, reserved.kv_lens)
        )
        work_list = kernel.work_list()
        self._check_work_list(work_list, shape, lengths)
        return CapturedMLABatch(
            kernel=kernel,
            batch=shape,
            work_list=work_list,
            qo_indptr=lengths.qo_indptr.to(self._device),
            kv_indptr=torch.arange(requests + 1, dtype=torch.int32, device=self._device) * self.pages,
            kv_indices=self._kv_indices,
            slots=self._slots[:rows],
        )

    def _lengths(self, shape: UniformMLABatch, page_size: int) -> CallLengths:
        """Return dummy lengths for the one call of FlashInfer's planner, which compiles kernels and places its arrays.

        They are short and all different, so that the check of the layout can distinguish requests.
        """
        most = self.pages * page_size
        kv_lens = (shape.queries + torch.arange(shape.requests, dtype=torch.int32) % 128).clamp(max=most)
        pages = (kv_lens + page_size - 1) // page_size
        return CallLengths(
            torch.arange(shape.requests + 1, dtype=torch.int32) * shape.queries,
            torch.cat([pages.new_zeros(1), pages.cumsum(0, dtype=torch.int32)]),
            kv_lens,
        )

    def _check_work_list(self, work_list: MLAWorkList, shape: UniformMLABatch, lengths: CallLengths) -> None:
        works = shape.requests * shape.tiles(work_list) + work_list.clusters
        if works > MAX_WORK_ITEMS:
            raise PlanError(
                f"a batch of {shape.requests} requests takes up to {works} work items, but flashinfer supports at most "
                f"{MAX_WORK_ITEMS}; capture smaller batches"
            )
        problem = work_list_problem(work_list, shape, lengths.kv_lens.tolist(), lengths.kv_indptr.tolist())
        if problem:
            raise BackendError(
                f"the installed flashinfer uses an unknown work list layout: {problem}; run without CUDA graphs"
            )
