"""Kernels around the recurrence of linear-attention layers, one launch each: gates before it, a gated norm behind
it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_engine.kernels import launch_options

_BLOCK = 1024


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x):
    """Softplus like torch's. The quotient compensates the rounding of ``1 + exp(x)``, which would lose small decays."""
    power = tl.exp(tl.minimum(x, 20.0))
    above = 1.0 + power
    exact = tl.where(above == 1.0, power, tl.log(above) * (power / tl.where(above == 1.0, 1.0, above - 1.0)))
    return tl.where(x > 20.0, x, exact)


@triton.jit
def _delta_gates(
    decay, beta, rate, bias, log_decay, strength, decay_row, beta_row,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_HEADS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per row and block of its decays; the first one of a row also computes its betas."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_one = column < HEADS * WIDTH
    rates = tl.load(rate + column // WIDTH, mask=is_one, other=0.0)
    biases = tl.load(bias + column, mask=is_one, other=0.0)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    raw = tl.load(decay + row * decay_row + column, mask=is_one, other=0.0).to(tl.float32)
    tl.store(log_decay + row * HEADS * WIDTH + column, rates * _softplus(raw + biases), mask=is_one)
    if tl.program_id(1) == 0:
        head = tl.arange(0, BLOCK_HEADS)
        opened = _sigmoid(tl.load(beta + row * beta_row + head, mask=head < HEADS, other=0.0).to(tl.float32))
        tl.store(strength + row * HEADS + head, opened.to(strength.dtype.element_ty), mask=head < HEADS)


def delta_gates(decay: Tensor, beta: Tensor, rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``rate * softplus(decay + bias)`` in float32 and ``sigmoid(beta)`` in its own dtype.

    ``decay`` is ``[tokens, heads]`` or ``[tokens, heads, key_dim]``, contiguous within a token; ``beta`` is ``[tokens,
    heads]``. ``rate`` has a number per head, ``bias`` one per decay of a token; both are float32.
    """
    tokens, heads = beta.shape
    log_decay = torch.empty(decay.shape, dtype=torch.float32, device=decay.device)
    strength = torch.empty(beta.shape, dtype=beta.dtype, device=beta.device)
    width = bias.numel() // heads
    if tokens:
        block = min(triton.next_power_of_2(heads * width), _BLOCK)
        _delta_gates[tokens, triton.cdiv(heads * width, block)](
            decay,
            beta,
            rate,
            bias,
            log_decay,
            strength,
            decay.stride(0),
            beta.stride(0),
            HEADS=heads,
            WIDTH=width,
            BLOCK=block,
            BLOCK_HEADS=triton.next_power_of_2(heads),
            **launch_options(decay.device),
        )
    return log_decay, strength


@triton.jit
def _time_steps(
    x, step, rate, bias, values, log_decay, low, high, x_row, step_row,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per row and block of its columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_one, head = column < HEADS * WIDTH, column // WIDTH
    rates = tl.load(rate + head, mask=is_one, other=0.0)
    biases = tl.load(bias + head, mask=is_one, other=0.0)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    raw = tl.load(step + row * step_row + head, mask=is_one, other=0.0).to(tl.float32)
    steps = tl.minimum(tl.maximum(_softplus(raw + biases), low), high)
    value = tl.load(x + row * x_row + column, mask=is_one, other=0.0).to(tl.float32) * steps
    tl.store(values + row * HEADS * WIDTH + column, value.to(values.dtype.element_ty), mask=is_one)
    tl.store(log_decay + row * HEADS + head, rates * steps, mask=is_one & (column % WIDTH == 0))


def time_steps(
    x: Tensor, step: Tensor, rate: Tensor, bias: Tensor, limits: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Return ``x [tokens, heads, width]`` times its time step, in its own dtype, and ``rate`` times the step in
    float32.

    The step is the softplus of ``step [tokens, heads]`` plus ``bias [heads]``, clamped to the limits.
    """
    tokens, heads, width = x.shape
    values = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    log_decay = torch.empty(tokens, heads, dtype=torch.float32, device=x.device)
    if tokens:
        block = min(triton.next_power_of_2(heads * width), _BLOCK)
        _time_steps[tokens, triton.cdiv(heads * width, block)](
            x,
            step,
            rate,
            bias,
            values,
            log_decay,
            *limits,
            x.stride(0),
            step.stride(0),
            HEADS=heads,
            WIDTH=width,
            BLOCK=block,
            **launch_options(x.device),
        )
    return values, log_decay


@triton.jit
def _gated_norm(
    x, gate, weight, skipped, skip, out, eps, x_row, gate_row, skipped_row,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, WEIGHT_GROUP: tl.constexpr, HEAD: tl.constexpr, SKIP: tl.constexpr,
    GATE_FIRST: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per row and group of its columns."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, BLOCK)
    is_one, column = place < WIDTH, group * WIDTH + place
    weights = tl.load(weight + group * WEIGHT_GROUP + place, mask=is_one, other=0.0).to(tl.float32)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * x_row + column, mask=is_one, other=0.0).to(tl.float32)
    opened = tl.load(gate + row * gate_row + column, mask=is_one, other=0.0).to(tl.float32)
    opened = (opened if SILU else 1.0) * _sigmoid(opened)
    if SKIP:
        past = tl.load(skipped + row * skipped_row + column, mask=is_one, other=0.0).to(tl.float32)
        value += past * tl.load(skip + column // HEAD, mask=is_one, other=0.0)
    if GATE_FIRST:
        value *= opened
    factor = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    value = value * factor * weights
    if not GATE_FIRST:
        value *= opened
    tl.store(out + row * GROUPS * WIDTH + column, value.to(out.dtype.element_ty), mask=is_one)


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    *,
    groups: int,
    silu: bool,
    gate_first: bool = False,
    skip: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Norm ``x [tokens, columns]`` in groups of its columns, and scale it by the SiLU or sigmoid of its gate.

    ``weight`` is for all columns, or for those of one group if all groups share it. ``skip [heads]`` float32 times its
    ``[tokens, columns]`` is added first. With ``gate_first`` the gate is applied before the norm.
    """
    tokens, columns = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    factors, skipped = (weight, x) if skip is None else skip
    if tokens:
        width = columns // groups
        block = triton.next_power_of_2(width)
        _gated_norm[tokens, groups](
            x,
            gate,
            weight,
            skipped,
            factors,
            out,
            eps,
            x.stride(0),
            gate.stride(0),
            skipped.stride(0),
            GROUPS=groups,
            WIDTH=width,
            WEIGHT_GROUP=width if weight.numel() == columns else 0,
            HEAD=1 if skip is None else columns // factors.numel(),
            SKIP=skip is not None,
            GATE_FIRST=gate_first,
            SILU=silu,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
            **launch_options(x.device),
        )
    return out


@triton.jit
def _sigmoid_gate(x, gate, out, x_row, gate_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """One program per row and block of its columns."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_one = column < WIDTH
    value = tl.load(x + row * x_row + column, mask=is_one, other=0.0).to(tl.float32)
    opened = _sigmoid(tl.load(gate + row * gate_row + column, mask=is_one, other=0.0).to(tl.float32))
    tl.store(out + row * WIDTH + column, (value * opened).to(out.dtype.element_ty), mask=is_one)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Return ``x * sigmoid(gate)`` of ``[tokens, columns]``, in the dtype of ``x``; rows may be strided."""
    tokens, width = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens:
        block = min(triton.next_power_of_2(width), _BLOCK)
        _sigmoid_gate[tokens, triton.cdiv(width, block)](
            x, gate, out, x.stride(0), gate.stride(0), WIDTH=width, BLOCK=block, **launch_options(x.device)
        )
    return out
