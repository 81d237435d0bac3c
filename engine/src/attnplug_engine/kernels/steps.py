"""What a captured step does before its model runs and after its tokens are chosen, one launch each."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_engine.kernels import launch_options


@triton.jit(do_not_specialize=["pages"])
def _begin(
    page_table, ids, positions, rows, seq_lens, mirror, tokens, pages, table_row, mirror_row,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per request and block of its pages. Lets nobody start early: planning comes next, and attention reads
    plans and page tables before it waits."""
    request, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + request)
    column = block * BLOCK + tl.arange(0, BLOCK)
    there = column < pages
    found = tl.load(mirror + row * mirror_row + column, mask=there)
    tl.store(page_table + request * table_row + column, found, mask=there)
    if block == 0:
        tl.store(ids + request, tl.load(tokens + row))
        tl.store(positions + request, tl.maximum(tl.load(seq_lens + request) - 1, 0))


def begin(
    page_table: Tensor, ids: Tensor, positions: Tensor, rows: Tensor, seq_lens: Tensor, mirror: Tensor, tokens: Tensor
) -> None:
    """Fill ``page_table [requests, pages]``, ``ids`` and ``positions [requests]`` for requests at ``rows`` of the table
    ``mirror`` and of ``tokens``. A position is the length less one; 0 for a padded request."""
    requests, pages = page_table.shape
    block = min(triton.next_power_of_2(pages), 1024)
    _begin[requests, triton.cdiv(pages, block)](
        page_table, ids, positions, rows, seq_lens, mirror, tokens, pages, page_table.stride(0), mirror.stride(0),
        BLOCK=block,
    )  # fmt: skip


@triton.jit(do_not_specialize=["requests"])
def _end(sampled, tokens, rows, chosen, requests, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = request < requests
    token = tl.load(chosen + request, mask=there)
    tl.store(sampled + request, token, mask=there)
    row = tl.load(rows + request, mask=there, other=0)
    tl.store(tokens + row, tl.maximum(token, 0), mask=there)


def end(sampled: Tensor, tokens: Tensor, rows: Tensor, chosen: Tensor) -> None:
    """Put the tokens that were chosen where the host reads them, and where the next step does: there -1 becomes 0."""
    requests, block = chosen.shape[0], 256
    _end[(triton.cdiv(requests, block),)](
        sampled, tokens, rows, chosen, requests, BLOCK=block, **launch_options(chosen.device)
    )
