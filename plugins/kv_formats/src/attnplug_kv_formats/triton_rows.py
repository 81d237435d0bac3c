"""Triton kernels that encode rows and write them into pages, as the codecs do. Imported only on a GPU with Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_E4M3 = tl.constexpr(448.0)
_SMALLEST_SCALE = tl.constexpr(1e-6)


@triton.jit
def _e4m3_code(size):
    """Return the e4m3 codes of float32 values from 0 to 448, or NaN, as int32; rounds halves to even.

    It uses integer arithmetic, because Triton converts to e4m3 only from SM 89 on.
    """
    # Numbers below 2 ** -6 are multiples of 2 ** -9: adding 2 ** 14 leaves that multiple in the lowest bits.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    bits = size.to(tl.int32, bitcast=True)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1) >> 20) - (120 << 3)
    code = tl.where(size < 0.015625, small, normal)
    return tl.where(size == size, code, 127)


@triton.jit
def _largest(sizes, AXIS: tl.constexpr):
    """Return the maximum along an axis, NaN if there is one."""
    missing = tl.max((sizes != sizes).to(tl.int32), AXIS) > 0
    return tl.where(missing, float("nan"), tl.max(sizes, AXIS))


@triton.jit
def _round_e2m1(size):
    """Return the e2m1 codes of non-negative float32 values as int32; rounds halves to even."""
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    return code + (size > 5.0).to(tl.int32)


@triton.jit
def _negative(number):
    return number.to(tl.int32, bitcast=True) < 0


@triton.jit
def _write_fp8(at, scale_at, row_at, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    row = tl.load(row_at + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    scale = tl.div_rn(_largest(tl.abs(row), 0), _E4M3)
    scale = tl.where(scale < _SMALLEST_SCALE, _SMALLEST_SCALE, scale)
    value = row * tl.div_rn(1.0, scale)
    size = tl.abs(value)
    code = _e4m3_code(tl.where(size > _E4M3, _E4M3, size)) | tl.where(_negative(value), 128, 0)
    tl.store(at + column, code.to(tl.uint8), mask=column < WIDTH)
    tl.store(scale_at, scale)


@triton.jit
def _write_nvfp4(at, scale_at, row_at, divisor, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    GROUPS: tl.constexpr = BLOCK // 16
    group = tl.arange(0, GROUPS)
    exist = group < WIDTH // 16
    column = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    row = tl.load(row_at + column, mask=exist[:, None], other=0.0).to(tl.float32)
    row = tl.div_rn(row, divisor)
    largest = tl.div_rn(_largest(tl.abs(row), 1), 6.0)
    code = _e4m3_code(tl.where(largest > _E4M3, _E4M3, largest))
    tl.store(scale_at + group, code.to(tl.uint8), mask=exist)
    # The scale as it will be read. A normal code, shifted into a float32, is the scale times 2 ** -120.
    normal = (code << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    scale = tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)
    scale = tl.where(code == 127, float("nan"), tl.where(code == 0, float("inf"), scale))
    value = tl.div_rn(row, tl.broadcast_to(scale[:, None], [GROUPS, 16]))
    codes = _round_e2m1(tl.abs(value)) | tl.where(_negative(value), 8, 0)
    lower, upper = tl.split(tl.reshape(codes, [GROUPS, 8, 2]))
    byte = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(at + byte, (lower | (upper << 4)).to(tl.uint8), mask=exist[:, None])


@triton.jit
def _write_row(
    values, scales, rope, slot, rows, token, head, token_stride, head_stride, divisor,
    PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    SCALE_PAGE: tl.constexpr, SCALE_SLOT: tl.constexpr, SCALE_HEAD: tl.constexpr,
    ROPE_PAGE: tl.constexpr, ROPE_SLOT: tl.constexpr,
    WIDTH: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr, NVFP4: tl.constexpr,
):  # fmt: skip
    """Encode and write the row of one token and head. Strides are in elements."""
    page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
    at = values + page * PAGE_STRIDE + offset * SLOT_STRIDE + head * HEAD_STRIDE
    scale_at = scales + page * SCALE_PAGE + offset * SCALE_SLOT + head * SCALE_HEAD
    row_at = rows + token * token_stride + head * head_stride
    if NVFP4:
        _write_nvfp4(at, scale_at, row_at, divisor, WIDTH, BLOCK)
    else:
        _write_fp8(at, scale_at, row_at, WIDTH, BLOCK)
    if ROPE > 0:
        column = tl.arange(0, ROPE_BLOCK)
        part = tl.load(row_at + WIDTH + column, mask=column < ROPE)
        rope_at = rope + page * ROPE_PAGE + offset * ROPE_SLOT
        tl.store(rope_at + column, part.to(rope.dtype.element_ty), mask=column < ROPE)


@triton.jit
def _write(
    values, scales, rope, slots, rows, token_stride, head_stride, divisor, limit,
    PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    SCALE_PAGE: tl.constexpr, SCALE_SLOT: tl.constexpr, SCALE_HEAD: tl.constexpr,
    ROPE_PAGE: tl.constexpr, ROPE_SLOT: tl.constexpr,
    WIDTH: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr, NVFP4: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Write one row per program (token, head). Rows with a slot outside the pool (padding) are skipped."""
    if EARLY:
        gdc_launch_dependents()  # dependent kernels can start their prologue; they wait for these rows
        gdc_wait()  # for the kernels that wrote slots and rows
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if (slot >= 0) & (slot < limit):
        _write_row(
            values, scales, rope, slot, rows, token, head, token_stride, head_stride, divisor,
            PAGE_SIZE, PAGE_STRIDE, SLOT_STRIDE, HEAD_STRIDE, SCALE_PAGE, SCALE_SLOT, SCALE_HEAD, ROPE_PAGE, ROPE_SLOT,
            WIDTH, ROPE, BLOCK, ROPE_BLOCK, NVFP4,
        )  # fmt: skip


