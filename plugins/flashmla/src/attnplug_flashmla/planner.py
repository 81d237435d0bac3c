"""Planner: page table and lengths → kernel pages, lengths and write slots. One kernel on CUDA."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug.kernels import split_table
from attnplug_flashmla.plugin import PAGE


@dataclass(frozen=True, slots=True, eq=False)
class DecodePages:
    """Static buffers of a batch with ``queries`` new tokens per request.

    ``kv_lens`` is ``[requests]`` int32, ``table`` ``[requests, width]`` int32 in pages of 64, and ``slots``
    ``[requests * queries]`` int64 the write slots of the new rows, -1 for none.
    """

    queries: int
    kv_lens: Tensor
    table: Tensor
    slots: Tensor

    @classmethod
    def reserve(cls, requests: int, rows: int, width: int, device: torch.device) -> DecodePages:
        """Allocate for up to ``requests`` requests with ``rows`` new rows in total; ``part`` returns a smaller view."""
        return cls(
            1,
            torch.empty(requests, dtype=torch.int32, device=device),
            torch.empty(requests, width, dtype=torch.int32, device=device),
            torch.empty(rows, dtype=torch.int64, device=device),
        )

    def part(self, requests: int, queries: int) -> DecodePages:
        """Return a view of the same memory for a smaller batch."""
        return DecodePages(queries, self.kv_lens[:requests], self.table[:requests], self.slots[: requests * queries])

    def fill(self, page_table: Tensor, seq_lens: Tensor, page_size: int) -> None:
        """Fill from ``page_table`` ``[requests, pages]``, in pages of ``page_size`` (a multiple of 64), and lengths.

        A request's new rows are its last ones. The slot is -1 for a position before the request's first row or beyond
        the table's last column, which a device length may exceed. Entries behind a request's last page are not read.
        Does not synchronize and can be captured.
        """
        if page_table.stride(1) != 1:
            page_table = page_table.contiguous()
        if page_table.device.type == "cuda":
            from attnplug_flashmla.triton_kernels import launch_fill_pages

            launch_fill_pages(page_table, seq_lens, page_size, self.queries, self.kv_lens, self.table, self.slots)
            return
        width = page_table.shape[1]
        lens = seq_lens.long().clamp(max=width * page_size)
        self.kv_lens.copy_(lens)
        table = split_table(page_table, page_size // PAGE)
        used = torch.arange(table.shape[1]) < (lens.unsqueeze(1) + PAGE - 1) // PAGE
        self.table[:, : table.shape[1]] = torch.where(used, table, 0)
        position = (seq_lens.long().unsqueeze(1) - self.queries) + torch.arange(self.queries)
        exists = (position >= 0) & (position < width * page_size)
        page = page_table.long().gather(1, torch.where(exists, position // page_size, 0))
        self.slots.copy_(torch.where(exists, page * page_size + position % page_size, -1).flatten())
