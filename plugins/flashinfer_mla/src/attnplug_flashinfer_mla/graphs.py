"""Memory and planning of captured batches: everything that a graph holds the address of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import BackendError, Geometry, GraphLimits, PlanError
from attnplug_flashinfer_mla.filling import fill_indices, fill_schedule
from attnplug_flashinfer_mla.kernels import GraphBuffers, Kernels, PagedKernel
from attnplug_flashinfer_mla.lengths import Lengths
from attnplug_flashinfer_mla.planner import PagedCall
from attnplug_flashinfer_mla.schedule import MOST_WORKS, Schedule, UniformBatch, schedule_problem


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """One captured shape of batch.

    Request i's pages start at ``i * pages`` of the index buffer, used or not, so their place never changes. Everything
    that does change is made inside the graph, from the page table and the lengths that the batch has then.
    """

    kernel: PagedKernel
    batch: UniformBatch
    schedule: Schedule
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    slots: Tensor

    def fill(self, geometry: Geometry) -> None:
        """What the captured kernels read; two launches, which the graph holds too."""
        kv_lens = geometry.seq_lens
        lengths = Lengths(self.qo_indptr, self.kv_indptr, kv_lens)
        fill_indices(geometry.page_table, lengths, geometry.page_size, self.kv_indices, self.slots)
        if geometry.slots is not None:
            self.slots.copy_(geometry.slots)
        fill_schedule(self.schedule, self.batch, kv_lens)


class GraphMemory:
    """Buffers of one lane, sized once and shared by every captured shape: a lane's graphs run one after the other."""

    def __init__(self, limits: GraphLimits, device: torch.device) -> None:
        self.pages = limits.pages
        self._kv_indices = torch.zeros(limits.max_bs * limits.pages, dtype=torch.int32, device=device)
        self._slots = torch.full((limits.max_num_tokens,), -1, dtype=torch.int64, device=device)
        self._device = device

    def capture(self, geometry: Geometry, kernels: Kernels, heads: int) -> Captured:
        """Make and plan the kernel of a shape that was not captured before."""
        requests, rows, decode = geometry.requests, geometry.rows, geometry.mode.is_decode
        shape = UniformBatch(requests, rows // requests, heads, not decode, self.pages)
        lengths = self._lengths(shape, geometry.page_size)
        reserved = Lengths(*(p.to(self._device) for p in (lengths.qo_indptr, lengths.kv_indptr, lengths.kv_lens)))
        kernel = kernels.paged(decode=decode, graph=GraphBuffers(reserved, self._kv_indices))
        kv_indices = self._kv_indices[: int(lengths.kv_indptr[-1])]
        kernel.plan(
            PagedCall(slice(0, rows), heads, not decode, lengths, kv_indices, geometry.page_table, reserved.kv_lens)
        )
        schedule = kernel.schedule()
        self._check_schedule(schedule, shape, lengths)
        return Captured(
            kernel=kernel,
            batch=shape,
            schedule=schedule,
            qo_indptr=lengths.qo_indptr.to(self._device),
            kv_indptr=torch.arange(requests + 1, dtype=torch.int32, device=self._device) * self.pages,
            kv_indices=self._kv_indices,
            slots=self._slots[:rows],
        )

    def _lengths(self, shape: UniformBatch, page_size: int) -> Lengths:
        """Lengths with which the library plans a shape, once: it compiles its kernels and says where its arrays are.

        The real lengths are not known yet. These are short and all different, so that the arrays can be told apart.
        """
        most = self.pages * page_size
        kv_lens = (shape.queries + torch.arange(shape.requests, dtype=torch.int32) % 128).clamp(max=most)
        pages = (kv_lens + page_size - 1) // page_size
        return Lengths(
            torch.arange(shape.requests + 1, dtype=torch.int32) * shape.queries,
            torch.cat([pages.new_zeros(1), pages.cumsum(0, dtype=torch.int32)]),
            kv_lens,
        )

    def _check_schedule(self, schedule: Schedule, shape: UniformBatch, lengths: Lengths) -> None:
        works = shape.requests * shape.tiles(schedule) + schedule.clusters
        if works > MOST_WORKS:
            raise PlanError(
                f"a batch of {shape.requests} requests takes up to {works} work items, and flashinfer has room for "
                f"{MOST_WORKS}; capture smaller batches"
            )
        problem = schedule_problem(schedule, shape, lengths.kv_lens.tolist(), lengths.kv_indptr.tolist())
        if problem:
            raise BackendError(
                f"the installed flashinfer lays out its plans in a way that this plugin does not know: {problem}; "
                "run without CUDA graphs"
            )
