"""Triton kernel that writes rows with scales of their own. Imported only on a GPU with Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _write_scaled(
    values, scales, rest, slots, rows, token_stride, limit,
    PAGE_SIZE: tl.constexpr, VALUE_PAGE: tl.constexpr, VALUE_SLOT: tl.constexpr, SCALE_PAGE: tl.constexpr,
    SCALE_SLOT: tl.constexpr, REST_PAGE: tl.constexpr, REST_SLOT: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr, REST: tl.constexpr, GROUP_BLOCK: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr, SMALLEST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per token: ``GROUPS`` groups of ``WIDTH`` values with a scale each, and ``REST`` unscaled values."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if (slot >= 0) & (slot < limit):
        page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
        row = rows + token * token_stride
        group, column = tl.arange(0, GROUP_BLOCK), tl.arange(0, WIDTH_BLOCK)
        place = group[:, None] * WIDTH + column[None, :]
        exists = (group < GROUPS)[:, None] & (column < WIDTH)[None, :]
        numbers = tl.load(row + place, mask=exists, other=0.0).to(tl.float32)
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(numbers), 1), SMALLEST), 448.0)
        # Round up to a power of two: any bit of the mantissa raises the exponent.
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & -0x800000).to(tl.float32, bitcast=True)
        scaled = tl.clamp(tl.div_rn(numbers, scale[:, None]), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        target = values + page * VALUE_PAGE + offset * VALUE_SLOT
        tl.store(target + place, scaled.to(values.dtype.element_ty), mask=exists)
        tl.store(scales + page * SCALE_PAGE + offset * SCALE_SLOT + group, scale, mask=group < GROUPS)
        if REST:
            more = tl.arange(0, REST_BLOCK)
            kept = tl.load(row + GROUPS * WIDTH + more, mask=more < REST)
            target = rest + page * REST_PAGE + offset * REST_SLOT + more
            tl.store(target, kept.to(rest.dtype.element_ty), mask=more < REST)


class ScaledWriter:
    """Writes rows ``[tokens, 1, width]`` with per-row scales, with one launch; see ``scaled_rows``."""

    def __init__(self, values: Tensor, scales: Tensor, rest: Tensor | None, smallest: float) -> None:
        self._parts = values, scales, scales if rest is None else rest
        pages, page_size, _, width = values.shape
        groups, more = scales.shape[-1], 0 if rest is None else rest.shape[-1]
        self._limit = pages * page_size
        strides = [stride for part in self._parts for stride in part.stride()[:2]]
        names = ("VALUE_PAGE", "VALUE_SLOT", "SCALE_PAGE", "SCALE_SLOT", "REST_PAGE", "REST_SLOT")
        early = torch.version.hip is None and torch.cuda.get_device_capability(values.device) >= (9, 0)
        self._constants = {
            "PAGE_SIZE": page_size,
            **dict(zip(names, strides, strict=True)),
            "GROUPS": groups,
            "WIDTH": width // groups,
            "REST": more,
            "GROUP_BLOCK": triton.next_power_of_2(groups),
            "WIDTH_BLOCK": triton.next_power_of_2(width // groups),
            "REST_BLOCK": triton.next_power_of_2(max(more, 1)),
            "SMALLEST": smallest,
            "EARLY": early,
            # Triton for AMD refuses the option launch_pdl, whatever its value.
            **({"launch_pdl": True} if early else {}),
        }

    def write(self, slots: Tensor, rows: Tensor) -> None:
        if not rows.shape[0]:
            return
        slots = slots if slots.stride(0) == 1 else slots.contiguous()
        rows = rows if rows.stride(2) == 1 else rows.contiguous()
        _write_scaled[(rows.shape[0],)](*self._parts, slots, rows, rows.stride(0), self._limit, **self._constants)
