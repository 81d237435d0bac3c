"""Lengths and pages of a batch as a neutral value: what every planner starts from.

It is not the batch and knows no pool, so a bridge can build it from another engine's metadata and drive the same
planner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attnplug.batch import ForwardBatch
from attnplug.errors import PlanError
from attnplug.plan import ForwardMode


@dataclass(frozen=True, eq=False)
class Geometry:
    """How many rows each request has, and where its cache rows lie.

    ``query_lens`` and ``kv_lens`` are on the host, one per request; ``page_table`` is ``[requests, pages]`` on the
    device that will read the cache. New tokens are the last ``query_lens`` rows of a request's ``kv_lens``.
    """

    mode: ForwardMode
    query_lens: Sequence[int]
    kv_lens: Sequence[int]
    page_table: Tensor
    page_size: int

    @classmethod
    def of(cls, batch: ForwardBatch, page_size: int) -> Geometry:
        """The geometry of a batch, checked. Copies nothing from the device where the batch has its CPU lengths."""
        query_lens: list[int] = batch.query_lens_cpu().tolist()
        kv_lens: list[int] = batch.kv_lens_cpu().tolist()
        geometry = cls(batch.forward_mode, query_lens, kv_lens, batch.page_table, page_size)
        geometry._check(batch.batch_size, batch.num_tokens)
        return geometry

    @cached_property
    def query_rows(self) -> int:
        return sum(self.query_lens)

    @cached_property
    def kv_rows(self) -> int:
        return sum(self.kv_lens)

    def _check(self, requests: int, rows: int) -> None:
        if not len(self.query_lens) == len(self.kv_lens) == self.page_table.shape[0] == requests:
            raise PlanError(
                f"the batch has {requests} requests, but {len(self.query_lens)} query lengths, "
                f"{len(self.kv_lens)} CPU lengths and {self.page_table.shape[0]} rows in its page table"
            )
        if rows < self.query_rows:
            raise PlanError(f"the batch has {rows} input rows for {self.query_rows} new tokens")
        for request, (new, total) in enumerate(zip(self.query_lens, self.kv_lens, strict=True)):
            if not 0 <= new <= total:
                raise PlanError(
                    f"request {request} has {new} new tokens but only {total} rows in all; "
                    "seq_lens counts the new tokens too"
                )
        capacity, longest = self.page_table.shape[1] * self.page_size, max(self.kv_lens, default=0)
        if longest > capacity:
            raise PlanError(
                f"request {self.kv_lens.index(longest)} has {longest} rows, but the page table holds "
                f"{self.page_table.shape[1]} pages of {self.page_size}, {capacity} rows"
            )

    def slots(self, requests: Tensor, positions: Tensor) -> Tensor:
        """``[rows]`` int64: the cache slots (``page * page_size + offset``) of rows of requests, given on the CPU."""
        device = self.page_table.device
        requests, positions = requests.to(device, non_blocking=True), positions.to(device, non_blocking=True)
        pages = self.page_table[requests, positions // self.page_size]
        return pages.long() * self.page_size + positions % self.page_size

    def new_slots(self) -> Tensor:
        """``[query_rows]`` int64: the cache slot of each new token's row."""
        lens = torch.tensor([self.query_lens, self.kv_lens], dtype=torch.int64)
        requests = torch.arange(len(self.query_lens))
        ends = lens[1]
        if self.mode is not ForwardMode.DECODE:
            requests = torch.repeat_interleave(requests, lens[0], output_size=self.query_rows)
            # A request's last new row is its last row of all: count back from there.
            ends = (lens[1] - lens[0].cumsum(0))[requests] + torch.arange(1, self.query_rows + 1)
        return self.slots(requests, ends - 1)

    def cache_slots(self, requests: Sequence[int]) -> Tensor:
        """``[requests, longest]`` int64: the slots of all cache rows of some requests, one request a row.

        A shorter request is padded by repeating its own last slot, so that padding never touches other memory.
        """
        lens = [self.kv_lens[request] for request in requests]
        longest = max(lens)
        table, device = self.page_table, self.page_table.device
        if len(requests) != table.shape[0] or list(requests) != list(range(table.shape[0])):
            table = table[torch.tensor(requests).to(device, non_blocking=True)]
        # Divisions only along one request: the table is as long for all, and what it holds behind a request's last
        # page is replaced below.
        positions = torch.arange(longest, device=device)
        pages = table.index_select(1, positions // self.page_size)
        slots = torch.add(positions % self.page_size, pages, alpha=self.page_size)
        if min(lens) == longest:
            return slots
        ends = torch.tensor(lens).to(device, non_blocking=True).unsqueeze(1)
        return torch.where(positions < ends, slots, slots.gather(1, ends - 1))
