"""Lengths and pages of a batch as a neutral value: what every planner starts from.

It is not the batch and knows no pool, so a bridge can build it from another engine's metadata and drive the same
planner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import le
from typing import Never

import numpy as np
import torch
from torch import Tensor

from attnplug.contract.batch import ForwardBatch
from attnplug.contract.plan import ForwardMode
from attnplug.declare.errors import PlanError
from attnplug.machine.transfer import to_device


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
        decode = batch.forward_mode is ForwardMode.DECODE
        query_lens: list[int] = [1] * batch.batch_size if decode else batch.query_lens_cpu().tolist()
        kv_lens: list[int] = batch.kv_lens_cpu().tolist()
        geometry = cls(batch.forward_mode, query_lens, kv_lens, batch.page_table, page_size)
        geometry._check(batch.batch_size, batch.num_tokens)
        return geometry

    @property
    def query_rows(self) -> int:
        return sum(self.query_lens)

    @property
    def kv_rows(self) -> int:
        return sum(self.kv_lens)

    def _check(self, requests: int, rows: int) -> None:
        tables, pages = self.page_table.shape
        if not len(self.query_lens) == len(self.kv_lens) == tables == requests:
            raise PlanError(
                f"the batch has {requests} requests, but {len(self.query_lens)} query lengths, "
                f"{len(self.kv_lens)} CPU lengths and {tables} rows in its page table"
            )
        if rows < self.query_rows:
            raise PlanError(f"the batch has {rows} input rows for {self.query_rows} new tokens")
        if min(self.query_lens, default=0) < 0 or not all(map(le, self.query_lens, self.kv_lens)):
            self._refuse_lengths()
        longest = max(self.kv_lens, default=0)
        if longest > pages * self.page_size:
            raise PlanError(
                f"request {self.kv_lens.index(longest)} has {longest} rows, but the page table holds "
                f"{pages} pages of {self.page_size}, {pages * self.page_size} rows"
            )

    def _refuse_lengths(self) -> Never:
        lens = enumerate(zip(self.query_lens, self.kv_lens, strict=True))
        request, new, total = next((number, *pair) for number, pair in lens if not 0 <= pair[0] <= pair[1])
        raise PlanError(
            f"request {request} has {new} new tokens but only {total} rows in all; seq_lens counts the new tokens too"
        )

    def span_slots(self, requests: Sequence[int], starts: Sequence[int], lens: Sequence[int]) -> Tensor:
        """``[rows]`` int64: the cache slots (``page * page_size + offset``) of spans of requests, one behind the other.

        Span i is the rows ``starts[i] … starts[i] + lens[i] - 1`` of ``requests[i]``.
        """
        if not sum(lens):
            return torch.empty(0, dtype=torch.int64, device=self.page_table.device)
        owner, positions = spread(starts, lens, self.page_table.device)
        pages = self.page_table[to_device(requests, self.page_table.device)[owner], positions // self.page_size]
        return pages.long() * self.page_size + positions % self.page_size

    def new_slots(self) -> Tensor:
        """``[query_rows]`` int64: the cache slot of each new token's row. A request's new rows are its last ones."""
        starts = [total - new for new, total in zip(self.query_lens, self.kv_lens, strict=True)]
        return self.span_slots(range(len(starts)), starts, self.query_lens)

    def cache_slots(self, requests: Sequence[int]) -> Tensor:
        """``[requests, longest]`` int64: the slots of all cache rows of some requests, one request a row.

        A shorter request is padded by repeating its own last slot, so that padding never touches other memory.
        """
        table, lens = self.page_table, [self.kv_lens[request] for request in requests]
        if list(requests) != list(range(table.shape[0])):
            table = table.index_select(0, to_device(requests, table.device))
        return (_host_slots if table.is_cpu else _device_slots)(table, lens, self.page_size)


def spread(starts: Sequence[int], lens: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """The numbers ``starts[i] … starts[i] + lens[i] - 1`` of all spans, one behind the other, and whose each is.

    Made on the device from a few numbers a span: a copy of one number a row would wait for it.
    """
    rows = sum(lens)
    first, counts = to_device([starts, lens], device).unbind()
    owner = torch.repeat_interleave(counts, output_size=rows)
    shifts = first - (counts.cumsum(0) - counts)
    return owner, torch.arange(rows, device=device) + shifts[owner]


# A slot is its position and a shift that is the same all over a page. Behind a request's last row both stay what they
# are there. So divisions by the page size are for pages, not for rows.


def _device_slots(table: Tensor, lens: Sequence[int], page_size: int) -> Tensor:
    device, longest = table.device, max(lens)
    requests = torch.arange(len(lens), device=device).unsqueeze(1)
    pages, last = torch.arange(table.shape[1], device=device), to_device(lens, device).unsqueeze(1) - 1
    shifts = ((table - pages) * page_size)[requests, torch.minimum(pages, last // page_size)]
    positions = torch.minimum(torch.arange(longest, device=device), last)
    return shifts.unsqueeze(-1).expand(-1, -1, page_size).flatten(1)[:, :longest] + positions


def _host_slots(table: Tensor, lens: Sequence[int], page_size: int) -> Tensor:
    """The same with numpy, whose small operations cost a third of torch's; still half of a decode step's plan."""
    longest = max(lens)
    requests = np.arange(len(lens))[:, None]
    pages, last = np.arange(table.shape[1]), np.array(lens)[:, None] - 1
    shifts = ((table.numpy() - pages) * page_size)[requests, np.minimum(pages, last // page_size)]
    positions = np.minimum(np.arange(longest), last)
    return torch.from_numpy(shifts.repeat(page_size, 1)[:, :longest] + positions)
