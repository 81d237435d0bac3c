"""Memory and planning of captured batches: everything that a graph holds the address of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import BackendError, Geometry, GraphLimits
from attnplug_flashinfer.filling import fill_schedule
from attnplug_flashinfer.kernels import FlashInferCaptured, FlashInferKernels, GraphBuffers
from attnplug_flashinfer.schedule import PageCounts, Schedule, UniformBatch, schedule_problem
from attnplug_flashinfer.shapes import LayerShape
from attnplug_flashinfer_mla.filling import fill_indices
from attnplug_flashinfer_mla.lengths import Lengths


@dataclass(frozen=True, slots=True, eq=False)
class CapturedCall:
    """The call of one captured shape of batch in layers of one shape."""

    kernel: FlashInferCaptured
    batch: UniformBatch
    schedule: Schedule


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """One captured shape of batch. Everything that changes from replay to replay is made inside the graph, from the
    page table and the lengths that the batch has then."""

    calls: dict[LayerShape, CapturedCall]
    qo_indptr: Tensor
    buffers: GraphBuffers
    slots: Tensor

    def fill(self, geometry: Geometry) -> None:
        """What the captured kernels read, by one launch for each shape of layers and one more.

        The page indices come last: attention kernels may start early, and read lengths and work lists before they wait
        for the previous kernel. That must not be the kernel that fills them.
        """
        kv_lens, counts, width = geometry.seq_lens, self.buffers.counts, geometry.page_table.shape[1]
        for call in self.calls.values():
            fill_schedule(call.schedule, call.batch, kv_lens, width, counts)
        lengths = Lengths(self.qo_indptr, counts.kv_indptr, kv_lens)
        fill_indices(geometry.page_table, lengths, geometry.page_size, self.buffers.kv_indices, self.slots)
        if geometry.slots is not None:
            self.slots.copy_(geometry.slots)


class GraphMemory:
    """Buffers of one lane, sized once and shared by every captured shape: a lane's graphs run one after the other."""

    def __init__(self, limits: GraphLimits, device: torch.device) -> None:
        self._kv_indices = torch.zeros(limits.max_bs * limits.pages, dtype=torch.int32, device=device)
        self._slots = torch.full((limits.max_num_tokens,), -1, dtype=torch.int64, device=device)
        self._device = device

    def capture(self, geometry: Geometry, kernels: FlashInferKernels, shapes: Iterable[LayerShape]) -> Captured:
        """Make and plan the kernels of a shape that was not captured before."""
        requests, rows, device = geometry.requests, geometry.rows, self._device
        queries = rows // requests
        counts = PageCounts(
            torch.zeros(requests + 1, dtype=torch.int32, device=device),
            torch.zeros(requests, dtype=torch.int32, device=device),
        )
        buffers = GraphBuffers(counts, self._kv_indices)
        # The real lengths are not known yet. These are short and all different, so that the library's arrays can be
        # told apart.
        most = geometry.page_table.shape[1] * geometry.page_size
        kv_lens = (queries + torch.arange(requests, dtype=torch.int32) % 128).clamp(max=most)
        calls = {}
        for shape in shapes:
            batch = UniformBatch(requests, queries, shape.group, geometry.page_size, shape.window_left)
            kernel = kernels.captured(shape, batch, buffers)
            calls[shape] = CapturedCall(kernel, batch, _known(kernel.plan(kv_lens), batch, kv_lens))
        qo_indptr = torch.arange(requests + 1, dtype=torch.int32, device=device) * queries
        return Captured(calls, qo_indptr, buffers, self._slots[:rows])


def _known(schedule: Schedule | None, batch: UniformBatch, kv_lens: Tensor) -> Schedule:
    """The library's schedule, if it is laid out as we fill it."""
    problem = "it has other numbers" if schedule is None else schedule_problem(schedule, batch, kv_lens)
    if schedule is None or problem:
        raise BackendError(
            f"the installed flashinfer lays out its plans in a way that this plugin does not know: {problem}; run "
            "without CUDA graphs"
        )
    return schedule
