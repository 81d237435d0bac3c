"""Memory and planning of captured batches: everything that a graph holds the address of."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnplug import ForwardBatch, Plan
from attnplug_flashinfer_mla.indices import Lengths, fill_indices
from attnplug_trtllm_mla.planner import DecodeCall, kernel_table, table_width


@dataclass(slots=True, eq=False)
class Captured:
    """One captured shape of batch. ``slots`` ``[rows]`` int64 is -1, and ``dead`` ``[rows]`` true, for padding."""

    call: DecodeCall
    qo_indptr: Tensor
    kv_indptr: Tensor
    slots: Tensor
    dead: Tensor
    plan: Plan = field(init=False)

    def fill(self, page_table: Tensor, seq_lens: Tensor, page_sizes: tuple[int, int]) -> None:
        """What captured kernels read, from the page table and lengths that the batch has when the graph runs.

        A padded request has no rows, and the kernels know no such request: it is given as many keys as queries, of
        whatever pages its row of the table names, and its output is cleared.
        """
        manager_page, kernel_page = page_sizes
        lengths = Lengths(self.qo_indptr, self.kv_indptr, seq_lens)
        pages = kernel_table(page_table, manager_page, kernel_page)
        fill_indices(pages, lengths, kernel_page, self.call.tables.view(-1), self.slots)
        torch.clamp(seq_lens, min=self.call.queries, out=self.call.lens)
        torch.lt(self.slots, 0, out=self.dead)


class GraphMemory:
    """Buffers sized once, shared by every captured shape: graphs run one after the other."""

    def __init__(
        self, max_bs: int, max_num_tokens: int, max_context: int, page_sizes: tuple[int, int], device: torch.device
    ) -> None:
        self.page_sizes, self._longest = page_sizes, max_context
        self._width = table_width(max_context, page_sizes[1])
        self._tables = torch.zeros(max_bs, self._width, dtype=torch.int32, device=device)
        self._lens = torch.ones(max_bs, dtype=torch.int32, device=device)
        self._slots = torch.full((max_num_tokens,), -1, dtype=torch.int64, device=device)
        self._dead = torch.ones(max_num_tokens, dtype=torch.bool, device=device)

    def capture(self, batch: ForwardBatch) -> Captured:
        """Lay out a shape that was not captured before. Its lengths are not looked at: they change."""
        requests, tokens = batch.batch_size, batch.num_tokens
        queries, device = tokens // requests, self._lens.device
        each = torch.arange(requests + 1, dtype=torch.int32, device=device)
        return Captured(
            call=DecodeCall(queries, self._tables[:requests], self._lens[:requests], self._longest),
            qo_indptr=each * queries,
            kv_indptr=each * self._width,
            slots=self._slots[:tokens],
            dead=self._dead[:tokens],
        )
