"""Triton kernels that copy whole rows between device memory and pinned host memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnplug_sparse.hisparse.addresses import HostSlots

TILE_ROWS = 32
"""Rows in flight per program, for large copies."""
WARPS = 8


@triton.jit
def copy_rows(
    target, target_rows, source, source_rows, live,
    WORDS: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Copy the ``live`` rows, of ``WORDS`` words. All loads of a row are issued before its stores, to hide the latency
    of host memory."""
    to, fro = target_rows.to(tl.int64)[:, None] * WORDS, source_rows.to(tl.int64)[:, None] * WORDS
    column, there = tl.arange(0, MAIN)[None, :], live[:, None]
    main = tl.load(source + fro + column, mask=there)
    if REST > 0:
        last = MAIN + tl.arange(0, REST)[None, :]
        also = there & (last < WORDS)
        rest = tl.load(source + fro + last, mask=also)
        tl.store(target + to + last, rest, mask=also)
    tl.store(target + to + column, main, mask=there)


@triton.jit
def _gather(kept, cells, slots, count, layer_words, WORDS: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
            ROWS: tl.constexpr, BACK: tl.constexpr):  # fmt: skip
    """Gather rows of one layer from slots to ``kept``; with ``BACK``, scatter them from there to slots."""
    layer, number = tl.program_id(1).to(tl.int64), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + number, mask=number < count, other=-1)
    place = layer * count + number
    if BACK:
        copy_rows(cells + layer * layer_words, slot, kept, place, slot >= 0, WORDS, MAIN, REST)
    else:
        copy_rows(kept, place, cells + layer * layer_words, slot, slot >= 0, WORDS, MAIN, REST)


def word_of(row_nbytes: int) -> torch.dtype:
    """Return the widest integer type that divides rows into whole words."""
    widths = ((8, torch.int64), (4, torch.int32), (2, torch.int16))
    return next((word for width, word in widths if row_nbytes % width == 0), torch.uint8)


def row_constants(row_nbytes: int) -> dict[str, int]:
    """Return a row's split into a power of two of words and a rest, as constants of the kernels."""
    words = row_nbytes // word_of(row_nbytes).itemsize
    main = 1 << (words.bit_length() - 1)
    return {"WORDS": words, "MAIN": main, "REST": triton.next_power_of_2(words - main) if words > main else 0}


def move(cells: Tensor, sources: HostSlots, targets: HostSlots) -> None:
    """Copy rows of ``cells`` ``[layers, rows, row_bytes]`` in all layers. All are read before any is written. A target
    of -1 skips its row."""
    layers, _, nbytes = cells.shape
    count, words = targets.slots.shape[0], cells.view(word_of(nbytes))
    device = targets.slots.device
    kept = torch.empty(layers, count, words.shape[2], dtype=words.dtype, device=device)
    live = targets.slots >= 0
    grid = (triton.cdiv(count, TILE_ROWS), layers)
    for slots, back in ((sources.slots.where(live, -1), False), (targets.slots, True)):
        _gather[grid](
            kept, words, slots, count, words.stride(0), **row_constants(nbytes), ROWS=TILE_ROWS, BACK=back,
            num_warps=WARPS,
        )  # fmt: skip
