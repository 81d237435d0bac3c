"""The best rows of every new token by their scores, and where they lie in the cache: one program per token.

Nothing is sorted. A threshold is found by halving the range between the least and the largest score, in the order of
their bits, and counting what is above. Numbers that fit in registers are read once. To make them few, a row of more
than ``GROUP * TOPK`` scores is first cut down by the largest score of every ``GROUP``:

1. A bound that about TOPK of the groups reach. At least TOPK scores reach it too, so no lower one is chosen.
2. A list of these groups, and of the scores among theirs that reach the bound: the candidates, often little more than
   TOPK. If high scores lie close together there are more, ``GROUP`` times as many at most, but for ties.
3. The exact threshold among candidates. All above it are chosen, and of those equal to it the first ones.

With ``GROUP * GROUP * TOPK`` at the longest context, both the groups and the candidates fit in registers. What does not
fit, because many scores are equal, is read again at every step: slower, and the same result.

The order of what is chosen is that of positions, first of those above the threshold, then of those equal to it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_triton_mla.triton_index import UNIT

_LEAST = tl.constexpr(-(2**31))
_LARGEST_BLOCK = 32768
_CHUNK = 4096
"""Numbers that are listed at once."""


@triton.jit
def _ordered(found):
    """Scores as integers of the same order."""
    bits = found.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _score_at(scores, places, number, count, LISTED: tl.constexpr):
    """The scores with some numbers, by a list of their places or by their number itself."""
    there = number < count
    place = number
    if LISTED:
        place = tl.load(places + number, mask=there, other=0)
    return tl.where(there, _ordered(tl.load(scores + place, mask=there, other=0.0)), _LEAST), there


@triton.jit
def _halve(low, high, low_count, above, count_from_middle, middle, wanted):
    """The half of a range in which the threshold lies; of both ends, how many scores reach or exceed them."""
    enough = count_from_middle >= wanted
    low_count = tl.where(enough, count_from_middle, low_count)
    above = tl.where(enough, above, count_from_middle)
    return tl.where(enough, middle, low), tl.where(enough, high, middle - 1), low_count, above


@triton.jit
def _threshold(scores, places, count, wanted, most, LISTED: tl.constexpr, SIZE: tl.constexpr):
    """The largest number that ``wanted`` scores reach, or a lower one that no more than ``most`` reach. Also how many
    reach it, and how many exceed it if it is that largest number. All ``count`` scores are in registers at once."""
    key, there = _score_at(scores, places, tl.arange(0, SIZE), count, LISTED)
    high = tl.max(key, 0)
    low = tl.min(tl.where(there, key, high), 0)
    low_count, above = count, 0
    while (low < high) & (low_count > most):
        middle = (low | high) - ((low ^ high) >> 1)
        reached = tl.sum((key >= middle).to(tl.int32), 0)
        low, high, low_count, above = _halve(low, high, low_count, above, reached, middle, wanted)
    return low, low_count, above


@triton.jit
def _threshold_of_many(scores, places, count, wanted, most, LISTED: tl.constexpr, SIZE: tl.constexpr):
    """The same for more than fit in registers, which are read again at every step."""
    high, low = tl.full([], _LEAST, tl.int32), tl.full([], 2**31 - 1, tl.int32)
    for first in range(0, count, SIZE):
        key, there = _score_at(scores, places, first + tl.arange(0, SIZE), count, LISTED)
        high = tl.maximum(high, tl.max(key, 0))
        low = tl.minimum(low, tl.min(tl.where(there, key, 2**31 - 1), 0))
    low_count, above = count, 0
    while (low < high) & (low_count > most):
        middle = (low | high) - ((low ^ high) >> 1)
        reached = 0
        for first in range(0, count, SIZE):
            key, _ = _score_at(scores, places, first + tl.arange(0, SIZE), count, LISTED)
            reached += tl.sum((key >= middle).to(tl.int32), 0)
        low, high, low_count, above = _halve(low, high, low_count, above, reached, middle, wanted)
    return low, low_count, above


@triton.jit
def _any_threshold(
    scores, places, count, wanted, most, LISTED: tl.constexpr, FEW: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    if count <= FEW:
        low, low_count, above = _threshold(scores, places, count, wanted, most, LISTED, FEW)
    elif count <= BLOCK:
        low, low_count, above = _threshold(scores, places, count, wanted, most, LISTED, BLOCK)
    else:
        low, low_count, above = _threshold_of_many(scores, places, count, wanted, most, LISTED, BLOCK)
    return low, low_count, above


@triton.jit
def _put(chosen, place, position, taken, table, table_column, PAGE_SIZE: tl.constexpr, SLOTS: tl.constexpr):
    if SLOTS:
        page = tl.load(table + position // PAGE_SIZE * table_column, mask=taken, other=0)
        position = page * PAGE_SIZE + position % PAGE_SIZE
    tl.store(chosen + place, position, mask=taken)


@triton.jit
def _put_best(
    chosen, scores, places, count, wanted, low, low_count, above, table, table_column,
    LISTED: tl.constexpr, CHUNK: tl.constexpr, PAGE_SIZE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """All that exceed the threshold, then as many of those that equal it as are wanted. All that reach it, if these are
    as many as are wanted."""
    below = tl.where(low_count == wanted, low - 1, low)  # what is surely chosen exceeds this
    ties_from = tl.where(low_count == wanted, wanted, above)  # past all that are wanted: there are none
    sure_count, tie_count = 0, 0
    for first in range(0, count, CHUNK):
        number = first + tl.arange(0, CHUNK)
        key, there = _score_at(scores, places, number, count, LISTED)
        position = number
        if LISTED:
            position = tl.load(places + number, mask=there, other=0)
        sure, tie = there & (key > below), there & (key == below)
        both = tl.cumsum(sure.to(tl.int32) + (tie.to(tl.int32) << 16), 0)
        sure_rank, tie_rank = both & 0xFFFF, both >> 16
        place = tl.where(sure, sure_count + sure_rank, ties_from + tie_count + tie_rank) - 1
        _put(chosen, place, position, (sure | tie) & (place < wanted), table, table_column, PAGE_SIZE, SLOTS)
        total = tl.sum(sure.to(tl.int32) + (tie.to(tl.int32) << 16), 0)
        sure_count += total & 0xFFFF
        tie_count += total >> 16


@triton.jit(do_not_specialize=["table_row", "score_units", "group_units", "tree_row", "queries"])
def choose(
    scores, groups, group_list, candidates, infos, page_table, tree, chosen, table_row, table_column,
    tree_row, tree_column, queries, score_units, group_units,
    TOPK: tl.constexpr, GROUP: tl.constexpr, FEW: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    PAGE_SIZE: tl.constexpr, SLOTS: tl.constexpr, TREE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.program_id(0)
    request, seen = tl.load(infos + 2 * row), tl.load(infos + 2 * row + 1)
    table = page_table + request.to(tl.int64) * table_row
    chosen += row.to(tl.int64) * TOPK
    wanted = tl.minimum(seen, TOPK)
    choice = seen > TOPK
    if TREE:
        # Rows between its own and the prefix that it does not see have the score -inf.
        own = row % queries
        bits = tl.load(tree + request.to(tl.int64) * tree_row + own * tree_column)
        ancestors = tl.sum((bits >> tl.arange(0, 64).to(tl.int64)) & 1, 0).to(tl.int32)
        wanted = tl.where(seen > 0, tl.minimum(seen - own - 1 + ancestors, TOPK), 0)
        choice = seen > 0
    if OVERLAP:
        gdc_wait()  # for scores; page table and rows' requests are older
    for first in range(0, TOPK, CHUNK):
        place = first + tl.arange(0, CHUNK)
        taken = place < tl.where(choice, 0, wanted)
        _put(chosen, place, place, taken, table, table_column, PAGE_SIZE, SLOTS)
        tl.store(chosen + place, tl.full([CHUNK], -1, tl.int32), mask=(place >= wanted) & (place < TOPK))
    if choice:
        scores += row.to(tl.int64) * (score_units * UNIT)
        count = (seen + GROUP - 1) // GROUP
        if count <= wanted:
            low, low_count, above = _any_threshold(scores, candidates, seen, wanted, wanted, False, FEW, BLOCK)
            _put_best(
                chosen, scores, candidates, seen, wanted, low, low_count, above, table, table_column,
                False, CHUNK, PAGE_SIZE, SLOTS,
            )  # fmt: skip
        else:
            groups += row.to(tl.int64) * (group_units * UNIT)
            group_list += row.to(tl.int64) * (group_units * UNIT)
            candidates += row.to(tl.int64) * (score_units * UNIT)
            bound, _, _ = _any_threshold(
                groups, group_list, count, wanted, wanted + wanted // 8, False, FEW, BLOCK
            )  # fmt: skip
            listed = 0
            for first in range(0, count, CHUNK):
                number = first + tl.arange(0, CHUNK)
                key, there = _score_at(groups, group_list, number, count, False)
                reached = (there & (key >= bound)).to(tl.int32)
                tl.store(group_list + listed + tl.cumsum(reached, 0) - 1, number, mask=reached != 0)
                listed += tl.sum(reached, 0)
            tl.debug_barrier()
            found = 0
            for first in range(0, listed * GROUP, CHUNK):
                number = first + tl.arange(0, CHUNK)
                there = number < listed * GROUP
                group = tl.load(group_list + number // GROUP, mask=there, other=0)
                position = group * GROUP + number % GROUP
                there = there & (position < seen)
                key = _ordered(tl.load(scores + position, mask=there, other=0.0))
                reached = (there & (key >= bound)).to(tl.int32)
                tl.store(candidates + found + tl.cumsum(reached, 0) - 1, position, mask=reached != 0)
                found += tl.sum(reached, 0)
            tl.debug_barrier()
            low, low_count, above = _any_threshold(scores, candidates, found, wanted, wanted, True, FEW, BLOCK)
            _put_best(
                chosen, scores, candidates, found, wanted, low, low_count, above, table, table_column,
                True, CHUNK, PAGE_SIZE, SLOTS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["table_row", "width"])
def _translate(positions, infos, page_table, slots, table_row, table_column, width, positions_row,
    PAGE_SIZE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    request, seen = tl.load(infos + 2 * row), tl.load(infos + 2 * row + 1)
    table = page_table + request.to(tl.int64) * table_row
    place = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    there = place < width
    position = tl.load(positions + row.to(tl.int64) * positions_row + place, mask=there, other=-1)
    known = (position >= 0) & (position < seen)
    page = tl.load(table + position // PAGE_SIZE * table_column, mask=known, other=0)
    slot = tl.where(known, page * PAGE_SIZE + position % PAGE_SIZE, -1)
    tl.store(slots + row.to(tl.int64) * width + place, slot, mask=there)


def launch_translate(positions: Tensor, infos: Tensor, page_table: Tensor, slots: Tensor, page_size: int) -> None:
    """The slots of positions ``[rows, width]``, -1 where there is none."""
    rows, width = positions.shape
    chunk = min(triton.next_power_of_2(width), 1024)
    _translate[(rows, triton.cdiv(width, chunk))](
        positions, infos, page_table, slots, *page_table.stride(), width, positions.stride(0),
        PAGE_SIZE=page_size, CHUNK=chunk,
    )  # fmt: skip


def group_of(topk: int, longest: int, least: int = 8) -> int:
    """How many scores a group has: so many that of the longest row both groups and candidates fit in registers."""
    group = least
    while group * group * topk < longest and group * topk < _LARGEST_BLOCK:
        group *= 2
    return group


def launch_choose(
    scores: Tensor,
    groups: Tensor,
    group_list: Tensor,
    candidates: Tensor,
    infos: Tensor,
    page_table: Tensor,
    tree: Tensor | None,
    chosen: Tensor,
    *,
    group: int,
    page_size: int,
    slots: bool,
    overlap: bool,
) -> None:
    """The best rows ``chosen`` ``[rows, topk]`` int32, -1 at the end: positions, or ``slots``.

    ``infos`` ``[rows, 2]`` are from ``launch_spread``. ``group_list`` and ``candidates`` are memory like ``groups`` and
    ``scores``, of int32. With ``overlap`` it is launched while the kernel before still runs (SM 90 and newer).
    """
    rows, topk = chosen.shape
    block = min(max(triton.next_power_of_2(group * topk), 16), _LARGEST_BLOCK)
    few = min(max(triton.next_power_of_2(2 * topk), 16), block)
    choose[(rows,)](
        scores,
        groups,
        group_list,
        candidates,
        infos,
        page_table,
        infos if tree is None else tree,
        chosen,
        *page_table.stride(),
        *((0, 1) if tree is None else tree.stride()),
        1 if tree is None else tree.shape[1],
        scores.stride(0) // UNIT.value,
        groups.stride(0) // UNIT.value,
        TOPK=topk,
        GROUP=group,
        FEW=few,
        BLOCK=block,
        CHUNK=min(_CHUNK, few),
        PAGE_SIZE=page_size,
        SLOTS=slots,
        TREE=tree is not None,
        OVERLAP=overlap,
        num_warps=min(max(block // 1024, 4), 16),
        **({"launch_pdl": True} if overlap else {}),
    )
