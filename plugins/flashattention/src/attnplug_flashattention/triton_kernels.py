"""Triton kernels of ``tables`` and ``merge``. Imported on CUDA devices only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnplug_flashattention.kv_splits import KEY_TILE, KVSplits

_BLOCK = 256
_MAX_PROGRAMS = 32
"""Maximum programs per split: 128k tokens in pages of one are 512 blocks."""
_AT_ONCE = 8
"""Splits that a merging program holds in registers at a time."""


@triton.jit(do_not_specialize=["table_stride", "width", "target_stride", "target_width", "count"])
def _fill_parts(
    table, table_stride, width, kv_lens, target, target_stride, target_width, part_lens, ratio, size, step, count,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    request, part = row // count, row % count
    most = tl.minimum(width * ratio, target_width * count)
    length = tl.minimum(tl.load(kv_lens + request), most * size)
    pages = (length + size - 1) // size
    per = (pages + count * step - 1) // (count * step) * step
    begin = part * per
    mine = tl.maximum(tl.minimum(pages - begin, per), 0)
    source = table + request.to(tl.int64) * table_stride
    goal = target + row.to(tl.int64) * target_stride
    for at in range(tl.program_id(1) * BLOCK, mine, tl.num_programs(1) * BLOCK):
        place = at + tl.arange(0, BLOCK)
        page = begin + place
        found = tl.load(source + page // ratio, mask=place < mine, other=0)
        tl.store(goal + place, found * ratio + page % ratio, mask=place < mine)
    if tl.program_id(1) == 0:
        tl.store(part_lens + row, tl.maximum(tl.minimum(length - begin * size, per * size), 0))


def launch_fill_splits(page_table: Tensor, kv_lens: Tensor, splits: KVSplits) -> None:
    rows, width = splits.page_table.shape
    if not rows:
        return
    size, count = splits.kernel_page, splits.count
    _fill_parts[(rows, min(_MAX_PROGRAMS, triton.cdiv(width, _BLOCK)))](
        page_table,
        page_table.stride(0),
        page_table.shape[1],
        kv_lens,
        splits.page_table,
        splits.page_table.stride(0),
        width,
        splits.kv_lens,
        splits.page_size // size,
        size,
        max(1, KEY_TILE // size) if count > 1 else 1,
        count,
        BLOCK=_BLOCK,
    )


@triton.jit(do_not_specialize=["table_stride", "width", "queries", "rows"])
def _fill_slots(table, table_stride, width, kv_lens, slots, page_size, queries, rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request = row // queries
    position = tl.load(kv_lens + request, mask=row < rows, other=0) - queries + row % queries
    exists = (row < rows) & (position >= 0) & (position // page_size < width)
    page = tl.load(table + request.to(tl.int64) * table_stride + position // page_size, mask=exists, other=0)
    slot = tl.where(exists, page.to(tl.int64) * page_size + position % page_size, -1)
    tl.store(slots + row, slot, mask=row < rows)


def launch_fill_slots(page_table: Tensor, kv_lens: Tensor, page_size: int, slots: Tensor) -> None:
    rows, requests = slots.shape[0], page_table.shape[0]
    if not rows:
        return
    _fill_slots[(triton.cdiv(rows, _BLOCK),)](
        page_table,
        page_table.stride(0),
        page_table.shape[1],
        kv_lens,
        slots,
        page_size,
        rows // requests,
        rows,
        BLOCK=_BLOCK,
    )


@triton.jit(do_not_specialize=["lse_row", "lse_head", "count"])
def _merge_parts(
    out, lse, lse_row, lse_head, merged, merged_lse, count, heads, dim,
    LSE: tl.constexpr, PARTS: tl.constexpr, AT_ONCE: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sums_at = lse + row * count * lse_row + head * lse_head
    number = tl.arange(0, PARTS)
    sums = tl.load(sums_at + number * lse_row, mask=number < count, other=float("-inf"))
    largest = tl.max(sums, 0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp(sums - base), 0)
    column = tl.arange(0, DIM)
    weighted = tl.zeros([DIM], tl.float32)
    for first in range(0, count, AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)
        some = tl.load(sums_at + part * lse_row, mask=part < count, other=float("-inf"))
        share = tl.exp(some - base)
        place = ((row * count + part)[:, None] * heads + head) * dim + column[None, :]
        values = tl.load(out + place, mask=(share > 0)[:, None] & (column < dim)[None, :], other=0.0)
        weighted += tl.sum(values.to(tl.float32) * share[:, None], 0)
    divisor = tl.where(total > 0, total, 1.0)
    result = weighted / divisor
    tl.store(merged + (row * heads + head) * dim + column, result.to(merged.dtype.element_ty), mask=column < dim)
    if LSE:
        tl.store(merged_lse + row * heads + head, tl.where(total > 0, base + tl.log(divisor), float("-inf")))


def launch_merge_splits(out: Tensor, lse: Tensor, count: int, merged_lse: Tensor | None) -> Tensor:
    rows, heads, dim = out.shape[0] // count, out.shape[1], out.shape[2]
    merged = torch.empty(rows, heads, dim, dtype=out.dtype, device=out.device)
    _merge_parts[(rows, heads)](
        out.contiguous(),
        lse,
        lse.stride(0),
        lse.stride(1),
        merged,
        merged if merged_lse is None else merged_lse,
        count,
        heads,
        dim,
        LSE=merged_lse is not None,
        PARTS=triton.next_power_of_2(count),
        AT_ONCE=_AT_ONCE,
        DIM=triton.next_power_of_2(dim),
        num_warps=2,
    )
    return merged
