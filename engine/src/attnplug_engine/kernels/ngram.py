"""N-gram drafts: one launch that appends new tokens, and two that search for a proposal.

The search reads a whole context, in blocks, so that a single request keeps many multiprocessors busy. Each block finds
its best occurrences; then one program per request takes the best of all. Blocks behind the known tokens exit at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_engine.kernels import launch_options

BLOCK = 2048
LENGTHS = 1 << 32
"""A value is the length of an occurrence times this, plus the position of its end."""


@triton.jit(do_not_specialize_on_alignment=["rows", "lengths", "tokens", "counts"])
def _append(
    history, history_row, context, rows, lengths, tokens, counts,
    NODES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_wait()
    request, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    row, start = tl.load(rows + request).to(tl.int64), tl.load(lengths + request).to(tl.int64)
    is_one = (place < tl.load(counts + request)) & (place < NODES) & (start + place < context)
    token = tl.maximum(tl.load(tokens + request * NODES + place, mask=is_one, other=0), 0)
    tl.store(history + row * history_row + start + place, token.to(tl.int32), mask=is_one)


@triton.jit(do_not_specialize_on_alignment=["rows", "lengths"])
def _search(
    history, history_row, context, rows, lengths, values,
    LEAST: tl.constexpr, MOST: tl.constexpr, TOPK: tl.constexpr, LENGTHS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program per request and block: the best values of occurrences that end in it, with different next tokens."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    request, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    values += (request * tl.num_programs(1) + block) * TOPK
    known = tl.load(lengths + request).to(tl.int64)
    if (known > context) | (block * BLOCK >= known - 1):
        for each in tl.static_range(TOPK):
            tl.store(values + each, tl.full([], -1, tl.int64))
    else:
        history += tl.load(rows + request).to(tl.int64) * history_row
        place = block * BLOCK + tl.arange(0, BLOCK)
        alike, length = place < known - 1, tl.zeros([BLOCK], tl.int64)
        for back in tl.static_range(MOST):
            suffix = tl.load(history + known - 1 - back, mask=known > back, other=-2)
            alike = alike & (place >= back)
            alike = alike & (tl.load(history + place - back, mask=alike, other=-1) == suffix)
            length += alike.to(tl.int64)
        value = tl.where(length >= LEAST, length * LENGTHS + place, -1)
        following = tl.load(history + place + 1, mask=place < known - 1, other=-1)
        for each in tl.static_range(TOPK):
            best = tl.max(value, 0)
            tl.store(values + each, best)
            if each + 1 < TOPK:
                token = tl.load(history + (best & (LENGTHS - 1)) + 1, mask=best >= 0, other=-1)
                value = tl.where(following == token, -1, value)


@triton.jit(do_not_specialize_on_alignment=["rows", "lengths", "tokens", "parents"])
def _propose(
    history, history_row, rows, lengths, values, count, tokens, parents,
    STEPS: tl.constexpr, TOPK: tl.constexpr, LENGTHS: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program per request: the tokens behind the best of its ``count`` values."""
    if EARLY:
        gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    known, each = tl.load(lengths + request).to(tl.int64), tl.arange(0, VALUES)
    history += tl.load(rows + request).to(tl.int64) * history_row
    value = tl.load(values + request * count + each, mask=each < count, other=-1)
    following = tl.load(history + (value & (LENGTHS - 1)) + 1, mask=value >= 0, other=-1)
    step = tl.arange(0, BLOCK)
    tokens += request * STEPS * TOPK
    for chain in tl.static_range(TOPK):
        best = tl.max(value, 0)
        end = best & (LENGTHS - 1)
        followed = tl.maximum(known - 1 - end, 1)
        token = tl.load(history + end + 1 + step % followed, mask=step < tl.where(best >= 0, STEPS, 0), other=-1)
        tl.store(tokens + step * TOPK + chain, token.to(tl.int64), mask=step < STEPS)
        if TOPK > 1:
            first = tl.load(history + end + 1, mask=best >= 0, other=-1)
            value = tl.where(following == first, -1, value)
    if TOPK > 1:
        for chain in tl.static_range(TOPK):
            node = step * TOPK + chain
            parent = tl.maximum(node + 1 - TOPK, 0).to(tl.int64)
            tl.store(parents + request * STEPS * TOPK + node, parent, mask=step < STEPS)


def append(history: Tensor, rows: Tensor, lengths: Tensor, tokens: Tensor, counts: Tensor) -> None:
    """Launch ``attnplug_engine.speculation.ngram.History.append``."""
    requests, nodes = tokens.shape
    _append[requests,](
        history, history.stride(0), history.shape[1], rows, lengths, tokens.contiguous(), counts,
        NODES=nodes, BLOCK=triton.next_power_of_2(nodes), num_warps=1, **launch_options(history.device),
    )  # fmt: skip


def propose(
    history: Tensor, rows: Tensor, lengths: Tensor, steps: int, topk: int, most: int, least: int
) -> tuple[Tensor, Tensor | None]:
    """Return tokens and parents, like ``attnplug_engine.speculation.ngram.History.propose``."""
    requests, context = rows.shape[0], history.shape[1]
    blocks = triton.cdiv(context, BLOCK)
    values = torch.empty(requests, blocks * topk, dtype=torch.int64, device=history.device)
    tokens = torch.empty(requests, steps * topk, dtype=torch.int64, device=history.device)
    parents = tokens if topk == 1 else torch.empty_like(tokens)
    options = launch_options(history.device)
    _search[requests, blocks](
        history, history.stride(0), context, rows, lengths, values,
        LEAST=least, MOST=most, TOPK=topk, LENGTHS=LENGTHS, BLOCK=BLOCK, num_warps=8, **options,
    )  # fmt: skip
    _propose[requests,](
        history, history.stride(0), rows, lengths, values, blocks * topk, tokens, parents,
        STEPS=steps, TOPK=topk, LENGTHS=LENGTHS, VALUES=triton.next_power_of_2(blocks * topk),
        BLOCK=triton.next_power_of_2(steps), num_warps=4 if blocks * topk > 128 else 1, **options,
    )  # fmt: skip
    return tokens, None if topk == 1 else parents
