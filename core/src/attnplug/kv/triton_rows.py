"""Triton kernels that write rows into pages. Imported only on a GPU with Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug.kv.layout import PageLayout

_LARGEST_BLOCK = 1024
_STRIDES = ("PAGE_STRIDE", "SLOT_STRIDE", "HEAD_STRIDE", "DIM_STRIDE")


@triton.jit
def _write_row(
    pages, slot, rows, token, token_stride, head_stride, scale, block,
    PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    DIM_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, FLOAT8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one block of one token's row."""
    place = block * BLOCK + tl.arange(0, BLOCK)
    exists = place < HEADS * DIM
    head, column = place // DIM, place % DIM
    row = tl.load(rows + token * token_stride + head * head_stride + column, mask=exists)
    if FLOAT8:
        row = tl.div_rn(row.to(tl.float32), scale)
        row = tl.clamp(row, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    target = pages + slot // PAGE_SIZE * PAGE_STRIDE + slot % PAGE_SIZE * SLOT_STRIDE
    # In 64 bits: if heads are the slowest dimension, their stride is a whole cache.
    target += head.to(tl.int64) * HEAD_STRIDE + column.to(tl.int64) * DIM_STRIDE
    tl.store(target, row.to(pages.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _write_rows(
    pages, slots, rows, token_stride, head_stride, scale, limit,
    PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    DIM_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, FLOAT8: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program per token and block of its row. Padding is detected here, which needs no synchronisation."""
    if EARLY:
        gdc_launch_dependents()  # attention that is launched early can start its prologue; it waits for these rows
        gdc_wait()  # for the kernels that wrote slots and rows
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if (slot >= 0) & (slot < limit):
        _write_row(
            pages, slot, rows, token, token_stride, head_stride, scale, tl.program_id(1),
            PAGE_SIZE, PAGE_STRIDE, SLOT_STRIDE, HEAD_STRIDE, DIM_STRIDE, HEADS, DIM, FLOAT8, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _write_pairs(
    pages, value_pages, slots, rows, values, token_stride, head_stride, value_token_stride, value_head_stride,
    scale, value_scale, limit,
    PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    DIM_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, FLOAT8: tl.constexpr, BLOCK: tl.constexpr,
    VALUE_PAGE_STRIDE: tl.constexpr, VALUE_SLOT_STRIDE: tl.constexpr, VALUE_HEAD_STRIDE: tl.constexpr,
    VALUE_DIM_STRIDE: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Same as ``_write_rows``, for keys in the first ``KEY_BLOCKS`` programs of a token and values in the others."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if (slot >= 0) & (slot < limit):
        block = tl.program_id(1)
        if block < KEY_BLOCKS:
            _write_row(
                pages, slot, rows, token, token_stride, head_stride, scale, block,
                PAGE_SIZE, PAGE_STRIDE, SLOT_STRIDE, HEAD_STRIDE, DIM_STRIDE, HEADS, DIM, FLOAT8, BLOCK,
            )  # fmt: skip
        else:
            _write_row(
                value_pages, slot, values, token, value_token_stride, value_head_stride, value_scale,
                block - KEY_BLOCKS, PAGE_SIZE, VALUE_PAGE_STRIDE, VALUE_SLOT_STRIDE, VALUE_HEAD_STRIDE,
                VALUE_DIM_STRIDE, HEADS, VALUE_DIM, FLOAT8, BLOCK,
            )  # fmt: skip


class RowWriter:
    """Writes rows ``[tokens, heads, dim]`` into ``pages``. Constants of the pages are computed once, not per call."""

    def __init__(self, pages: Tensor, layout: PageLayout, scale: float) -> None:
        self.pages, self.scale, self.layout = pages, scale, layout
        self.limit = layout.num_pages * layout.page_size
        self.blocks, self._constants = _blocks_and_constants(pages, layout)

    def pair(self, values: RowWriter) -> PairWriter:
        """Return the writer of keys, by this one, and values, with one launch."""
        return PairWriter(self, values)

    def write(self, slots: Tensor, rows: Tensor) -> None:
        if not rows.shape[0]:
            return
        slots, rows = _dense(slots), _dense(rows)
        token_stride, head_stride, _ = rows.stride()
        _write_rows[rows.shape[0], self.blocks](
            self.pages, slots, rows, token_stride, head_stride, self.scale, self.limit, **self._constants
        )


class PairWriter:
    """Writes keys and values into two caches with the same pages, with one launch."""

    def __init__(self, keys: RowWriter, values: RowWriter) -> None:
        self._keys, self._values = keys, values
        key_blocks, constants = _blocks_and_constants(keys.pages, keys.layout, wider=values.layout)
        width = values.layout.heads * values.layout.dim
        self._blocks = key_blocks + triton.cdiv(width, constants["BLOCK"])
        self._constants = {
            **constants,
            **{f"VALUE_{name}": stride for name, stride in zip(_STRIDES, values.layout.strides, strict=True)},
            "VALUE_DIM": values.layout.dim,
            "KEY_BLOCKS": key_blocks,
        }

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        if not k.shape[0]:
            return
        slots, k, v = _dense(slots), _dense(k), _dense(v)
        _write_pairs[k.shape[0], self._blocks](
            self._keys.pages, self._values.pages, slots, k, v, *k.stride()[:2], *v.stride()[:2],
            self._keys.scale, self._values.scale, self._keys.limit, **self._constants,
        )  # fmt: skip


def _blocks_and_constants(
    pages: Tensor, layout: PageLayout, wider: PageLayout | None = None
) -> tuple[int, dict[str, int]]:
    """Return blocks per row and the kernel's constants. The block size accounts for rows of ``wider`` too."""
    width = layout.heads * layout.dim
    widest = width if wider is None else max(width, wider.heads * wider.dim)
    block = min(triton.next_power_of_2(widest), _LARGEST_BLOCK)
    early = torch.version.hip is None and torch.cuda.get_device_capability(pages.device) >= (9, 0)
    return triton.cdiv(width, block), {
        "PAGE_SIZE": layout.page_size,
        **dict(zip(_STRIDES, layout.strides, strict=True)),
        "HEADS": layout.heads,
        "DIM": layout.dim,
        "FLOAT8": pages.element_size() == 1,
        "BLOCK": block,
        "EARLY": early,
        **({"launch_pdl": True} if early else {}),  # Triton for AMD refuses the option, whatever its value
    }


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
