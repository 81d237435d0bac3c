"""Kernels that score index keys and find the slots of the best. Imported where there is a CUDA device, and by tests."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnplug_flashmla.sparse_planner import Tokens

_BLOCK = 128
_SPAN = 4
"""Blocks of keys that one program scores, one after the other, with queries that it loads once."""
_COLUMNS = 1024


@triton.jit
def _score_keys(
    q, weights, keys, scales, table, owner, visible, scores, q_row, q_head, weights_row, table_row, scores_row, longest,
    scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, FP8: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """One token and ``SPAN`` blocks of keys. A page in fp8 has all its keys and then all their scales."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * (BLOCK * SPAN)
    seen = tl.load(visible + row)
    target = scores + row * scores_row
    if first >= seen:
        for block in range(SPAN):
            place = first + block * BLOCK + tl.arange(0, BLOCK)
            tl.store(target + place, tl.full([BLOCK], float("-inf"), tl.float32), mask=place < longest)
    else:
        head, column = tl.arange(0, HEAD_BLOCK), tl.arange(0, DIM_BLOCK)
        real = head < HEADS
        query = tl.load(
            q + row * q_row + head[None, :] * q_head + column[:, None],
            mask=real[None, :] & (column < DIM)[:, None],
            other=0.0,
        )
        # Scales are positive, so what relu is given and what it gives may be multiplied by them alike.
        weight = tl.load(weights + row * weights_row + head, mask=real, other=0.0) * scale
        pages = table + tl.load(owner + row).to(tl.int64) * table_row
        for block in range(SPAN):
            place = first + block * BLOCK + tl.arange(0, BLOCK)
            live = place < seen
            page = tl.load(pages + place // PAGE_SIZE, mask=live, other=0).to(tl.int64)
            offset = place % PAGE_SIZE
            source = keys + (page * PAGE_STRIDE + offset * DIM)[:, None] + column[None, :]
            key = tl.load(source, mask=live[:, None] & (column < DIM)[None, :], other=0.0).to(query.dtype)
            score = tl.sum(tl.maximum(tl.dot(key, query), 0.0) * weight[None, :], 1)
            if FP8:
                where = scales + page * (PAGE_STRIDE // 4) + PAGE_SIZE * DIM // 4 + offset
                score *= tl.load(where, mask=live, other=0.0)
            tl.store(target + place, tl.where(live, score, float("-inf")), mask=place < longest)


@triton.jit
def _place_rows(
    chosen, table, owner, visible, found, chosen_row, table_row, found_row, width, topk,
    PAGE_SIZE: tl.constexpr, ANY: tl.constexpr, BY_SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seen = tl.load(visible + row)
    exists = (column < seen) & (column < topk)
    position = column
    if ANY:
        picked = tl.load(chosen + row * chosen_row + column, mask=exists, other=0).to(tl.int32)
        position = tl.where(seen > topk, picked, column)
    if BY_SLOTS:
        pages = table + tl.load(owner + row).to(tl.int64) * table_row
        page = tl.load(pages + position // PAGE_SIZE, mask=exists, other=0)
        position = page * PAGE_SIZE + position % PAGE_SIZE
    tl.store(found + row * found_row + column, tl.where(exists, position, -1), mask=column < width)


def launch_score_keys(q: Tensor, weights: Tensor, keys: Tensor, fp8: bool, scale: float, tokens: Tokens) -> Tensor:
    """As ``scoring.score_keys``; ``keys`` are the pool's own memory ``[pages, page_size, …]``."""
    (rows, heads, dim), page_stride = q.shape, keys.stride(0)
    scores = torch.empty(rows, tokens.longest, dtype=torch.float32, device=q.device)
    if not rows:
        return scores
    q = q if q.stride(2) == 1 else q.contiguous()
    weights = weights if weights.stride(1) == 1 else weights.contiguous()
    values, scales = (keys.view(torch.float8_e4m3fn), keys.view(torch.float32)) if fp8 else (keys, weights)
    _score_keys[rows, triton.cdiv(tokens.longest, _BLOCK * _SPAN)](
        q,
        weights,
        values,
        scales,
        tokens.table,
        tokens.owner,
        tokens.visible,
        scores,
        *q.stride()[:2],
        weights.stride(0),
        tokens.table.stride(0),
        scores.stride(0),
        tokens.longest,
        scale,
        HEADS=heads,
        DIM=dim,
        PAGE_SIZE=tokens.page_size,
        PAGE_STRIDE=page_stride,
        FP8=fp8,
        HEAD_BLOCK=max(16, triton.next_power_of_2(heads)),
        DIM_BLOCK=max(16, triton.next_power_of_2(dim)),
        BLOCK=_BLOCK,
        SPAN=_SPAN,
        num_warps=4,
    )
    return scores


def launch_place_rows(chosen: Tensor | None, tokens: Tokens, topk: int, found: Tensor, by_slots: bool) -> None:
    """As ``scoring.place_rows``."""
    rows, width = found.shape
    if not rows:
        return
    _place_rows[rows, triton.cdiv(width, _COLUMNS)](
        found if chosen is None else chosen,
        tokens.table,
        tokens.owner,
        tokens.visible,
        found,
        0 if chosen is None else chosen.stride(0),
        tokens.table.stride(0),
        found.stride(0),
        width,
        topk,
        PAGE_SIZE=tokens.page_size,
        ANY=chosen is not None,
        BY_SLOTS=by_slots,
        BLOCK=_COLUMNS,
    )
