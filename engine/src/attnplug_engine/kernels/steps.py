"""What a captured step does before its model runs and after its tokens are chosen, one launch each."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_engine.kernels import launch_options
from attnplug_engine.letters import LETTERS, Letters

_COPIED = 256
"""Words of a letter that a program copies."""


@triton.jit(do_not_specialize=["pages", "words", "requests"])
def _begin(
    page_table, ids, positions, inbox, memory, turn, mirror, tokens,
    rows_at, lens_at, words, requests, pages, table_row, mirror_row,
    BLOCK: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """One program for a request and a block of its pages, then one for each part of the letter. Lets nobody start
    early: planning comes next, and attention reads plans and page tables before it waits."""
    me, blocks = tl.program_id(0), (pages + BLOCK - 1) // BLOCK
    letter = inbox + tl.load(turn).to(tl.int64) * words
    if me < requests * blocks:
        request, block = (me // blocks).to(tl.int64), me % blocks
        # Read again what the host may have written since: a cache may have the last letter that lay here. Of a row,
        # which has 64 bits, the lower word is all there is.
        row = tl.load(letter + rows_at + 2 * request, cache_modifier=".cv").to(tl.int64)
        column = block * BLOCK + tl.arange(0, BLOCK)
        there = column < pages
        found = tl.load(mirror + row * mirror_row + column, mask=there)
        tl.store(page_table + request * table_row + column, found, mask=there)
        if block == 0:
            length = tl.load(letter + lens_at + request, cache_modifier=".cv")
            tl.store(ids + request, tl.load(tokens + row))
            tl.store(positions + request, tl.maximum(length - 1, 0))
    else:
        word = (me - requests * blocks) * COPIED + tl.arange(0, COPIED)
        inside = word < words
        tl.store(memory + word, tl.load(letter + word, mask=inside, cache_modifier=".cv"), mask=inside)


def begin(
    letters: Letters[Any], page_table: Tensor, ids: Tensor, positions: Tensor, rows: Tensor, seq_lens: Tensor,
    mirror: Tensor, tokens: Tensor,
) -> None:  # fmt: skip
    """Take the next letter, whose ``rows`` and ``seq_lens`` are views of its memory. Fill ``page_table [requests,
    pages]``, ``ids`` and ``positions [requests]`` for requests at ``rows`` of the table ``mirror`` and of ``tokens``.
    A position is the length less one; 0 for a padded request."""
    requests, pages = page_table.shape
    inbox, memory = letters.inbox.view(torch.int32), letters.memory.view(torch.int32)
    words, block = memory.shape[0], min(triton.next_power_of_2(pages), 1024)
    _begin[(requests * triton.cdiv(pages, block) + triton.cdiv(words, _COPIED),)](
        page_table, ids, positions, inbox, memory, letters.turn, mirror, tokens,
        2 * rows.storage_offset(), seq_lens.storage_offset(), words, requests, pages,
        page_table.stride(0), mirror.stride(0), BLOCK=block, COPIED=_COPIED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["requests", "most"])
def _end(
    sampled, tokens, rows, chosen, outbox, turn, requests, most,
    LETTERS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: it counts the turn on."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    mine = tl.load(turn)
    for first in range(0, requests, BLOCK):
        request = first + tl.arange(0, BLOCK)
        there = request < requests
        token = tl.load(chosen + request, mask=there)
        tl.store(sampled + request, token, mask=there)
        tl.store(outbox + mine.to(tl.int64) * most + request, token, mask=there)
        row = tl.load(rows + request, mask=there, other=0)
        tl.store(tokens + row, tl.maximum(token, 0), mask=there)
    tl.store(turn, (mine + 1) % LETTERS)


def end(letters: Letters[Any], sampled: Tensor, tokens: Tensor, rows: Tensor, chosen: Tensor) -> None:
    """Put the tokens that were chosen where the host reads them, and where the next step does: there -1 becomes 0."""
    _end[(1,)](
        sampled, tokens, rows, chosen, letters.outbox, letters.turn, chosen.shape[0], letters.outbox.shape[1],
        LETTERS=LETTERS, BLOCK=256, **launch_options(chosen.device),
    )  # fmt: skip
