"""Growth of a draft tree: one launch per level, and one for the tree of the best candidates.

One program per request. The rank of a candidate is the number of better ones: larger, or equal and earlier. They are
compared in chunks, so that any number of them fits in registers. As in ``trees``, no kernel lets the next one start
early, and none is specialized for an alignment.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from attnplug_engine.kernels import launch_options

CHUNK = 32


@triton.jit
def _copy(source, target, count, BLOCK: tl.constexpr):
    for start in range(0, count, BLOCK):
        each = start + tl.arange(0, BLOCK)
        tl.store(target + each, tl.load(source + each, mask=each < count), mask=each < count)


@triton.jit
def _better(score, each, other_score, other):
    """Return ``[others, candidates]``: True if the other is better than the candidate."""
    above, equal = other_score[:, None] > score[None, :], other_score[:, None] == score[None, :]
    return above | (equal & (other[:, None] < each[None, :]))


@triton.jit
def _score(gains, scores, each, COUNT: tl.constexpr, TOPK: tl.constexpr, ROOT: tl.constexpr):
    """Return the candidates' gains, at most 0 and -inf for NaN, plus their parents' scores."""
    gain = tl.load(gains + each, mask=each < COUNT, other=float("-inf"))
    gain = tl.where(gain != gain, float("-inf"), tl.minimum(gain, 0.0))
    if not ROOT:
        gain += tl.load(scores + each // TOPK, mask=each < COUNT, other=0.0)
    return gain


@triton.jit(do_not_specialize=["rows", "count"], do_not_specialize_on_alignment=range(18))
def _grow(
    children, gains, scores, numbers, tokens, bits, all_tokens, all_scores, all_parents, rows, count,
    new_scores, new_numbers, new_tokens, new_bits, new_all_tokens, new_all_scores, new_all_parents,
    TOPK: tl.constexpr, ROOT: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Add ``COUNT`` candidates to ``count``; ``TOPK`` of them survive and become rows behind the existing ``rows``."""
    if EARLY:
        gdc_wait()
    request, each = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    is_one = each < COUNT
    gains += request * COUNT
    scores += request * TOPK
    score = _score(gains, scores, each, COUNT, TOPK, ROOT)
    place = tl.zeros([BLOCK], tl.int32)
    for start in range(0, COUNT, CHUNK):
        other = start + tl.arange(0, CHUNK)
        better = _better(score, each, _score(gains, scores, other, COUNT, TOPK, ROOT), other)
        place += tl.sum(better.to(tl.int32), 0)
    lives = is_one & (place < TOPK)
    token = tl.load(children + request * COUNT + each, mask=is_one)
    seen = tl.full([BLOCK], 1, tl.int64) << (rows + place).to(tl.int64)
    parent = tl.zeros([BLOCK], tl.int64)
    if not ROOT:
        seen |= tl.load(bits + request * rows + rows - TOPK + each // TOPK, mask=lives, other=0)
        parent = tl.load(numbers + request * TOPK + each // TOPK, mask=is_one)
    tl.store(new_scores + request * TOPK + place, score, mask=lives)
    tl.store(new_numbers + request * TOPK + place, (count + 1 + each).to(tl.int64), mask=lives)
    total, old = request * (rows + TOPK), request * rows
    tl.store(new_tokens + total + rows + place, token, mask=lives)
    tl.store(new_bits + total + rows + place, seen, mask=lives)
    _copy(tokens + old, new_tokens + total, rows, BLOCK)
    _copy(bits + old, new_bits + total, rows, BLOCK)
    total, old = request * (count + COUNT), request * count
    tl.store(new_all_tokens + total + count + each, token, mask=is_one)
    tl.store(new_all_scores + total + count + each, score, mask=is_one)
    tl.store(new_all_parents + total + count + each, parent, mask=is_one)
    _copy(all_tokens + old, new_all_tokens + total, count, BLOCK)
    _copy(all_scores + old, new_all_scores + total, count, BLOCK)
    _copy(all_parents + old, new_all_parents + total, count, BLOCK)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=range(6))
def _prune(
    tokens, scores, parents, count, proposed, proposed_parents,
    NODES: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the tree of the best ``NODES - 1`` of ``count`` candidates, in their order."""
    if EARLY:
        gdc_wait()
    request, each = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    is_one, first = each < count, request * count
    score = tl.load(scores + first + each, mask=is_one, other=float("-inf"))
    parent = tl.load(parents + first + each, mask=is_one, other=0)
    taken, node, above = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, count, CHUNK):
        other = start + tl.arange(0, CHUNK)
        other_score = tl.load(scores + first + other, mask=other < count, other=float("-inf"))
        place = tl.sum(_better(other_score, other, score, each).to(tl.int32), 0)
        is_taken = ((place < NODES - 1) & (other < count))[:, None]
        taken += tl.sum((is_taken & (other[:, None] == each[None, :])).to(tl.int32), 0)
        node += tl.sum((is_taken & (other[:, None] < each[None, :])).to(tl.int32), 0)
        # Candidate i has number i + 1, so the parent itself is counted, too.
        above += tl.sum((is_taken & (other[:, None] < parent[None, :])).to(tl.int32), 0)
    target = request * (NODES - 1) + node
    token = tl.load(tokens + first + each, mask=is_one)
    tl.store(proposed + target, token, mask=taken > 0)
    tl.store(proposed_parents + target, above.to(tl.int64), mask=taken > 0)


Grown = tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]


def grow(
    tokens: Tensor,
    logprobs: Tensor,
    rows: tuple[Tensor, Tensor],
    newest: tuple[Tensor, Tensor] | None,
    candidates: tuple[Tensor, Tensor, Tensor],
) -> Grown:
    """Add a level, like ``attnplug_engine.speculation.tree.TreeGrowth.grow``.

    ``rows`` are tokens and masks of rows, ``newest`` the scores and numbers of the newest level, if there is one, and
    ``candidates`` the tokens, scores and parents of all. Returns new tensors for each.
    """
    requests, topk, count = candidates[0].shape[0], tokens.shape[1], candidates[0].shape[1]
    added, width = tokens.numel() // requests, rows[0].shape[1]

    def whole(columns: int) -> Tensor:
        return torch.empty(requests, columns, dtype=torch.int64, device=tokens.device)

    def real(columns: int) -> Tensor:
        return torch.empty(requests, columns, dtype=torch.float32, device=tokens.device)

    made = real(topk), whole(topk), whole(width + topk), whole(width + topk)
    found = whole(count + added), real(count + added), whole(count + added)
    block = max(triton.next_power_of_2(added), 2)
    _grow[requests,](
        tokens.contiguous(), logprobs.contiguous(), *(newest or made[:2]), *rows, *candidates, width, count,
        *made, *found,
        TOPK=topk, ROOT=newest is None, COUNT=added, BLOCK=block, CHUNK=min(CHUNK, block),
        num_warps=1 if block <= 16 else 4, **launch_options(tokens.device),
    )  # fmt: skip
    scores, numbers, grown, bits = made
    return grown, bits, scores, numbers, found


def prune(tokens: Tensor, scores: Tensor, parents: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Return tokens and parents of the tree of the best candidates, like ``TreeGrowth.proposal``."""
    requests, count = tokens.shape
    proposed, above = torch.empty(2, requests, nodes - 1, dtype=torch.int64, device=tokens.device)
    block = max(triton.next_power_of_2(count), 2)
    _prune[requests,](
        tokens, scores, parents, count, proposed, above,
        NODES=nodes, BLOCK=block, CHUNK=min(CHUNK, block), num_warps=1 if block <= 16 else 4 if block <= 256 else 8,
        **launch_options(tokens.device),
    )  # fmt: skip
    return proposed, above
