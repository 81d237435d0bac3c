"""Top-k selection of every new token's cache rows by their scores, and their slots: one program per token.

Nothing is sorted. The kernel searches for a threshold by counting the scores that reach a guess. Scores that fit in
registers are read once. To make them few, a row of more than ``GROUP * TOPK`` scores is first reduced by the maximum of
every ``GROUP``:

1. Find a bound that about TOPK groups reach. At least TOPK scores reach it too, so no lower score is selected.
2. List these groups, and those of their scores that reach the bound: the candidates, often little more than TOPK. If
   high scores are adjacent there are more, at most ``GROUP`` times as many, except for ties.
3. Find the exact threshold among the candidates. Select all above it, and the first ones of those equal to it.

The first guess is the quantile of a normal distribution, later ones interpolate linearly between both ends (the
Illinois method, which does not get stuck at one end). That takes about six counts, where bisection takes twenty. After
``_GUESSES`` the range is bisected in the order of the floats' bits, so the search ends for any scores.

All groups of the longest context fit in registers. Scores that do not, because many are equal or because groups are
large, are read again at every count: slower, with the same result.

Selected rows are ordered by position, first those above the threshold, then those equal to it. The score of a row that
is not seen is -inf.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_sparse.index.triton_score import LOWEST, UNIT

_GUESSES = tl.constexpr(12)
_HIGHEST = tl.constexpr(3.4e38)
_LARGEST_BLOCK = 16384
"""Scores that fit in the registers of a program."""
_CHUNK = 4096
"""Scores per iteration where lists are written."""


@triton.jit
def _ordered(number):
    """Map floats to integers of the same order."""
    bits = number.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _float(ordered):
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _scores_at(scores, places, number, count, LISTED: tl.constexpr):
    """Load scores by a list of places, or by their number itself; -inf beyond ``count``."""
    there = number < count
    place = number
    if LISTED:
        place = tl.load(places + number, mask=there, other=0)
    return tl.load(scores + place, mask=there, other=float("-inf"))


@triton.jit
def _normal_guess(count, sums, squares, wanted):
    """Return the value that ``wanted`` of ``count`` normal samples exceed (Abramowitz and Stegun, 26.2.23)."""
    mean = sums / count
    deviation = tl.sqrt(tl.maximum(squares / count - mean * mean, 0.0))
    part = wanted / count
    t = tl.sqrt(-1.3862944 * tl.log2(tl.minimum(tl.maximum(tl.minimum(part, 1.0 - part), 1e-7), 0.5)))
    z = t - (2.515517 + t * (0.802853 + t * 0.010328)) / (1.0 + t * (1.432788 + t * (0.189269 + t * 0.001308)))
    return mean + deviation * tl.where(part > 0.5, -z, z)


@triton.jit
def _guess(low, high, excess, lack, guess, tries):
    """Return the next guess, in ``(low, high]``, both as integers. ``guess`` is the first."""
    middle = (low | high) - ((low ^ high) >> 1)
    start = _float(low)
    between = tl.where(tries == 0, guess, start + (_float(high) - start) * (excess / (excess + lack)))
    guessed = _ordered(between)
    usable = (tries < _GUESSES) & (guessed > low) & (guessed <= high)
    return tl.where(usable, guessed, middle)


@triton.jit
def _narrow(low, high, low_count, above, excess, lack, side, middle, reached, wanted):
    """Narrow the range of the threshold by a count. An end that stays twice gets half its weight."""
    enough = reached >= wanted
    again = side == tl.where(enough, 1, -1)
    new_excess = tl.where(enough, (reached - wanted).to(tl.float32) + 0.5, tl.where(again, excess * 0.5, excess))
    new_lack = tl.where(enough, tl.where(again, lack * 0.5, lack), (wanted - reached).to(tl.float32))
    return (
        tl.where(enough, middle, low), tl.where(enough, high, middle - 1), tl.where(enough, reached, low_count),
        tl.where(enough, above, reached), new_excess, new_lack, tl.where(enough, 1, -1),
    )  # fmt: skip


@triton.jit
def _threshold(
    scores, places, count, wanted, most, LISTED: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Return the largest threshold that ``wanted`` scores reach, or a lower one that at most ``most`` reach; the number
    of scores that reach it; and, if it is the largest, the number that exceed it.

    ``SIZE`` scores stay in registers. Others are read again for every count, ``CHUNK`` per iteration; CHUNK is 0 if
    there are none.
    """
    values = _scores_at(scores, places, tl.arange(0, SIZE), count, LISTED)
    top, bottom, low_count, sums, squares = _moments(values)
    if CHUNK > 0:
        for first in range(SIZE, count, CHUNK):
            more = _scores_at(scores, places, first + tl.arange(0, CHUNK), count, LISTED)
            more_top, more_bottom, more_count, more_sums, more_squares = _moments(more)
            top, bottom = tl.maximum(top, more_top), tl.minimum(bottom, more_bottom)
            low_count, sums, squares = low_count + more_count, sums + more_sums, squares + more_squares
    low, high, above, side, tries = _ordered(bottom), _ordered(top), 0, 0, 0
    guess = _normal_guess(tl.maximum(low_count, 1).to(tl.float32), sums, squares, wanted.to(tl.float32))
    excess, lack = (low_count - wanted).to(tl.float32) + 0.5, wanted.to(tl.float32)
    while (low < high) & (low_count > most):
        middle = _guess(low, high, excess, lack, guess, tries)
        bar = _float(middle)
        reached = tl.sum((values >= bar).to(tl.int32), 0)
        if CHUNK > 0:
            for first in range(SIZE, count, CHUNK):
                more = _scores_at(scores, places, first + tl.arange(0, CHUNK), count, LISTED)
                reached += tl.sum((more >= bar).to(tl.int32), 0)
        low, high, low_count, above, excess, lack, side = _narrow(
            low, high, low_count, above, excess, lack, side, middle, reached, wanted
        )
        tries += 1
    return _float(low), low_count, above


