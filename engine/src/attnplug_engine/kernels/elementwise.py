"""Elementwise kernels between matrix products of many rows, one launch each: RMS norm, and the gate of an MLP."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_engine.kernels import launch_options

_BLOCK = 1024


@triton.jit
def _rms_norm(out, x, gain, x_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    there = column < WIDTH
    gains = tl.load(gain + column, mask=there, other=0.0).to(tl.float32)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * x_stride + column, mask=there, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    tl.store(out + row * WIDTH + column, (value * factor * gains).to(out.dtype.element_ty), mask=there)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Return ``x [rows, width]`` normed over its width, times ``gain [width]``, which may have a wider dtype."""
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, width = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if rows:
        block = triton.next_power_of_2(width)
        warps = min(max(block // 512, 1), 16)
        _rms_norm[(rows,)](
            out, x, gain, x.stride(0), eps, WIDTH=width, BLOCK=block, num_warps=warps, **launch_options(x.device)
        )
    return out


@triton.jit
def _silu_and_mul(out, x, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """One program per row and block of its columns."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < WIDTH
    gate = tl.load(x + row * x_stride + column, mask=there, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + WIDTH + column, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=there)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` of ``[rows, gate | up]``."""
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if out.numel():
        block = min(triton.next_power_of_2(width), _BLOCK)
        _silu_and_mul[rows, triton.cdiv(width, block)](
            out, gate_up, gate_up.stride(0), WIDTH=width, BLOCK=block, **launch_options(gate_up.device)
        )
    return out
