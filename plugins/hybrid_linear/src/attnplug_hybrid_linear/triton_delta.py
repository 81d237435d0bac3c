"""Fused decode of a delta-rule layer in one Triton kernel: convolution, gates, recurrence and gated norm.

One program processes one head of one request, because the norm is over all value columns of a head. It reads and writes
the head's state once: 64 KiB each way for 128 x 128 floats. With programmatic dependent launch it loads states and
weights before it waits for the kernel that projects the rows. That requires state slots that no overlapped kernel
writes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug.linear import DeltaInputs
from attnplug_hybrid_linear.triton_convolution import _move_on
from attnplug_hybrid_linear.varlen import VarlenBatch, with_unit_stride

MAX_STATE = 128 * 256
"""Maximum elements of a head's state that a program holds in registers."""
_FEW_HEADS = 128
"""Maximum heads over all requests for which a program loads its whole state at once."""
_COLUMNS = 32
_PER_WARP = 4096
"""State elements per warp: 128 registers per thread.

With more threads than channels, the compiler would repeat channel loads in every thread, and spill.
"""


@triton.jit
def _before(state, weight, channel, was_one, is_one, WIDTH: tl.constexpr):
    """Return the state rows' contribution to the next row's convolution, and the next row's own weight."""
    total = tl.zeros([channel.shape[0]], tl.float32)
    for tap in tl.static_range(WIDTH - 1):
        old = tl.load(state + channel * WIDTH + tap + 1, mask=was_one, other=0.0).to(tl.float32)
        total += old * tl.load(weight + channel * WIDTH + tap, mask=is_one, other=0.0).to(tl.float32)
    return total, tl.load(weight + channel * WIDTH + WIDTH - 1, mask=is_one, other=0.0).to(tl.float32)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x):
    """Softplus as in torch. The quotient corrects the rounding of ``1 + exp(x)``, which would lose small decays."""
    power = tl.exp(tl.minimum(x, 20.0))
    above = 1.0 + power
    exact = tl.where(above == 1.0, power, tl.log(above) * (power / tl.where(above == 1.0, 1.0, above - 1.0)))
    return tl.where(x > 20.0, x, exact)


@triton.jit
def _convolved(row, channel, is_one, before, weight):
    new = tl.load(row + channel, mask=is_one, other=0.0)
    total = before + new.to(tl.float32) * weight
    return (total * _sigmoid(total)).to(new.dtype).to(tl.float32)


