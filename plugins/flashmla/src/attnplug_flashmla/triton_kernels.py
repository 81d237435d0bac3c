"""Triton kernels of planner and query preparation. Imported on CUDA devices only."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnplug_flashmla.plugin import PAGE

_BLOCK = 256
_MAX_PROGRAMS = 8
"""Maximum programs per request: 128k tokens are 8 blocks."""
PAIRS = 4
"""(row, head) pairs per program: each of its 128 threads moves 16 bytes twice, and 4 bytes of the rope."""


@triton.jit(do_not_specialize=["table_stride", "width", "kernel_stride"])
def _fill_pages(
    table, table_stride, width, seq_lens, kv_lens, kernel_table, kernel_stride, slots,
    QUERIES: tl.constexpr, RATIO: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    row = table + request * table_stride
    asked = tl.load(seq_lens + request).to(tl.int32)
    kv_len = tl.minimum(asked, width * RATIO * PAGE)
    pages = (kv_len + PAGE - 1) // PAGE
    # The attention kernel fetches the first page of a request of length 0 too, so the entry must be valid.
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
    _fill_pages[requests, min(triton.cdiv(width * ratio, _BLOCK), _MAX_PROGRAMS)](
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


@triton.jit(do_not_specialize=["pairs"])
def _join(
    joined, latent, rope, pairs, latent_row, latent_head, rope_row, rope_head,
    HEADS: tl.constexpr, GIVEN: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    row, head, live = (pair // HEADS).to(tl.int64), (pair % HEADS).to(tl.int64), (pair < pairs)[:, None]
    given = live if GIVEN == HEADS else live & (head < GIVEN)[:, None]
    column, rope_column = tl.arange(0, RANK)[None, :], tl.arange(0, ROPE)[None, :]
    first = tl.load(latent + (row * latent_row + head * latent_head)[:, None] + column, mask=given, other=0.0)
    last = tl.load(rope + (row * rope_row + head * rope_head)[:, None] + rope_column, mask=given, other=0.0)
    target = joined + (pair.to(tl.int64) * (RANK + ROPE))[:, None]
    tl.store(target + column, first, mask=live)
    tl.store(target + RANK + rope_column, last, mask=live)


def launch_join(latent: Tensor, rope: Tensor, padded_heads: int | None = None) -> Tensor:
    """Concatenate ``[rows, heads, rank]`` and ``[rows, heads, rope]`` to ``[rows, heads, rank + rope]``, contiguous.

    Further heads, up to ``padded_heads``, are zeros. Both dims are powers of two with a column stride of 1. Rows and
    heads may have any strides.
    """
    (rows, given, rank), width = latent.shape, rope.shape[2]
    heads = padded_heads or given
    joined = latent.new_empty(rows, heads, rank + width)
    _join[(triton.cdiv(rows * heads, PAIRS),)](
        joined,
        latent,
        rope,
        rows * heads,
        *latent.stride()[:2],
        *rope.stride()[:2],
        HEADS=heads,
        GIVEN=given,
        RANK=rank,
        ROPE=width,
        PAIRS=PAIRS,
    )
    return joined
