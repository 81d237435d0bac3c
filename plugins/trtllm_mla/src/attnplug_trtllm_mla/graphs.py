"""Memory and planning of captured batches: everything that a graph holds the address of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import Geometry, GraphLimits
from attnplug_flashinfer_mla.filling import fill_indices
from attnplug_flashinfer_mla.lengths import Lengths
from attnplug_trtllm_mla.planner import DecodeCall, kernel_table, table_width


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """One captured shape of batch. ``slots`` ``[rows]`` int64 is -1, and ``dead`` ``[rows]`` true, for padding."""

    call: DecodeCall
    qo_indptr: Tensor
    kv_indptr: Tensor
    slots: Tensor
    dead: Tensor

    def fill(self, geometry: Geometry, kernel_page: int) -> None:
        """What captured kernels read, from the page table and lengths that the batch has when the graph runs.

        A padded request has no rows, which the kernels do not support. So it gets as many keys as queries, from
        whatever pages its row of the table names, and its output is cleared.
        """
        seq_lens = geometry.seq_lens
        lengths = Lengths(self.qo_indptr, self.kv_indptr, seq_lens)
        pages = kernel_table(geometry, kernel_page)
        fill_indices(pages, lengths, kernel_page, self.call.tables.view(-1), self.slots)
        torch.clamp(seq_lens, min=self.call.queries, out=self.call.lens)
        torch.lt(self.slots, 0, out=self.dead)
        if geometry.slots is not None:
            self.slots.copy_(geometry.slots)


class GraphMemory:
    """Buffers of one lane, sized once and shared by every captured shape: a lane's graphs run one after the other."""

    def __init__(self, limits: GraphLimits, max_context: int, kernel_page: int, device: torch.device) -> None:
        self._longest, self._width = max_context, table_width(max_context, kernel_page)
        self._tables = torch.zeros(limits.max_bs, self._width, dtype=torch.int32, device=device)
        self._lens = torch.ones(limits.max_bs, dtype=torch.int32, device=device)
        self._slots = torch.full((limits.max_num_tokens,), -1, dtype=torch.int64, device=device)
        self._dead = torch.ones(limits.max_num_tokens, dtype=torch.bool, device=device)

    def capture(self, geometry: Geometry) -> Captured:
        """Lay out a shape that was not captured before, without looking at its lengths: they change."""
        requests, rows = geometry.requests, geometry.rows
        queries = rows // requests
        each = torch.arange(requests + 1, dtype=torch.int32, device=self._lens.device)
        return Captured(
            call=DecodeCall(queries, self._tables[:requests], self._lens[:requests], self._longest),
            qo_indptr=each * queries,
            kv_indptr=each * self._width,
            slots=self._slots[:rows],
            dead=self._dead[:rows],
        )