@triton.jit
def _moments(values):
    """Return maximum, minimum, count, sum and sum of squares of the scores that are not -inf."""
    seen = values > float("-inf")
    known = tl.where(seen, values, 0.0)
    return (
        tl.max(values, 0), tl.min(tl.where(seen, values, _HIGHEST), 0), tl.sum(seen.to(tl.int32), 0),
        tl.sum(known, 0), tl.sum(known * known, 0),
    )  # fmt: skip


@triton.jit
def _exact_threshold(
    scores, places, count, wanted, LISTED: tl.constexpr, FEW: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    if count <= FEW:
        low, low_count, above = _threshold(scores, places, count, wanted, wanted, LISTED, FEW, 0)
    else:
        low, low_count, above = _threshold(scores, places, count, wanted, wanted, LISTED, BLOCK, CHUNK)
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
    """Write all scores' rows above the threshold, then the first ones equal to it, ``wanted`` in all."""
    all_of_them = (low_count == wanted).to(tl.int32)
    ties_from = tl.where(low_count == wanted, wanted, above)
    sure_count, tie_count = 0, 0
    for first in range(0, count, CHUNK):
        number = first + tl.arange(0, CHUNK)
        values = _scores_at(scores, places, number, count, LISTED)
        position = number
        if LISTED:
            position = tl.load(places + number, mask=number < count, other=0)
        equal = (values == low).to(tl.int32)
        sure, tie = (values > low).to(tl.int32) + equal * all_of_them, equal * (1 - all_of_them)
        both = sure + (tie << 16)
        rank, total = tl.cumsum(both, 0), tl.sum(both, 0)
        place = tl.where(sure != 0, sure_count + (rank & 0xFFFF), ties_from + tie_count + (rank >> 16)) - 1
        _put(chosen, place, position, (both != 0) & (place < wanted), table, table_column, PAGE_SIZE, SLOTS)
        sure_count += total & 0xFFFF
        tie_count += total >> 16


@triton.jit(
    do_not_specialize=["table_row", "score_units", "group_units", "tree_row", "queries"],
    do_not_specialize_on_alignment=["page_table"],
)
def choose(
    scores, groups, group_list, candidates, infos, page_table, tree, chosen, table_row, table_column,
    tree_row, tree_column, queries, score_units, group_units,
    TOPK: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, FEW: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, PAGE_SIZE: tl.constexpr, SLOTS: tl.constexpr, TREE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.program_id(0)
    request, seen = tl.load(infos + 2 * row), tl.load(infos + 2 * row + 1)
    table = page_table + request.to(tl.int64) * table_row
    chosen += row.to(tl.int64) * WIDTH
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
    for first in range(0, WIDTH, CHUNK):
        place = first + tl.arange(0, CHUNK)
        taken = place < tl.where(choice, 0, wanted)
        _put(chosen, place, place, taken, table, table_column, PAGE_SIZE, SLOTS)
        tl.store(chosen + place, tl.full([CHUNK], -1, tl.int32), mask=(place >= wanted) & (place < WIDTH))
    if choice:
        scores += row.to(tl.int64) * (score_units * UNIT)
        count = (seen + GROUP - 1) // GROUP
        if count <= wanted:
            low, low_count, above = _exact_threshold(scores, candidates, seen, wanted, False, FEW, BLOCK, CHUNK)
            _put_best(
                chosen, scores, candidates, seen, wanted, low, low_count, above, table, table_column,
                False, CHUNK, PAGE_SIZE, SLOTS,
            )  # fmt: skip
        else:
            groups += row.to(tl.int64) * (group_units * UNIT)
            group_list += row.to(tl.int64) * (group_units * UNIT)
            candidates += row.to(tl.int64) * (score_units * UNIT)
            bound, reaching, _ = _threshold(
                groups, group_list, count, wanted, wanted + wanted // 8, False, BLOCK, CHUNK
            )  # fmt: skip
            bound = tl.where(reaching < wanted, LOWEST, bound)  # a tree has groups without a visible row
            listed = 0
            for first in range(0, count, CHUNK):
                number = first + tl.arange(0, CHUNK)
                reached = (_scores_at(groups, group_list, number, count, False) >= bound).to(tl.int32)
                tl.store(group_list + listed + tl.cumsum(reached, 0) - 1, number, mask=reached != 0)
                listed += tl.sum(reached, 0)
            tl.debug_barrier()
            found = 0
            for first in range(0, listed * GROUP, CHUNK):
                number = first + tl.arange(0, CHUNK)
                there = number < listed * GROUP
                group = tl.load(group_list + number // GROUP, mask=there, other=0)
                position = group * GROUP + number % GROUP
                values = tl.load(scores + position, mask=there & (position < seen), other=float("-inf"))
                reached = (values >= bound).to(tl.int32)
                tl.store(candidates + found + tl.cumsum(reached, 0) - 1, position, mask=reached != 0)
                found += tl.sum(reached, 0)
            tl.debug_barrier()
            low, low_count, above = _exact_threshold(scores, candidates, found, wanted, True, FEW, BLOCK, CHUNK)
            _put_best(
                chosen, scores, candidates, found, wanted, low, low_count, above, table, table_column,
                True, CHUNK, PAGE_SIZE, SLOTS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["table_row", "width"], do_not_specialize_on_alignment=["page_table"])
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
    """Translate positions ``[rows, width]`` to ``slots``, -1 where there is none."""
    rows, width = positions.shape
    chunk = min(triton.next_power_of_2(width), 1024)
    _translate[(rows, triton.cdiv(width, chunk))](
        positions, infos, page_table, slots, *page_table.stride(), width, positions.stride(0),
        PAGE_SIZE=page_size, CHUNK=chunk,
    )  # fmt: skip


def group_of(longest: int, least: int = 8) -> int:
    """Return the scores per group, chosen so that all groups of the longest row fit in registers."""
    group = least
    while -(-longest // group) > _LARGEST_BLOCK:
        group *= 2
    return group


def _block(group: int, topk: int) -> int:
    size: int = triton.next_power_of_2(group * topk)
    return min(max(size, 16), _LARGEST_BLOCK)


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
    topk: int,
    group: int,
    page_size: int,
    slots: bool,
    overlap: bool,
) -> None:
    """Write the top ``topk`` rows to ``chosen`` ``[rows, ≥ topk]`` int32, -1 at the end: positions, or ``slots``.

    ``infos`` ``[rows, 2]`` comes from ``launch_spread``. ``group_list`` and ``candidates`` are int32 scratch memory of
    the shapes of ``groups`` and ``scores``. With ``overlap`` the kernel is launched while the previous one still runs
    (SM 90 and newer).
    """
    rows, width = chosen.shape
    block = _block(group, topk)
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
        WIDTH=width,
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
