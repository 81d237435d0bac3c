"""Memory and planning of captured batches: everything that a graph holds the address of."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnplug import BackendError, ForwardBatch, Plan, PlanError
from attnplug_flashinfer_mla.indices import Lengths, fill_indices
from attnplug_flashinfer_mla.kernels import GraphBuffers, Kernels, PagedKernel
from attnplug_flashinfer_mla.planner import PagedCall
from attnplug_flashinfer_mla.schedule import MOST_WORKS, Schedule, UniformBatch, fill_schedule, schedule_problem


@dataclass(slots=True, eq=False)
class Captured:
    """One captured shape of batch.

    Request i's pages lie at ``i * pages`` of the index buffer, used or not, so that where they begin never changes:
    all that does is made inside the graph, from the page table and the lengths that the batch has then.
    """

    kernel: PagedKernel
    batch: UniformBatch
    schedule: Schedule
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    slots: Tensor
    plan: Plan = field(init=False)

    def fill(self, page_table: Tensor, kv_lens: Tensor, page_size: int) -> None:
        """What the captured kernels read; two launches, which the graph holds too."""
        fill_indices(
            page_table, Lengths(self.qo_indptr, self.kv_indptr, kv_lens), page_size, self.kv_indices, self.slots
        )
        fill_schedule(self.schedule, self.batch, kv_lens)


class GraphMemory:
    """Buffers sized once, shared by every captured shape: graphs run one after the other."""

    def __init__(self, max_bs: int, max_num_tokens: int, pages: int, device: torch.device) -> None:
        self.pages = pages
        self._kv_indices = torch.zeros(max_bs * pages, dtype=torch.int32, device=device)
        self._slots = torch.full((max_num_tokens,), -1, dtype=torch.int64, device=device)
        self._device = device

    def capture(self, batch: ForwardBatch, kernels: Kernels, heads: int, page_size: int) -> Captured:
        """Make and plan the kernel of a shape that was not captured before."""
        requests, tokens = batch.batch_size, batch.num_tokens
        decode = batch.forward_mode.is_decode
        shape = UniformBatch(requests, tokens // requests, heads, not decode, self.pages)
        kv_lens = batch.kv_lens_cpu().int()
        pages = (kv_lens + page_size - 1) // page_size
        # The library plans once, over pages without gaps: it compiles, and says where its arrays lie.
        lengths = Lengths(
            torch.arange(0, tokens + 1, shape.queries, dtype=torch.int32),
            torch.cat([pages.new_zeros(1), pages.cumsum(0, dtype=torch.int32)]),
            kv_lens,
        )
        reserved = Lengths(*(part.to(self._device) for part in (lengths.qo_indptr, lengths.kv_indptr, kv_lens)))
        kernel = kernels.paged(decode=decode, graph=GraphBuffers(reserved, self._kv_indices))
        kv_indices = self._kv_indices[: int(lengths.kv_indptr[-1])]
        kernel.plan(
            PagedCall(slice(0, tokens), heads, not decode, lengths, kv_indices, batch.page_table, reserved.kv_lens)
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
            slots=self._slots[:tokens],
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
