"""MLA over a paged cache: one kernel for decode, verify and extend, that attends to what ``triton_plan`` scheduled.

Two numbers decide. Bytes: a cache row is 1152 bytes in 16 bits (latent 512, rope 64), and is both key and value; an
H200 reads 4.2 TB/s, 32 GB/s a multiprocessor, so a step of 64 rows takes one 2.3 µs where all read, and 0.7 µs from L2
(about 110 GB/s) where few do. Operations: with M rows of queries, 2 * M * (576 + 512) a cache row; at M = 64 a step is
8.9 MFLOP, 1.2 µs of a multiprocessor's 7.5 TFLOP/s, and at M = 16 a quarter of that. So decode with few heads waits
for bytes, with 128 heads for both alike, and at small batches for neither: what is left there is latency, a chain of
loads (schedule, record, page, row) and the merge. Hence:

- Rows (query token, head) of a request fill one tile of up to 64 rows, the tensor cores' own height: a verify of 4
  tokens with 16 heads reads the cache once, not four times. 64 rows of float32 accumulators are half of the registers.
- The latent part of a step is loaded once, and is K transposed and V as it is; rope is a product of its own.
- Every program takes an equal stretch of the batch's work, whatever the lengths (see ``triton_plan``), and writes its
  result straight to the output where a tile is its alone.
- What lies behind a request's rows may be anything, NaN too: it is neither loaded (zeros stand there, since zero times
  NaN is NaN) nor seen (its logits are -inf).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from attnplug_triton_mla.planner import Schedule
from attnplug_triton_mla.scratch import Partials
from attnplug_triton_mla.triton_merge import LN_2, log2_sum, merge_tile, parts_of_tile
from attnplug_triton_mla.triton_plan import HEADER, RECORD

_LOG2_E = 1.4426950408889634


# Numbers that change from batch to batch are taken as they are: compiling again for a 1 among them gains nothing.
@triton.jit(do_not_specialize=["requests", "programs", "table_row"])
def _attend(
    q, cache, page_table, out, lse, partials, partial_lse, counters, numbers, requests, programs,
    q_row, q_head, table_row, table_column, scale, out_scale,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, INVARIANT: tl.constexpr,
    MERGE_COLUMNS: tl.constexpr, LSE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()  # the merging kernel may come, and waits for our last store
    me = tl.program_id(0)
    column = tl.arange(0, RANK)
    stretch, line = tl.load(numbers), tl.load(numbers + 1)
    records = numbers + HEADER
    request = tl.load(records + requests * RECORD + me)
    at = me * stretch
    stop = tl.minimum(at + stretch, line)
    while at < stop:
        # Whose tile this is. A request without new rows has no work, and is passed over.
        while tl.load(records + request * RECORD) <= at:
            request += 1
        record = records + request * RECORD
        kv_len, prefix, begin = tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
        new, unit, units = tl.load(record + 4), tl.load(record + 5), tl.load(record + 6)
        tiles = (new * HEADS + TILE - 1) // TILE
        start = tl.load(record) - tiles * units
        tile = (at - start) // units
        tile_start = start + tile * units
        piece = at - tile_start
        taken = 1 if INVARIANT else tl.minimum(units - piece, stop - at)

        # Which of its rows see which cache rows.
        row = tile * TILE + tl.arange(0, TILE)
        live = row < new * HEADS
        query, head = row // HEADS, row % HEADS
        seen = tl.minimum(prefix + query + 1, kv_len)
        last_query = tl.minimum((tile * TILE + TILE - 1) // HEADS, new - 1)
        first_token = piece * unit * STEP
        end_token = tl.minimum((piece + taken) * unit * STEP, tl.minimum(prefix + last_query + 1, kv_len))

        q_at = q + (begin + query).to(tl.int64) * q_row + head * q_head
        q_latent = tl.load(q_at[:, None] + column[None, :], mask=live[:, None], other=0.0)
        if ROPE > 0:
            rope_column = RANK + tl.arange(0, ROPE)
            q_rope = tl.load(q_at[:, None] + rope_column[None, :], mask=live[:, None], other=0.0)
        table = page_table + request.to(tl.int64) * table_row
        top = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        attended = tl.zeros([TILE, RANK], tl.float32)
        token = first_token + tl.arange(0, STEP)
        page = tl.load(table + token // PAGE_SIZE * table_column, mask=token < end_token, other=0)
        for first in range(first_token, end_token, STEP):
            token = first + tl.arange(0, STEP)
            there = token < end_token
            slot_at = cache + page.to(tl.int64) * PAGE_STRIDE + token % PAGE_SIZE * SLOT_STRIDE
            # The next step's pages, a step ahead: rows whose addresses are at hand are what the compiler can prefetch.
            ahead = token + STEP
            page = tl.load(table + ahead // PAGE_SIZE * table_column, mask=ahead < end_token, other=0)
            latent = tl.load(slot_at[:, None] + column[None, :], mask=there[:, None], other=0.0)
            latent = latent.to(q.dtype.element_ty)  # from fp8; its scale is in the two scales
            logits = tl.dot(q_latent, tl.trans(latent))
            if ROPE > 0:
                rope = tl.load(slot_at[:, None] + rope_column[None, :], mask=there[:, None], other=0.0)
                logits = tl.dot(q_rope, tl.trans(rope.to(q.dtype.element_ty)), logits)
            logits = tl.where(token[None, :] < seen[:, None], logits * scale, float("-inf"))
            higher = tl.maximum(top, tl.max(logits, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weight, kept = tl.exp2(logits - base[:, None]), tl.exp2(top - base)
            total = total * kept + tl.sum(weight, 1)
            attended = tl.dot(weight.to(q.dtype.element_ty), latent, attended * kept[:, None])
            top = higher

        divisor = tl.where(total == 0.0, 1.0, total)
        base = tl.where(top == float("-inf"), 0.0, top)
        out_row = (begin * HEADS + row).to(tl.int64)
        out_at, lse_at = out + out_row * RANK, lse + out_row
        parts, first_slot, other_slots = parts_of_tile(tile_start, units, stretch, programs, INVARIANT)
        if parts == 1:
            result = attended * (out_scale / divisor)[:, None]
            tl.store(out_at[:, None] + column[None, :], result.to(out.dtype.element_ty), mask=live[:, None])
            if LSE:
                tl.store(lse_at, log2_sum(base, total) * LN_2, mask=live)
        else:
            if INVARIANT:
                slot, counter = at.to(tl.int64), counters + tile_start
            else:
                slot = tl.where(piece == 0, first_slot, me).to(tl.int64)
                counter = counters + other_slots
            place = slot * TILE + tl.arange(0, TILE)
            part = (attended / divisor[:, None]).to(partials.dtype.element_ty)
            tl.store(partials + place[:, None] * RANK + column[None, :], part)
            tl.store(partial_lse + place, log2_sum(base, total))
            if MERGE_COLUMNS > 0:
                # Whoever counts last finds all parts written: the barrier orders this program's own stores before its
                # count, and the count is a release and an acquire. It leaves the counter as it was, for the next call.
                tl.debug_barrier()
                if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == parts - 1:
                    merge_tile(
                        partials, partial_lse, out_at, lse_at, live, parts, first_slot, other_slots, out_scale,
                        RANK, TILE, MERGE_COLUMNS, LSE,
                    )  # fmt: skip
                    tl.store(counter, 0)
        at += taken


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """A layer's cache ``[pages, page_size, 1, rank + rope]``, and what a stored number must be multiplied with."""

    pages: Tensor
    scale: float
    rank: int


