"""Planning of captured batches: everything that a graph holds the address of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import ForwardBatch, Plan
from attnplug_flashattention.planner import CachedPlan, Division, PagedCall, divide
from attnplug_flashattention.tables import Parts, fill_parts, fill_slots


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """One captured shape of batch. What changes from replay to replay is made inside the graph, from the page table and
    the lengths that the batch has then; kernels that can read these as they are do so."""

    plan: Plan
    cached: CachedPlan
    tables: tuple[Parts, ...]

    def fill(self, page_table: Tensor, kv_lens: Tensor, page_size: int) -> None:
        """One launch for the slots, and one for each table that is not the batch's own."""
        fill_slots(page_table, kv_lens, page_size, self.cached.new_slots)
        for parts in self.tables:
            fill_parts(page_table, kv_lens, parts)


@dataclass(frozen=True, slots=True)
class CaptureRules:
    """What a captured plan depends on beside its batch. ``windowed`` says whether some layer has a window."""

    page_size: int
    kernel_page: int
    division: Division | None
    windowed: bool


def plan_captured(batch: ForwardBatch, rules: CaptureRules) -> tuple[CachedPlan, tuple[Parts, ...]]:
    """How a shape that was not captured before will read and write, and the tables to fill for it.

    The batch's own lengths are no guide: a capture may carry any. As many parts are taken as pay for requests that
    fill its page table; shorter ones are cut into as many, which are smaller.
    """
    decode, device = batch.forward_mode.is_decode, batch.page_table.device
    requests, tokens = batch.batch_size, batch.num_tokens
    slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
    rows = batch.page_table.shape[1] * rules.page_size
    count = rules.division.parts(requests, rows) if decode and rules.division is not None else 1
    tables = []
    divided = whole = None
    if count > 1:
        tables.append(Parts.empty(requests, rows, count, rules.page_size, rules.kernel_page, device))
        divided = divide(tables[0])
    if count == 1 or rules.windowed:
        table, kv_lens = batch.page_table, batch.seq_lens
        if rules.kernel_page != rules.page_size:
            cut = Parts.empty(requests, rows, 1, rules.page_size, rules.kernel_page, device)
            tables.append(cut)
            table, kv_lens = cut.page_table, cut.kv_lens
        whole = PagedCall(table, kv_lens, rows, tokens // requests, causal=not decode)
    return CachedPlan(slots, whole, divided), tuple(tables)
