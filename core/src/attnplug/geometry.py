"""Lengths and pages of a batch as a neutral value: what every planner starts from.

It is not the batch and knows no pool, so a bridge can build it from another engine's metadata and drive the same
planner.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug.batch import ForwardBatch
from attnplug.errors import PlanError
from attnplug.plan import ForwardMode


@dataclass(frozen=True, slots=True, eq=False)
class Geometry:
    """How many rows each request has, and where its cache rows lie.

    ``query_lens`` and ``kv_lens`` are ``[requests]`` int64 on the CPU; ``page_table`` is ``[requests, pages]`` on the
    device that will read the cache. New tokens are the last ``query_lens`` rows of a request's ``kv_lens``.
    """

    mode: ForwardMode
    query_lens: Tensor
    kv_lens: Tensor
    page_table: Tensor
    page_size: int

    @classmethod
    def of(cls, batch: ForwardBatch, page_size: int) -> Geometry:
        """The geometry of a batch, checked. Copies nothing from the device where the batch has its CPU lengths."""
        query_lens, kv_lens = batch.query_lens_cpu().long(), batch.kv_lens_cpu().long()
        requests = batch.batch_size
        if not query_lens.shape[0] == kv_lens.shape[0] == batch.page_table.shape[0] == requests:
            raise PlanError(
                f"the batch has {requests} requests, but {query_lens.shape[0]} query lengths, "
                f"{kv_lens.shape[0]} CPU lengths and {batch.page_table.shape[0]} rows in its page table"
            )
        geometry = cls(batch.forward_mode, query_lens, kv_lens, batch.page_table, page_size)
        if requests:
            geometry._check(batch.num_tokens)
        return geometry

    @property
    def query_rows(self) -> int:
        return int(self.query_lens.sum())

    @property
    def kv_rows(self) -> int:
        return int(self.kv_lens.sum())

    def _check(self, rows: int) -> None:
        if rows < self.query_rows:
            raise PlanError(f"the batch has {rows} input rows for {self.query_rows} new tokens")
        bad = torch.nonzero((self.query_lens < 0) | (self.query_lens > self.kv_lens)).flatten()
        if bad.numel():
            request = int(bad[0])
            raise PlanError(
                f"request {request} has {int(self.query_lens[request])} new tokens but only "
                f"{int(self.kv_lens[request])} rows in all; seq_lens counts the new tokens too"
            )
        capacity, longest = self.page_table.shape[1] * self.page_size, int(self.kv_lens.max())
        if longest > capacity:
            raise PlanError(
                f"request {int(self.kv_lens.argmax())} has {longest} rows, but the page table holds "
                f"{self.page_table.shape[1]} pages of {self.page_size}, {capacity} rows"
            )

    def slots(self, requests: Tensor, positions: Tensor) -> Tensor:
        """Cache slots (``page * page_size + offset``, int64, on the table's device) of rows of requests.

        ``requests`` and ``positions`` are CPU index tensors of one shape, or shapes that broadcast.
        """
        device = self.page_table.device
        requests, positions = (t.to(device, non_blocking=True) for t in torch.broadcast_tensors(requests, positions))
        pages = self.page_table[requests, positions // self.page_size].long()
        return pages * self.page_size + positions % self.page_size

    def new_slots(self) -> Tensor:
        """``[query_rows]``: the slot into which each new token's row is written."""
        requests = torch.repeat_interleave(torch.arange(len(self.query_lens)), self.query_lens)
        first_row = self.query_lens.cumsum(0) - self.query_lens
        start = self.kv_lens - self.query_lens
        positions = torch.arange(len(requests)) - first_row[requests] + start[requests]
        return self.slots(requests, positions)
