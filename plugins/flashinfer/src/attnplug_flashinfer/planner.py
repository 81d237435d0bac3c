"""Planner: host lengths and page tables → a call of FlashInfer's paged kernels. Runs on any device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attnplug import ForwardMode, Geometry
from attnplug.kernels import on_host
from attnplug_flashinfer_mla.lengths import CallLengths
from attnplug_flashinfer_mla.planner import index_pages

_MIN_PREFILL_ROWS = 64


@dataclass(frozen=True, slots=True, eq=False)
class FlashInferPagedCall:
    """Arguments with which one call over the paged cache is planned. All of its requests have queries.

    ``lengths`` and ``last_page_lens`` ``[requests]`` int32 are on the host. ``kv_indices`` ``[pages]`` int32 is on the
    device; request i's pages start at ``kv_indptr[i]``. ``long`` selects the prefill kernel, which does not split KV.
    """

    causal: bool
    long: bool
    lengths: CallLengths
    last_page_lens: Tensor
    kv_indices: Tensor
    max_queries: int


def plan_paged(geometry: Geometry) -> tuple[FlashInferPagedCall, Tensor]:
    """Plan a non-empty batch from exact host lengths. Returns the call and the write slots ``[rows]`` int64."""
    slots = torch.empty(geometry.rows, dtype=torch.int64, device=geometry.device)
    live = geometry.only([request for request, new in enumerate(geometry.query_lens) if new])
    size, kv_lens = geometry.page_size, live.kv_lens
    host, _, kv_indices = index_pages(live.page_table, live.query_lens, kv_lens, size, slots)
    call = FlashInferPagedCall(
        causal=not geometry.mode.is_decode,
        long=geometry.mode is ForwardMode.EXTEND and geometry.rows >= _MIN_PREFILL_ROWS * live.requests,
        lengths=host,
        last_page_lens=on_host([(rows - 1) % size + 1 for rows in kv_lens], geometry.device, np.int32),
        kv_indices=kv_indices,
        max_queries=max(live.query_lens),
    )
    return call, slots if geometry.slots is None else geometry.slots
