"""Expert routing: norm and scores in one kernel, the choice in another.

The choice is that of ``attnplug_engine.models.experts.Router.choose``, the best expert first; of equal ones the lower.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_engine.kernels import launch_options

FEW = 16
"""Most tokens that one kernel norms and scores; with more, a matrix product that reads the weight once is faster."""
MAX_EXPERTS = 1024
_TILE = 8192


@triton.jit
def _score(
    x, x_row, norm, weight, normed, logits, eps,
    HIDDEN: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, NORM: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    place = tl.arange(0, BLOCK)
    is_one = place < HIDDEN
    weights = tl.load(
        weight + tl.minimum(column, COUNT - 1)[:, None] * HIDDEN + place[None, :], mask=is_one[None, :], other=0.0
    ).to(tl.float32)
    if NORM:
        factor = tl.load(norm + place, mask=is_one, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(x + token * x_row + place, mask=is_one, other=0.0)
    if NORM:
        value = row.to(tl.float32)
        scale = 1.0 / tl.sqrt_rn(tl.sum(value * value, 0) / HIDDEN + eps)
        row = (value * scale * factor).to(row.dtype)
        if tl.program_id(0) == 0:
            tl.store(normed + token * HIDDEN + place, row, mask=is_one)
    total = tl.sum(weights * row.to(tl.float32)[None, :], 1)
    tl.store(logits + token * COUNT + column, total, mask=column < COUNT)


@triton.jit
def _choose(
    logits, logits_row, bias, chosen, shares, scaling,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PER_TOKEN: tl.constexpr, SLOTS: tl.constexpr, SIGMOID: tl.constexpr,
    BIAS: tl.constexpr, NORMALISED: tl.constexpr, GROUP: tl.constexpr, TAKEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    is_one = expert < EXPERTS
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(logits + token * logits_row + expert, mask=is_one, other=-float("inf"))
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-value))
    else:
        scores = tl.exp(value - tl.max(value, 0))
        scores = scores / tl.sum(scores, 0)
    judged = scores
    if BIAS:
        judged += tl.load(bias + expert, mask=is_one, other=0.0)
    judged = tl.where(is_one, judged, -float("inf"))
    if GROUP:
        group = expert // GROUP
        best = tl.full([BLOCK], -float("inf"), tl.float32)
        for each in range(EXPERTS // GROUP):
            inside = tl.where(group == each, judged, -float("inf"))
            most, where = tl.max(inside, 0, return_indices=True)
            if SIGMOID:  # ranked by its two best
                most += tl.max(tl.where(expert == where, -float("inf"), inside), 0)
            best = tl.where(group == each, most, best)
        is_open = expert < 0
        for _ in range(TAKEN):
            _most, where = tl.max(best, 0, return_indices=True)
            is_open |= group == where // GROUP
            best = tl.where(group == where // GROUP, -float("inf"), best)
        judged = tl.where(is_open, judged, -float("inf"))
    slot = tl.arange(0, SLOTS)
    taken = tl.zeros([SLOTS], tl.int32)
    share = tl.zeros([SLOTS], tl.float32)
    for each in range(PER_TOKEN):
        most, where = tl.max(judged, 0, return_indices=True)
        where = tl.minimum(where, EXPERTS - 1)  # a row of NaN must choose a valid expert
        taken = tl.where(slot == each, where, taken)
        if BIAS:
            most = tl.sum(tl.where(expert == where, scores, 0.0), 0)
        share = tl.where(slot == each, most, share)
        judged = tl.where(expert == where, -float("inf"), judged)
    if NORMALISED:
        share = share / (tl.sum(share, 0) + 1e-20)
    tl.store(chosen + token * PER_TOKEN + slot, taken, mask=slot < PER_TOKEN)
    tl.store(shares + token * PER_TOKEN + slot, share * scaling, mask=slot < PER_TOKEN)


def score(x: Tensor, weight: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return ``x`` normed, ``[tokens, hidden]``, and its products with the rows of ``weight``, ``[tokens, rows]``
    float32.

    ``norm`` is the norm's weight ``[hidden]``; without it ``x`` is returned unchanged. For few tokens.
    """
    tokens, hidden = x.shape
    count = weight.shape[0]
    normed = x if norm is None else torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    logits = torch.empty(tokens, count, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(hidden)
    columns = max(_TILE // block, 1)
    _score[triton.cdiv(count, columns), tokens](
        x, x.stride(0), weight if norm is None else norm, weight, normed, logits, eps,
        HIDDEN=hidden, COUNT=count, BLOCK=block, COLUMNS=columns, NORM=norm is not None,
        num_warps=4 if block <= _TILE else 8, **launch_options(x.device),
    )  # fmt: skip
    return normed, logits


def choose(
    logits: Tensor,
    per_token: int,
    *,
    sigmoid: bool,
    bias: Tensor | None,
    normalised: bool,
    scaling: float,
    group: int = 0,
    taken: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return chosen experts int32 and their weights float32, both ``[tokens, per_token]``.

    ``logits`` are ``[tokens, experts]`` with any row stride. With ``group`` experts per group, only those of the
    ``taken`` best groups are eligible.
    """
    tokens, experts = logits.shape
    chosen = torch.empty(tokens, per_token, dtype=torch.int32, device=logits.device)
    shares = torch.empty(tokens, per_token, dtype=torch.float32, device=logits.device)
    block = triton.next_power_of_2(experts)
    _choose[tokens,](
        logits, logits.stride(0), logits if bias is None else bias, chosen, shares, scaling,
        EXPERTS=experts, BLOCK=block, PER_TOKEN=per_token, SLOTS=triton.next_power_of_2(per_token), SIGMOID=sigmoid,
        BIAS=bias is not None, NORMALISED=normalised, GROUP=group, TAKEN=taken,
        num_warps=1 if block <= 512 else 4, **launch_options(logits.device),
    )  # fmt: skip
    return chosen, shares