@triton.jit
def _unit(x):
    return x / tl.sqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _decode(
    rows, conv, conv_states, decay, rate, bias, beta, gate, norm, out, states, slots, counters, scale, eps,
    row_stride, decay_row, decay_head, beta_row, gate_row, gate_head,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr, TAPS: tl.constexpr, BY_CHANNEL: tl.constexpr, SILU: tl.constexpr,
    BLOCK_K: tl.constexpr, WHOLE_V: tl.constexpr, BLOCK_V: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    SHARED: tl.constexpr = HEADS // KEY_HEADS
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    PARTS: tl.constexpr = WHOLE_V // BLOCK_V
    if OVERLAP:
        gdc_launch_dependents()  # the next kernel may start, and waits for our last store
    head, request = tl.program_id(0), tl.program_id(1)
    key_head = head // SHARED
    key, place, value = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V), tl.arange(0, WHOLE_V)
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    slot = tl.load(slots + request)
    keys, values = tl.where(slot < 0, 0, KEY_DIM), tl.where(slot < 0, 0, VALUE_DIM)
    was_key = key < keys

    state_at = states + (slot * HEADS + head) * KEY_DIM * VALUE_DIM + key[:, None] * VALUE_DIM + place[None, :]
    state = tl.load(state_at, mask=was_key[:, None] & (place < values)[None, :], other=0.0)
    conv_state = conv_states + slot * (2 * KEYS + HEADS * VALUE_DIM) * WIDTH
    q_channel = key_head * KEY_DIM + key
    k_channel = KEYS + q_channel
    v_channel = 2 * KEYS + head * VALUE_DIM + place
    q_before, q_weight = _before(conv_state, conv, q_channel, was_key, is_key, WIDTH)
    k_before, k_weight = _before(conv_state, conv, k_channel, was_key, is_key, WIDTH)
    v_before, v_weight = _before(conv_state, conv, v_channel, place < values, place < VALUE_DIM, WIDTH)
    head_rate = tl.load(rate + head)
    head_bias = tl.load(bias + head * KEY_DIM + key, mask=is_key, other=0.0) if BY_CHANNEL else tl.load(bias + head)
    norm_weight = tl.load(norm + value, mask=is_value, other=0.0)

    if OVERLAP:
        gdc_wait()  # also without work: the next kernel waits for this one alone
    out_at = out + (request * HEADS + head) * VALUE_DIM
    if slot < 0:
        tl.store(out_at + value, tl.zeros([WHOLE_V], out.dtype.element_ty), mask=is_value)
        return

    row = rows + request * row_stride
    query = _convolved(row, q_channel, is_key, q_before, q_weight)
    key_row = _convolved(row, k_channel, is_key, k_before, k_weight)
    raw_beta = tl.load(beta + request * beta_row + head)
    strength = _sigmoid(raw_beta.to(tl.float32)).to(raw_beta.dtype).to(tl.float32)
    decay_at = decay + request * decay_row + head * decay_head
    raw_decay = tl.load(decay_at + key, mask=is_key, other=0.0) if BY_CHANNEL else tl.load(decay_at)
    kept = tl.exp(head_rate * _softplus(raw_decay.to(tl.float32) + head_bias))
    opened = tl.load(gate + request * gate_row + head * gate_head + value, mask=is_value, other=0.0).to(tl.float32)

    # Heads with the same key head read its convolution's state. Who counts last knows that all have read it: the
    # barrier orders a program's own loads before its count, and the count is a release and an acquire.
    is_last = True
    if SHARED > 1:
        counter = counters + request * KEY_HEADS + key_head
        tl.debug_barrier()
        is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SHARED - 1
        if is_last:
            tl.store(counter, 0)

    query, key_row = _unit(query) * scale, _unit(key_row)
    product = tl.sum(query * key_row, 0)
    for part in tl.static_range(PARTS):
        is_place = place < VALUE_DIM - part * BLOCK_V
        if part + 1 < PARTS:  # the next columns are on their way while these are computed
            is_next = place < VALUE_DIM - (part + 1) * BLOCK_V
            next_at = (part + 1) * BLOCK_V
            following = tl.load(state_at + next_at, mask=is_key[:, None] & is_next[None, :], other=0.0)
            next_before, next_weight = _before(conv_state, conv, v_channel + next_at, is_next, is_next, WIDTH)
        write = _convolved(row, v_channel + part * BLOCK_V, is_place, v_before, v_weight)
        state = state * (kept[:, None] if BY_CHANNEL else kept)
        # Both sums over the old state at once: the new one differs from it by a product of two vectors.
        found = tl.sum(state * key_row[:, None], 0)
        seen = tl.sum(state * query[:, None], 0)
        write = (write - found) * strength
        is_state = is_key[:, None] & is_place[None, :]
        tl.store(state_at + part * BLOCK_V, state + key_row[:, None] * write[None, :], mask=is_state)
        result = (seen + product * write).to(out.dtype.element_ty)
        if PARTS > 1:
            tl.store(out_at + part * BLOCK_V + place, result, mask=is_place)
        if part + 1 < PARTS:
            state, v_before, v_weight = following, next_before, next_weight

    if PARTS > 1:
        tl.debug_barrier()  # every thread finds what the others have stored
        result = tl.load(out_at + value, mask=is_value, other=0.0)
    result = result.to(tl.float32)
    normed = result * tl.rsqrt(tl.sum(result * result, 0) / VALUE_DIM + eps) * norm_weight
    opened = (opened if SILU else 1.0) * _sigmoid(opened)
    if PARTS > 1:
        tl.debug_barrier()
    tl.store(out_at + value, (normed * opened).to(out.dtype.element_ty), mask=is_value)

    v_channels = 2 * KEYS + head * VALUE_DIM + value
    _move_on(row, 0, 0, conv_state, 1, v_channels, is_value, WIDTH, TAPS)
    if is_last:
        _move_on(row, 0, 0, conv_state, 1, q_channel, is_key, WIDTH, TAPS)
        _move_on(row, 0, 0, conv_state, 1, k_channel, is_key, WIDTH, TAPS)


def decode_delta(
    inputs: DeltaInputs,
    scale: float,
    key_heads: int,
    varlen: VarlenBatch,
    conv_states: Tensor,
    states: Tensor,
    counters: Tensor,
    out: Tensor,
    *,
    overlap: bool,
) -> None:
    """Advance both states of every request by one row and write ``out`` ``[tokens, heads * value_dim]``.

    Row n belongs to the n-th sequence, as in a decode. ``counters`` ``[requests * key_heads]`` int32 are zero before
    and after. ``overlap`` uses programmatic dependent launch (SM 90 and newer).
    """
    heads, key_dim, value_dim = states.shape[1:]
    weights = inputs.weights
    rows, decay, beta, gate = map(with_unit_stride, (inputs.rows, inputs.decay, inputs.beta, inputs.gate))
    block_k, whole_v = triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim)
    columns, warps = _choose_tile(heads * varlen.rows, block_k, whole_v)
    width, by_channel = weights.conv.shape[1], decay.dim() == 3
    # Left out where it is off, because the interpreter does not know it.
    launch = {"launch_pdl": True} if overlap else {}
    _decode[(heads, varlen.rows)](
        rows,
        weights.conv,
        conv_states,
        decay,
        weights.rate,
        weights.bias,
        beta,
        gate,
        weights.norm,
        out,
        states,
        varlen.slots,
        counters,
        scale,
        weights.eps,
        rows.stride(0),
        decay.stride(0),
        decay.stride(1),
        beta.stride(0),
        *gate.stride()[:2],
        HEADS=heads,
        KEY_HEADS=key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        WIDTH=width,
        TAPS=triton.next_power_of_2(width),
        BY_CHANNEL=by_channel,
        SILU=weights.silu,
        BLOCK_K=block_k,
        WHOLE_V=whole_v,
        BLOCK_V=min(columns, whole_v),
        OVERLAP=overlap,
        num_warps=warps,
        **launch,
    )


def _choose_tile(heads: int, block_k: int, whole_v: int) -> tuple[int, int]:
    """Return the state columns per load and the warps of a program.

    With few heads the whole state is loaded at once. With more heads than the device runs concurrently, a program
    pipelines its state by columns, and needs half of the registers.
    """
    if heads <= _FEW_HEADS:
        return whole_v, min(max(block_k * whole_v // _PER_WARP, 1), 16)
    return _COLUMNS, 2
