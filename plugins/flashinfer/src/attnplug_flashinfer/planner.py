"""Lengths and page tables → the call that FlashInfer's paged kernels are planned with. Runs on any device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attnplug import ForwardMode, Geometry
from attnplug.kernels import on_host
from attnplug_flashinfer_mla.lengths import Lengths
from attnplug_flashinfer_mla.planner import index_pages

_MANY_ROWS = 64


@dataclass(frozen=True, slots=True, eq=False)
class PagedCall:
    """One call over the paged cache, as it is planned; all of its requests have queries.

    ``lengths`` and ``last_page_lens`` ``[requests]`` int32 are on the host. ``kv_indices`` ``[pages]`` int32 is on the
    device and holds request i's pages from ``kv_indptr[i]`` on. ``long`` says that it is worth a kernel made for
    prefill, which does not divide a request's keys.
    """

    causal: bool
    long: bool
    lengths: Lengths
    last_page_lens: Tensor
    kv_indices: Tensor
    most_queries: int


def plan_paged(geometry: Geometry) -> tuple[PagedCall, Tensor]:
    """Plan a batch that has rows, by exact lengths on the host; with the slots of its new rows."""
    slots = torch.empty(geometry.rows, dtype=torch.int64, device=geometry.device)
    live = geometry.only([request for request, new in enumerate(geometry.query_lens) if new])
    size, kv_lens = geometry.page_size, live.kv_lens
    host, _, kv_indices = index_pages(live.page_table, live.query_lens, kv_lens, size, slots)
    call = PagedCall(
        causal=not geometry.mode.is_decode,
        long=geometry.mode is ForwardMode.EXTEND and geometry.rows >= _MANY_ROWS * live.requests,
        lengths=host,
        last_page_lens=on_host([(rows - 1) % size + 1 for rows in kv_lens], geometry.device, np.int32),
        kv_indices=kv_indices,
        most_queries=max(live.query_lens),
    )
    return call, slots if geometry.slots is None else geometry.slots
