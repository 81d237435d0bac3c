"""Quantization of activations to fp8 for GEMMs with fp8 weights: one scale per row and 128 columns."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_engine.kernels import launch_options

GROUP = 128
"""Columns with one scale."""
_GROUPS_AT_ONCE = 8
"""Groups per program, unless it norms a whole row."""


@triton.jit(do_not_specialize=["rows"])
def _scale_rows(
    x, gain, codes, scales, rows, x_stride, eps,
    K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Scale ``GROUPS`` groups of one row to fp8, all of them if ``NORM``. Writes ``codes [rows, K]`` and ``scales
    [groups, rows]``."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    there = column < K
    if NORM:
        gains = tl.load(gain + column, mask=there, other=0.0).to(tl.float32)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(x + row * x_stride + column, mask=there, other=0.0).to(tl.float32)
    if NORM:
        values = values * gains * tl.rsqrt(tl.sum(tl.sum(values * values, 1), 0) / K + eps)
    largest = tl.maximum(tl.max(tl.abs(values), 1), 1e-12)
    tl.store(codes + row * K + column, (values * (448.0 / largest)[:, None]).to(codes.dtype.element_ty), mask=there)
    tl.store(scales + group.to(tl.int64) * rows + row, largest / 448.0, mask=group * GROUP < K)


def scale_rows(x: Tensor, norm: tuple[Tensor, float] | None = None) -> tuple[Tensor, Tensor]:
    """Return ``x [rows, K]`` as fp8 e4m3, and its scales ``[rows, ceil(K / 128)]`` float32, stored column by column.

    ``norm`` is the weight and epsilon of an RMS norm of ``x``.
    """
    rows, width = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    codes = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    groups = triton.cdiv(width, GROUP)
    scales = torch.empty(groups, rows, device=x.device)
    gain, eps = (x, 0.0) if norm is None else norm
    if rows:
        at_once = triton.next_power_of_2(groups) if norm else min(triton.next_power_of_2(groups), _GROUPS_AT_ONCE)
        _scale_rows[rows, triton.cdiv(groups, at_once)](
            x, gain, codes, scales, rows, x.stride(0), eps, K=width, GROUP=GROUP, GROUPS=at_once, NORM=norm is not None,
            num_warps=min(max(at_once // 4, 1), 16), **launch_options(x.device),
        )  # fmt: skip
    return codes, scales.t()


@cache
def multiplies_fp8(device: torch.device) -> bool:
    """Return True if tensor cores multiply fp8: on SM 89 and newer, and in Triton's interpreter."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def scales_rows(form: str, group: int | None, device: torch.device) -> bool:
    """Return True if activations are scaled to fp8 for codes of format ``form`` with ``group`` columns per scale."""
    return form == "fp8" and (group is None or group % GROUP == 0) and multiplies_fp8(device)
