"""Writes rows into pages with one kernel. Imported only where there is a GPU with Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug.kv.layout import PageLayout

_LARGEST_BLOCK = 1024


@triton.jit
def _write_rows(
    pages, slots, rows, token_stride, head_stride, scale, limit,
    PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    DIM_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, FLOAT8: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program per token and block of its row. What is padding is looked up here, so nobody waits for it."""
    if EARLY:
        gdc_launch_dependents()  # attention that is launched early prepares itself meanwhile, and waits for our rows
        gdc_wait()  # for whoever made slots and rows
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if (slot >= 0) & (slot < limit):
        place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        exists = place < HEADS * DIM
        head, column = place // DIM, place % DIM
        row = tl.load(rows + token * token_stride + head * head_stride + column, mask=exists)
        if FLOAT8:
            row = tl.div_rn(row.to(tl.float32), scale)
            row = tl.clamp(row, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        target = pages + slot // PAGE_SIZE * PAGE_STRIDE + slot % PAGE_SIZE * SLOT_STRIDE
        # In 64 bits: where heads are the slowest dimension, they lie a whole cache apart.
        target += head.to(tl.int64) * HEAD_STRIDE + column.to(tl.int64) * DIM_STRIDE
        tl.store(target, row.to(pages.dtype.element_ty), mask=exists)


class RowWriter:
    """Writes rows ``[tokens, heads, dim]`` into ``pages``. What depends on the pages alone is settled once, not per
    call."""

    def __init__(self, pages: Tensor, layout: PageLayout, scale: float) -> None:
        width = layout.heads * layout.dim
        block = min(triton.next_power_of_2(width), _LARGEST_BLOCK)
        page_stride, slot_stride, head_stride, dim_stride = layout.strides
        self._pages, self._scale = pages, scale
        self._limit = layout.num_pages * layout.page_size
        self._blocks = triton.cdiv(width, block)
        early = torch.version.hip is None and torch.cuda.get_device_capability(pages.device) >= (9, 0)
        self._constants = {
            "PAGE_SIZE": layout.page_size,
            "PAGE_STRIDE": page_stride,
            "SLOT_STRIDE": slot_stride,
            "HEAD_STRIDE": head_stride,
            "DIM_STRIDE": dim_stride,
            "HEADS": layout.heads,
            "DIM": layout.dim,
            "FLOAT8": pages.element_size() == 1,
            "BLOCK": block,
            "EARLY": early,
            **({"launch_pdl": True} if early else {}),  # an option that Triton for AMD refuses, whatever it says
        }

    def write(self, slots: Tensor, rows: Tensor) -> None:
        tokens = rows.shape[0]
        if not tokens:
            return
        if slots.stride(0) != 1:
            slots = slots.contiguous()
        token_stride, head_stride, dim_stride = rows.stride()
        if dim_stride != 1:
            rows = rows.contiguous()
            token_stride, head_stride, _ = rows.stride()
        _write_rows[tokens, self._blocks](
            self._pages, slots, rows, token_stride, head_stride, self._scale, self._limit, **self._constants
        )
