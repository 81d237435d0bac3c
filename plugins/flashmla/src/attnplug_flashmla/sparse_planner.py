"""Page table and lengths → the request of each new token, what it sees, and where its row goes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import Geometry


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The new tokens of a batch, in memory that keeps its address.

    ``table`` ``[requests, pages]`` int32 is in pages of ``page_size``. Of each token, ``owner`` ``[rows]`` int32 is its
    request, ``visible`` ``[rows]`` int32 counts the cache rows that it sees, itself included, and ``slots`` ``[rows]``
    int64 says where its own row goes. Padding sees 0 rows, and its slot is -1. No token sees more than ``longest``.
    """

    table: Tensor
    owner: Tensor
    visible: Tensor
    slots: Tensor
    page_size: int
    longest: int

    @classmethod
    def reserve(cls, requests: int, rows: int, pages: int, page_size: int, device: torch.device) -> Tokens:
        """For up to this many requests and new rows in all; ``part`` cuts a batch out of it."""
        return cls(
            torch.zeros(requests, pages, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.full((rows,), -1, dtype=torch.int64, device=device),
            page_size,
            pages * page_size,
        )

    def part(self, geometry: Geometry) -> Tokens:
        """The same memory for a smaller batch."""
        rows, pages = geometry.rows, geometry.page_table.shape[1]
        return Tokens(
            self.table[: geometry.requests, :pages],
            self.owner[:rows],
            self.visible[:rows],
            self.slots[:rows],
            self.page_size,
            min(geometry.max_seq_len, pages * self.page_size),
        )

    def fill(self, geometry: Geometry) -> None:
        """Fill from the lengths on the device alone. Waits for nothing and can be captured."""
        row = torch.arange(len(self.owner), dtype=torch.int32, device=geometry.device)
        if geometry.new_lens is None:
            owner = row // geometry.max_new
            end = (owner + 1) * geometry.max_new
            exists = torch.ones_like(row, dtype=torch.bool)
        else:
            ends = geometry.new_lens.cumsum(0, dtype=torch.int32)
            owner = torch.searchsorted(ends, row, right=True, out_int32=True)
            exists = owner < geometry.requests
            owner = owner.clamp(max=geometry.requests - 1)
            end = ends[owner]
        position = geometry.seq_lens[owner] - end + row
        # Past the table's last column there is no page; a length on the device can ask for one.
        exists &= (position >= 0) & (position < self.table.shape[1] * self.page_size)
        position = torch.where(exists, position, 0)
        self.table.copy_(geometry.page_table)
        self.owner.copy_(owner)
        self.visible.copy_(torch.where(exists, position + 1, 0).clamp(max=self.longest))
        if geometry.slots is not None:
            self.slots.copy_(geometry.slots)
        else:
            page = self.table[owner, position // self.page_size].long()
            self.slots.copy_(torch.where(exists, page * self.page_size + position % self.page_size, -1))

    def rows(self, part: slice) -> Tokens:
        """Some of the tokens."""
        return Tokens(self.table, self.owner[part], self.visible[part], self.slots[part], self.page_size, self.longest)
