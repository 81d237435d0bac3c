"""Lengths and page tables → a call of a kernel that reads page tables itself. Runs on any device."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from attnplug import Geometry
from attnplug.kernels import on_host, split_table
from attnplug_flashinfer_mla.filling import fill_indices
from attnplug_flashinfer_mla.lengths import Lengths

_TILE = 128
"""Keys that a kernel takes at a time: a row of a page table holds whole tiles."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodeCall:
    """A call in which every request has ``queries`` rows of q. The last of them sees all cache rows of the request.

    ``tables`` ``[requests, width]`` int32 and ``lens`` ``[requests]`` int32 are on the device. A row of a table holds
    whole tiles of 128 keys. Entries after a request's last page are valid page numbers: they may be fetched, but are
    never used. No length is below ``queries``. ``longest`` is the largest length, or more.
    """

    queries: int
    tables: Tensor
    lens: Tensor
    longest: int

    @property
    def requests(self) -> int:
        return self.lens.shape[0]

    def part(self, requests: slice) -> DecodeCall:
        """The same for some of the requests."""
        return DecodeCall(self.queries, self.tables[requests], self.lens[requests], self.longest)


def table_width(rows: int, page_size: int) -> int:
    """Pages for this many rows, in whole tiles; at least one tile."""
    return max(-(-rows // _TILE), 1) * (_TILE // page_size)


def uniform_queries(geometry: Geometry) -> int | None:
    """How many new rows every request has; ``None`` if they differ, or have none."""
    lens = set(geometry.query_lens)
    return lens.pop() or None if len(lens) == 1 else None


def plan_requests(geometry: Geometry, queries: int, page_size: int) -> tuple[DecodeCall, Tensor]:
    """The call of a batch whose requests all have ``queries`` new rows, and ``[rows]`` where these are written."""
    tables, lengths, slots = _tables(geometry, page_size)
    return DecodeCall(queries, tables, lengths.kv_lens, max(geometry.kv_lens)), slots


def plan_rows(geometry: Geometry, page_size: int) -> tuple[DecodeCall, Tensor]:
    """The same for any batch: every new row is a request of its own, which ends with that row."""
    tables, lengths, slots = _tables(geometry, page_size)
    new, rows = lengths.qo_indptr.diff(), geometry.rows
    owner = torch.repeat_interleave(new, output_size=rows)
    place = torch.arange(rows, dtype=torch.int32, device=owner.device) - lengths.qo_indptr[owner]
    lens = (lengths.kv_lens - new)[owner] + place + 1
    return DecodeCall(1, tables[owner], lens, max(geometry.kv_lens)), slots


def _tables(geometry: Geometry, page_size: int) -> tuple[Tensor, Lengths, Tensor]:
    """Tables in kernel pages, lengths on the device, and write slots. Nothing is copied from the device."""
    device, requests = geometry.device, geometry.requests
    width = table_width(max(geometry.kv_lens), page_size)
    starts = range(0, (requests + 1) * width, width)
    numbers = on_host((*accumulate(geometry.query_lens, initial=0), *starts, *geometry.kv_lens), device, np.int32)
    lengths = Lengths.of(numbers.to(device, non_blocking=True))  # one copy for the three
    tables = torch.zeros(requests, width, dtype=torch.int32, device=device)
    slots = torch.empty(geometry.rows, dtype=torch.int64, device=device)
    fill_indices(kernel_table(geometry, page_size), lengths, page_size, tables.view(-1), slots)
    return tables, lengths, slots if geometry.slots is None else geometry.slots


def kernel_table(geometry: Geometry, kernel_page: int) -> Tensor:
    """A batch's page table in the kernel's pages, which divide the manager's."""
    table, page_size = geometry.page_table, geometry.page_size
    return table if page_size == kernel_page else split_table(table, page_size // kernel_page)
