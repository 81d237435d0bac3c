"""Triton kernels of the recurrence, which update states in place: few tokens per request, as in decode and verify.

A state is read once and written once per request and head, whatever the number of tokens. Its bytes dominate: 128 x 128
floats are 64 KiB each way, and a token's query, key and value take less than one. So speed depends on the loads in
flight. A program processes all key channels of a few value columns, independently of other programs; there are
``heads * value_dim / BLOCK_V`` programs per request.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug.linear import LinearInputs
from attnplug_hybrid_linear.varlen import VarlenBatch, with_unit_stride

_FEW_HEADS = 512
"""Maximum heads over all requests for which small programs are faster, because large ones leave the device idle."""


@triton.jit(do_not_specialize_on_alignment=["starts", "lens", "slots"])
def _advance(
    q, k, v, log_decay, beta, out, states, starts, lens, slots, scale,
    q_row, q_head, k_row, k_head, v_row, v_head, decay_row, decay_head, beta_row,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BY_CHANNEL: tl.constexpr, DELTA: tl.constexpr, NORMALIZE: tl.constexpr, OUTPUT: tl.constexpr, STORE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    head, span = tl.program_id(1), tl.program_id(2)
    value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    key = tl.arange(0, BLOCK_K)
    is_value, is_key = value < VALUE_DIM, key < KEY_DIM
    row, tokens, slot = tl.load(starts + span), tl.load(lens + span), tl.load(slots + span)
    out_at = out + (row * HEADS + head) * VALUE_DIM + value
    if slot < 0:
        if OUTPUT:
            for _ in range(tokens):
                tl.store(out_at, tl.zeros([BLOCK_V], out.dtype.element_ty), mask=is_value)
                out_at += HEADS * VALUE_DIM
        return
    if tokens == 0:
        return

    is_state = is_key[:, None] & is_value[None, :]
    state_at = states + (slot * HEADS + head) * KEY_DIM * VALUE_DIM + key[:, None] * VALUE_DIM + value[None, :]
    state = tl.load(state_at, mask=is_state, other=0.0)
    key_head = head // (HEADS // KEY_HEADS)
    q_at, k_at = q + row * q_row + key_head * q_head + key, k + row * k_row + key_head * k_head + key
    v_at = v + row * v_row + head * v_head + value
    decay_at = log_decay + row * decay_row + head * decay_head
    beta_at = beta + row * beta_row + head
    for _ in range(tokens):
        key_row = tl.load(k_at, mask=is_key, other=0.0).to(tl.float32)
        write = tl.load(v_at, mask=is_value, other=0.0).to(tl.float32)
        if NORMALIZE:
            key_row = key_row / tl.sqrt(tl.sum(key_row * key_row, 0) + 1e-6)
        if BY_CHANNEL:
            state *= tl.exp(tl.load(decay_at + key, mask=is_key, other=0.0).to(tl.float32))[:, None]
        else:
            state *= tl.exp(tl.load(decay_at).to(tl.float32))
        if DELTA:
            found = tl.sum(state * key_row[:, None], 0)
            write = (write - found) * tl.load(beta_at).to(tl.float32)
        state += key_row[:, None] * write[None, :]
        if OUTPUT:
            query = tl.load(q_at, mask=is_key, other=0.0).to(tl.float32)
            if NORMALIZE:
                query = query / tl.sqrt(tl.sum(query * query, 0) + 1e-6)
            result = tl.sum(state * (query * scale)[:, None], 0)
            tl.store(out_at, result.to(out.dtype.element_ty), mask=is_value)
        q_at += q_row
        k_at += k_row
        v_at += v_row
        out_at += HEADS * VALUE_DIM
        decay_at += decay_row
        beta_at += beta_row
    if STORE:
        tl.store(state_at, state, mask=is_state)


def advance_in_place(
    inputs: LinearInputs,
    scale: float,
    varlen: VarlenBatch,
    states: Tensor,
    *,
    out: Tensor | None,
    store: bool,
    overlap: bool = False,
    invariant: bool = False,
) -> None:
    """Advance the states at the sequences' slots by their rows, and write ``out`` ``[tokens, heads, value_dim]``.

    Without ``store`` the states are not written. ``overlap`` uses programmatic dependent launch. ``invariant``: one
    configuration serves all batches.
    """
    if not varlen.rows:
        return
    heads, key_dim, value_dim = states.shape[1:]
    q, k, v, decay = map(with_unit_stride, (inputs.q, inputs.k, inputs.v, inputs.log_decay))
    beta = decay if inputs.beta is None else with_unit_stride(inputs.beta)  # not read without a delta rule
    per_token, by_channel = decay.dim() > 1, decay.dim() == 3
    block_v, warps = _configuration(1 if invariant else heads * varlen.slots.shape[0], by_channel)
    _advance[(triton.cdiv(value_dim, block_v), heads, varlen.slots.shape[0])](
        q,
        k,
        v,
        decay,
        beta,
        v if out is None else out,
        states,
        varlen.starts,
        varlen.lens,
        varlen.slots,
        scale,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        decay.stride(0) if per_token else 0,
        decay.stride(1) if per_token else 1,
        beta.stride(0),
        HEADS=heads,
        KEY_HEADS=q.shape[1],
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BY_CHANNEL=by_channel,
        DELTA=inputs.beta is not None,
        NORMALIZE=inputs.normalize,
        OUTPUT=out is not None,
        STORE=store,
        BLOCK_K=triton.next_power_of_2(key_dim),
        BLOCK_V=block_v,
        OVERLAP=overlap,
        num_warps=warps,
        **({"launch_pdl": True} if overlap else {}),
    )


def _configuration(heads: int, by_channel: bool) -> tuple[int, int]:
    """Return value columns and warps per program: fastest of eleven on an H200, 128 x 128 states, 1–256 requests."""
    if heads <= _FEW_HEADS:
        return 16, 1
    return (32, 1) if by_channel else (64, 4)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _copy_states(states, slots, values, size, STORE: tl.constexpr, BLOCK: tl.constexpr):
    slot = tl.load(slots + tl.program_id(1))
    if slot >= 0:
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        state, value = states + slot * size + place, values + tl.program_id(1).to(tl.int64) * size + place
        if STORE:
            tl.store(state, tl.load(value, mask=place < size), mask=place < size)
        else:
            tl.store(value, tl.load(state, mask=place < size), mask=place < size)


def take_states(states: Tensor, varlen: VarlenBatch) -> Tensor:
    """Return copies ``[sequences, …]`` float32 of the states at the sequences' slots. Those of padded sequences are
    uninitialized: a captured extend may have many, and copying 2 MiB for each would take longer than its kernels."""
    values = states.new_empty(varlen.slots.shape[0], *states.shape[1:])
    _launch_copy(states, varlen, values, store=False)
    return values


def put_states(states: Tensor, varlen: VarlenBatch, values: Tensor) -> None:
    """Write ``values`` ``[sequences, …]`` float32 to the sequences' slots, except for padded ones."""
    _launch_copy(states, varlen, values, store=True)


