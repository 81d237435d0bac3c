"""Planner: lengths and page tables → calls of kernels that read page tables directly. Runs on any device."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from attnplug import Geometry
from attnplug.kernels import on_host, split_table
from attnplug_flashinfer_mla.device_planner import fill_indices
from attnplug_flashinfer_mla.lengths import CallLengths

_TILE = 128
"""Keys per kernel tile. A row of a block table covers whole tiles."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodeCall:
    """A call in which every request has ``queries`` rows of q. The last of them sees all cache rows of the request.

    ``block_tables`` ``[requests, width]`` int32 and ``seq_lens`` ``[requests]`` int32 are on the device. A row of the
    table covers whole tiles of 128 keys. Entries behind a request's last page are valid page numbers: kernels may fetch
    these pages, but do not use them. ``seq_lens`` are at least ``queries``. ``max_seq_len`` is an upper bound of them.
    """

    queries: int
    block_tables: Tensor
    seq_lens: Tensor
    max_seq_len: int

    @property
    def requests(self) -> int:
        return self.seq_lens.shape[0]

    def select(self, requests: slice) -> DecodeCall:
        """Return the call for a slice of the requests."""
        return DecodeCall(self.queries, self.block_tables[requests], self.seq_lens[requests], self.max_seq_len)


def table_width(rows: int, page_size: int) -> int:
    """Return the number of pages for ``rows`` rows, rounded up to whole tiles; at least one tile."""
    return max(-(-rows // _TILE), 1) * (_TILE // page_size)


def uniform_queries(geometry: Geometry) -> int | None:
    """Return the number of new rows per request; ``None`` if requests differ or have none."""
    lens = set(geometry.query_lens)
    return lens.pop() or None if len(lens) == 1 else None


def plan_requests(geometry: Geometry, queries: int, page_size: int) -> tuple[DecodeCall, Tensor]:
    """Plan a batch with ``queries`` new rows per request. Returns the call and the write slots ``[rows]`` int64."""
    tables, lengths, slots = _tables(geometry, page_size)
    return DecodeCall(queries, tables, lengths.kv_lens, max(geometry.kv_lens)), slots


def plan_rows(geometry: Geometry, page_size: int) -> tuple[DecodeCall, Tensor]:
    """Plan any batch, with every new row as a request of its own that ends with that row. Returns as above."""
    tables, lengths, slots = _tables(geometry, page_size)
    new, rows = lengths.qo_indptr.diff(), geometry.rows
    owner = torch.repeat_interleave(new, output_size=rows)
    place = torch.arange(rows, dtype=torch.int32, device=owner.device) - lengths.qo_indptr[owner]
    lens = (lengths.kv_lens - new)[owner] + place + 1
    return DecodeCall(1, tables[owner], lens, max(geometry.kv_lens)), slots


def _tables(geometry: Geometry, page_size: int) -> tuple[Tensor, CallLengths, Tensor]:
    """Return block tables in kernel pages, device lengths and write slots. Copies nothing from the device."""
    device, requests = geometry.device, geometry.requests
    width = table_width(max(geometry.kv_lens), page_size)
    starts = range(0, (requests + 1) * width, width)
    numbers = on_host((*accumulate(geometry.query_lens, initial=0), *starts, *geometry.kv_lens), device, np.int32)
    lengths = CallLengths.of(numbers.to(device, non_blocking=True))  # one copy for all three arrays
    tables = torch.zeros(requests, width, dtype=torch.int32, device=device)
    slots = torch.empty(geometry.rows, dtype=torch.int64, device=device)
    fill_indices(kernel_table(geometry, page_size), lengths, page_size, tables.view(-1), slots)
    return tables, lengths, slots if geometry.slots is None else geometry.slots


def kernel_table(geometry: Geometry, kernel_page: int) -> Tensor:
    """Return the batch's page table in kernel pages, whose size divides the batch's page size."""
    table, page_size = geometry.page_table, geometry.page_size
    return table if page_size == kernel_page else split_table(table, page_size // kernel_page)
