"""The one Triton kernel of this plugin. Imported where there is a CUDA device and nowhere else."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnplug_flashmla.plugin import PAGE

_BLOCK = 256
_MOST_PROGRAMS = 8
"""Programs that share one request's pages: a context of 128k tokens is 8 blocks."""


@triton.jit
def _fill_pages(
    table, table_stride, width, seq_lens, kv_lens, kernel_table, kernel_stride, slots,
    QUERIES: tl.constexpr, RATIO: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    row = table + request * table_stride
    asked = tl.load(seq_lens + request).to(tl.int32)
    kv_len = tl.minimum(asked, width * RATIO * PAGE)
    pages = (kv_len + PAGE - 1) // PAGE
    # The kernel fetches the first page of a request of length 0 too, so there must be one.
    for at in range(tl.program_id(1) * BLOCK, tl.maximum(pages, 1), tl.num_programs(1) * BLOCK):
        place = at + tl.arange(0, BLOCK)
        page = tl.load(row + place // RATIO, mask=place < pages, other=0)
        kernel_page = tl.where(place < pages, page * RATIO + place % RATIO, 0)
        tl.store(kernel_table + request * kernel_stride + place, kernel_page, mask=place < tl.maximum(pages, 1))
    if tl.program_id(1) == 0:
        tl.store(kv_lens + request, kv_len)
        query = tl.arange(0, ROWS)
        position = asked - QUERIES + query
        column = position // (RATIO * PAGE)
        exists = (query < QUERIES) & (position >= 0) & (column < width)
        page = tl.load(row + column, mask=exists, other=0).to(tl.int64)
        slot = tl.where(exists, page * (RATIO * PAGE) + position % (RATIO * PAGE), -1)
        tl.store(slots + request * QUERIES + query, slot, mask=query < QUERIES)


def launch_fill_pages(
    page_table: Tensor,
    seq_lens: Tensor,
    page_size: int,
    queries: int,
    kv_lens: Tensor,
    kernel_table: Tensor,
    slots: Tensor,
) -> None:
    requests, width = page_table.shape
    ratio = page_size // PAGE
    _fill_pages[requests, min(triton.cdiv(width * ratio, _BLOCK), _MOST_PROGRAMS)](
        page_table,
        page_table.stride(0),
        width,
        seq_lens,
        kv_lens,
        kernel_table,
        kernel_table.stride(0),
        slots,
        QUERIES=queries,
        RATIO=ratio,
        PAGE=PAGE,
        ROWS=triton.next_power_of_2(queries),
        BLOCK=_BLOCK,
    )
