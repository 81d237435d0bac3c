"""Kernels before the model and behind the sampler of a captured step, one launch each."""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_engine.kernels import launch_options


class MailboxTensors(Protocol):
    """The tensors of :class:`attnplug_engine.graphs.mailbox.Mailbox`."""

    @property
    def memory(self) -> Tensor: ...
    @property
    def input_slots(self) -> Tensor: ...
    @property
    def output_slots(self) -> Tensor: ...
    @property
    def slot(self) -> Tensor: ...


_COPIED = 256
"""Words of the inputs that a program copies."""


@triton.jit(do_not_specialize=["pages", "words", "requests"])
def _begin(
    page_table, ids, positions, input_slots, memory, slot_index, mirror, tokens,
    rows_at, lens_at, words, requests, pages, table_row, mirror_row,
    BLOCK: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """One program per request and block of its pages, then one for each part of the inputs. The next kernel must not
    start early: planning follows, and attention reads plans and page tables before it waits."""
    me, blocks = tl.program_id(0), (pages + BLOCK - 1) // BLOCK
    message = input_slots + tl.load(slot_index).to(tl.int64) * words
    if me < requests * blocks:
        request, block = (me // blocks).to(tl.int64), me % blocks
        # Bypass caches, which may hold the slot's previous inputs. Of a row, which has 64 bits, the lower word
        # suffices.
        row = tl.load(message + rows_at + 2 * request, cache_modifier=".cv").to(tl.int64)
        column = block * BLOCK + tl.arange(0, BLOCK)
        there = column < pages
        found = tl.load(mirror + row * mirror_row + column, mask=there)
        tl.store(page_table + request * table_row + column, found, mask=there)
        if block == 0:
            length = tl.load(message + lens_at + request, cache_modifier=".cv")
            tl.store(ids + request, tl.load(tokens + row))
            tl.store(positions + request, tl.maximum(length - 1, 0))
    else:
        word = (me - requests * blocks) * COPIED + tl.arange(0, COPIED)
        inside = word < words
        tl.store(memory + word, tl.load(message + word, mask=inside, cache_modifier=".cv"), mask=inside)


def begin(
    mailbox: MailboxTensors, page_table: Tensor, ids: Tensor, positions: Tensor, rows: Tensor, seq_lens: Tensor,
    mirror: Tensor, tokens: Tensor,
) -> None:  # fmt: skip
    """Read the next slot's inputs to the mailbox's memory; ``rows`` and ``seq_lens`` are views of it. Fill
    ``page_table [requests, pages]``, ``ids`` and ``positions [requests]`` for requests at ``rows`` of the table
    ``mirror`` and of ``tokens``. A position is the length minus one; 0 for a padded request."""
    requests, pages = page_table.shape
    input_slots, memory = mailbox.input_slots.view(torch.int32), mailbox.memory.view(torch.int32)
    words, block = memory.shape[0], min(triton.next_power_of_2(pages), 1024)
    _begin[(requests * triton.cdiv(pages, block) + triton.cdiv(words, _COPIED),)](
        page_table, ids, positions, input_slots, memory, mailbox.slot, mirror, tokens,
        2 * rows.storage_offset(), seq_lens.storage_offset(), words, requests, pages,
        page_table.stride(0), mirror.stride(0), BLOCK=block, COPIED=_COPIED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["requests", "most"])
def _end(
    sampled, tokens, rows, chosen, output_slots, slot_index, requests, most,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program. It advances the slot counter."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    mine = tl.load(slot_index)
    for first in range(0, requests, BLOCK):
        request = first + tl.arange(0, BLOCK)
        there = request < requests
        token = tl.load(chosen + request, mask=there)
        tl.store(sampled + request, token, mask=there)
        tl.store(output_slots + mine.to(tl.int64) * most + request, token, mask=there)
        row = tl.load(rows + request, mask=there, other=0)
        tl.store(tokens + row, tl.maximum(token, 0), mask=there)
    tl.store(slot_index, (mine + 1) % SLOTS)


def end(mailbox: MailboxTensors, sampled: Tensor, tokens: Tensor, rows: Tensor, chosen: Tensor) -> None:
    """Write the chosen tokens to the output slot and for the next step, where -1 becomes 0."""
    _end[(1,)](
        sampled, tokens, rows, chosen, mailbox.output_slots, mailbox.slot, chosen.shape[0],
        mailbox.output_slots.shape[1], SLOTS=mailbox.output_slots.shape[0], BLOCK=256, **launch_options(chosen.device),
    )  # fmt: skip