@triton.jit
def _write_pairs(
    values, scales, v_values, v_scales, slots, rows, v_rows, token_stride, head_stride, v_token_stride, v_head_stride,
    divisor, v_divisor, limit,
    PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    SCALE_PAGE: tl.constexpr, SCALE_SLOT: tl.constexpr, SCALE_HEAD: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, V_PAGE_STRIDE: tl.constexpr, V_SLOT_STRIDE: tl.constexpr, V_HEAD_STRIDE: tl.constexpr,
    V_SCALE_PAGE: tl.constexpr, V_SCALE_SLOT: tl.constexpr, V_SCALE_HEAD: tl.constexpr, V_WIDTH: tl.constexpr,
    V_BLOCK: tl.constexpr, NVFP4: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write keys in the first half of a token's programs and values in the second half, like ``_write``."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.num_programs(1) // 2
    slot = tl.load(slots + token).to(tl.int64)
    if (slot >= 0) & (slot < limit):
        if head < heads:
            _write_row(
                values, scales, values, slot, rows, token, head, token_stride, head_stride, divisor,
                PAGE_SIZE, PAGE_STRIDE, SLOT_STRIDE, HEAD_STRIDE, SCALE_PAGE, SCALE_SLOT, SCALE_HEAD, 0, 0,
                WIDTH, 0, BLOCK, 1, NVFP4,
            )  # fmt: skip
        else:
            _write_row(
                v_values, v_scales, v_values, slot, v_rows, token, head - heads, v_token_stride, v_head_stride,
                v_divisor, PAGE_SIZE, V_PAGE_STRIDE, V_SLOT_STRIDE, V_HEAD_STRIDE, V_SCALE_PAGE, V_SCALE_SLOT,
                V_SCALE_HEAD, 0, 0, V_WIDTH, 0, V_BLOCK, 1, NVFP4,
            )  # fmt: skip


class RowWriter:
    """Writes rows ``[tokens, heads, width]`` into the parts of their format with one launch; see ``KVFormat.kernels``.

    Launch constants are computed once per pool. ``early``: use programmatic dependent launch.
    """

    def __init__(self, parts: Sequence[Tensor], scale: float, *, early: bool) -> None:
        values, scales = (part.view(torch.uint8) if part.element_size() == 1 else part for part in parts[:2])
        self.parts = values, scales, parts[2] if len(parts) > 2 else values
        self.scale, self.heads, rope = scale, values.shape[2], parts[2:]
        nvfp4 = parts[0].dtype is torch.uint8
        width = values.shape[3] * (2 if nvfp4 else 1)
        self.limit = values.shape[0] * values.shape[1]
        self.constants = {
            "PAGE_SIZE": values.shape[1],
            **dict(zip(("PAGE_STRIDE", "SLOT_STRIDE", "HEAD_STRIDE"), values.stride(), strict=False)),
            **dict(zip(("SCALE_PAGE", "SCALE_SLOT", "SCALE_HEAD"), scales.stride(), strict=False)),
            **dict(zip(("ROPE_PAGE", "ROPE_SLOT"), self.parts[2].stride(), strict=False)),
            "WIDTH": width,
            "ROPE": rope[0].shape[3] if rope else 0,
            "BLOCK": max(triton.next_power_of_2(width), 16),
            "ROPE_BLOCK": triton.next_power_of_2(rope[0].shape[3]) if rope else 1,
            "NVFP4": nvfp4,
            "EARLY": early,
            "num_warps": 4 if width >= 512 else 1,
            **({"launch_pdl": True} if early else {}),  # Triton for AMD refuses the option, whatever its value
        }

    def pair(self, values: RowWriter) -> PairWriter:
        """Return the writer of keys, by this one, and values, with one launch."""
        return PairWriter(self, values)

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Write ``rows`` to ``slots`` ``[tokens]``; slots outside the pool are skipped."""
        if not rows.shape[0]:
            return
        slots, rows = _dense(slots), _dense(rows)
        grid = rows.shape[0], self.heads
        _write[grid](*self.parts, slots, rows, *rows.stride()[:2], self.scale, self.limit, **self.constants)


class PairWriter:
    """Writes keys and values into two caches with the same pages and heads, with one launch."""

    def __init__(self, keys: RowWriter, values: RowWriter) -> None:
        self._parts = *keys.parts[:2], *values.parts[:2]
        self._scales, self._limit, self._programs = (keys.scale, values.scale), keys.limit, 2 * keys.heads
        unused = ("ROPE_PAGE", "ROPE_SLOT", "ROPE", "ROPE_BLOCK")
        shared = ("PAGE_SIZE", "NVFP4", "EARLY", "num_warps", "launch_pdl")
        self._constants = {name: value for name, value in keys.constants.items() if name not in unused} | {
            f"V_{name}": value for name, value in values.constants.items() if name not in (*unused, *shared)
        }

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write keys ``[tokens, heads, dim]`` and values ``[tokens, heads, v_dim]`` to ``slots`` ``[tokens]``."""
        if not k.shape[0]:
            return
        slots, k, v = _dense(slots), _dense(k), _dense(v)
        _write_pairs[k.shape[0], self._programs](
            *self._parts, slots, k, v, *k.stride()[:2], *v.stride()[:2], *self._scales, self._limit, **self._constants
        )


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