def launch_attend(
    q: Tensor,
    cache: LayerCache,
    page_table: Tensor,
    out: Tensor,
    lse: Tensor | None,
    partials: Partials,
    schedule: Schedule,
    scale: float,
) -> None:
    """Attend with q ``[rows, heads, rank + rope]``; ``out`` ``[rows, heads, rank]`` and ``lse`` are contiguous.

    Tiles of several parts are left in ``partials`` for ``launch_merge`` where the schedule says so.
    """
    if q.stride(2) != 1:
        q = q.contiguous()
    pages, configuration, after = cache.pages, schedule.configuration, schedule.merged_by_kernel
    _, page_size, _, row_dim = pages.shape
    _attend[(schedule.programs,)](
        q,
        pages,
        page_table,
        out,
        partials.lse if lse is None else lse,
        partials.values,
        partials.lse,
        partials.counters,
        schedule.numbers,
        schedule.shape.requests,
        schedule.programs,
        q.stride(0),
        q.stride(1),
        page_table.stride(0),
        page_table.stride(1),
        scale * cache.scale * _LOG2_E,
        cache.scale,
        HEADS=q.shape[1],
        RANK=cache.rank,
        ROPE=row_dim - cache.rank,
        PAGE_SIZE=page_size,
        PAGE_STRIDE=pages.stride(0),
        SLOT_STRIDE=pages.stride(1),
        TILE=configuration.tile,
        STEP=configuration.step,
        INVARIANT=schedule.shape.invariant,
        MERGE_COLUMNS=0 if after else min(configuration.merge_columns, cache.rank),
        LSE=lse is not None,
        OVERLAP=after and configuration.overlap,
        num_warps=configuration.warps,
        num_stages=configuration.stages,
    )