def _launch_copy(states: Tensor, varlen: VarlenBatch, values: Tensor, *, store: bool) -> None:
    size, block = states[0].numel(), 1024
    grid = (triton.cdiv(size, block), values.shape[0])
    _copy_states[grid](states, varlen.slots, values, size, STORE=store, BLOCK=block)


@triton.jit(do_not_specialize_on_alignment=["starts", "lens", "slots"])
def _clear(out, starts, lens, slots, width, BLOCK: tl.constexpr):
    span = tl.program_id(0)
    if tl.load(slots + span) < 0:
        row, end = tl.load(starts + span), tl.load(starts + span) + tl.load(lens + span)
        for at in range(row * width + tl.program_id(1) * BLOCK, end * width, tl.num_programs(1) * BLOCK):
            place = at + tl.arange(0, BLOCK)
            tl.store(out + place, tl.zeros([BLOCK], out.dtype.element_ty), mask=place < end * width)


def clear_padded(out: Tensor, varlen: VarlenBatch) -> None:
    """Zero the rows of padded requests in ``out`` ``[tokens, …]``."""
    width, block = out[0].numel(), 1024
    # The padding rows of a captured extend may be most of its rows, and are one sequence.
    programs = min(triton.cdiv(varlen.rows * width, 32 * block), 64)
    _clear[varlen.slots.shape[0], programs](out, varlen.starts, varlen.lens, varlen.slots, width, BLOCK=block)
