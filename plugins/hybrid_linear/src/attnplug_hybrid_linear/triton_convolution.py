"""Triton kernels of the short causal convolution, which update the states in place.

Every row is read about once from memory and written once. Preceding rows come from the GPU's cache or, before a
request's first new row, from its state ``[channels, width]``: its last ``width`` input rows, the newest last.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_hybrid_linear.varlen import VarlenBatch, VarlenBlocks, with_unit_stride

_CHANNELS = 128


@triton.jit
def _raw(x, x_row, start, state, token, channel, is_one, WIDTH: tl.constexpr):
    """Load rows of a sequence ``[tokens, channels]`` as float32; negative rows come from its state."""
    new = tl.load(
        x + (start + token[:, None]) * x_row + channel[None, :], mask=is_one & (token >= 0)[:, None], other=0.0
    )
    old = tl.load(
        state + channel[None, :] * WIDTH + WIDTH + token[:, None], mask=is_one & (token < 0)[:, None], other=0.0
    )
    return tl.where((token >= 0)[:, None], new.to(tl.float32), old.to(tl.float32))


@triton.jit
def _move_on(x, x_row, start, state, tokens, channel, is_channel, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Store the state's newest rows after ``tokens``. A barrier first: other threads still read the old rows."""
    column = tl.arange(0, COLUMNS)
    is_one = (column < WIDTH)[:, None] & is_channel[None, :]
    rows = _raw(x, x_row, start, state, tokens - WIDTH + column, channel, is_one, WIDTH)
    tl.debug_barrier()
    tl.store(state + channel[None, :] * WIDTH + column[:, None], rows.to(state.dtype.element_ty), mask=is_one)


@triton.jit(do_not_specialize_on_alignment=["starts", "lens", "slots"])
def _convolve(
    x, weight, bias, out, states, starts, lens, slots, block_span, block_place, x_row, channels,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, WHOLE: tl.constexpr,
    STORE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel = channel < channels
    span, token = tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK_T)
    if not WHOLE:
        token += tl.load(block_place + span) * BLOCK_T
        span = tl.load(block_span + span)
    start, tokens, slot = tl.load(starts + span), tl.load(lens + span), tl.load(slots + span)
    is_one = (token < tokens)[:, None] & is_channel[None, :]
    out_at = out + (start + token[:, None]) * channels + channel[None, :]
    if slot < 0:
        tl.store(out_at, tl.zeros([BLOCK_T, BLOCK_C], out.dtype.element_ty), mask=is_one)
        return
    state = states + slot * channels * WIDTH
    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    if BIAS:
        total += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(WIDTH):
        scale = tl.load(weight + channel * WIDTH + tap, mask=is_channel, other=0.0).to(tl.float32)
        total += _raw(x, x_row, start, state, token + (tap + 1 - WIDTH), channel, is_one, WIDTH) * scale[None, :]
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out_at, total.to(out.dtype.element_ty), mask=is_one)
    if STORE:
        _move_on(x, x_row, start, state, tokens, channel, is_channel, WIDTH, COLUMNS)


@triton.jit(do_not_specialize_on_alignment=["starts", "lens", "slots"])
def _keep(
    x, states, starts, lens, slots, x_row, channels, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    span = tl.program_id(1)
    slot, tokens = tl.load(slots + span), tl.load(lens + span)
    if (slot >= 0) & (tokens > 0):
        state = states + slot * channels * WIDTH
        _move_on(x, x_row, tl.load(starts + span), state, tokens, channel, channel < channels, WIDTH, COLUMNS)


def convolve_in_place(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    varlen: VarlenBatch,
    blocks: VarlenBlocks | None,
    states: Tensor,
    out: Tensor,
    *,
    silu: bool,
    store: bool,
    overlap: bool = False,
) -> None:
    """Convolve each row of ``x`` ``[tokens, channels]`` with the rows before it, into ``out`` of the same shape.

    ``store`` advances the states ``[slots, channels, width]``. A program processes one of ``blocks`` or, without them,
    a whole sequence. ``overlap`` uses programmatic dependent launch.
    """
    if not varlen.rows:
        return
    x, weight = with_unit_stride(x), weight.contiguous()
    channels, width = weight.shape
    whole = blocks is None
    span, place = (None, None) if blocks is None else (blocks.sequence, blocks.place)
    programs = varlen.slots if span is None else span
    _convolve[(triton.cdiv(channels, _CHANNELS), programs.shape[0])](
        x,
        weight,
        bias,
        out,
        states,
        varlen.starts,
        varlen.lens,
        varlen.slots,
        span,
        place,
        x.stride(0),
        channels,
        WIDTH=width,
        COLUMNS=triton.next_power_of_2(width),
        BIAS=bias is not None,
        SILU=silu,
        WHOLE=whole,
        STORE=store and whole,
        BLOCK_T=triton.next_power_of_2(varlen.longest) if blocks is None else blocks.size,
        BLOCK_C=_CHANNELS,
        OVERLAP=overlap,
        **({"launch_pdl": True} if overlap else {}),
    )
    if store and not whole:
        keep_newest(x, varlen, states)


def keep_newest(x: Tensor, varlen: VarlenBatch, states: Tensor) -> None:
    """Advance the states by the sequences' rows of ``x``."""
    x = with_unit_stride(x)
    channels, width = states.shape[1:]
    _keep[(triton.cdiv(channels, _CHANNELS), varlen.slots.shape[0])](
        x,
        states,
        varlen.starts,
        varlen.lens,
        varlen.slots,
        x.stride(0),
        channels,
        WIDTH=width,
        COLUMNS=triton.next_power_of_2(width),
        BLOCK_C=_CHANNELS,
    )
