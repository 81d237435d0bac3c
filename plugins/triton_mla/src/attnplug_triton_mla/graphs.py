"""Captured batches: one plan for each shape, whose schedule the graph fills anew at every replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Never

from torch import Tensor

from attnplug import ForwardBatch, ForwardMode, Plan, PlanError
from attnplug_triton_mla.planner import Schedule


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """One captured shape of batch, and the page table at whose address its kernels read."""

    plan: Plan
    page_table: Tensor

    def reads(self, batch: ForwardBatch) -> bool:
        """Whether it was captured with this batch's page table."""
        mine, its = self.page_table, batch.page_table
        return mine.data_ptr() == its.data_ptr() and mine.shape == its.shape and mine.stride() == its.stride()

    def fill(self, batch: ForwardBatch) -> None:
        schedule: Schedule = self.plan.metadata.schedule
        new_lens = None if schedule.shape.queries else batch.extend_seq_lens
        schedule.fill(batch.page_table, batch.seq_lens, new_lens)


class GraphState:
    """The shapes captured so far, and the most that may be."""

    def __init__(self, max_bs: int, max_num_tokens: int, pages: int) -> None:
        self._requests, self._tokens, self._pages = max_bs, max_num_tokens, pages
        self._captured: dict[tuple[ForwardMode, int, int], Captured] = {}

    def find(self, batch: ForwardBatch) -> Captured | None:
        if batch.page_table.shape[1] > self._pages:
            self._refuse_size(batch)
        return self._captured.get((batch.forward_mode, batch.batch_size, batch.num_tokens))

    def queries(self, batch: ForwardBatch) -> int:
        """New tokens of each request of a batch to be captured; 0 where ``extend_seq_lens`` says it at each replay."""
        mode, requests, tokens = batch.forward_mode, batch.batch_size, batch.num_tokens
        if not requests or not tokens:
            raise PlanError(f"a captured batch has requests and rows, not {requests} and {tokens}")
        if requests > self._requests or tokens > self._tokens:
            self._refuse_size(batch)
        if mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
            if batch.extend_seq_lens is None:
                raise PlanError(f"a captured {mode} needs extend_seq_lens, the new tokens of each request")
            return 0
        if tokens % requests or (mode.is_decode and tokens != requests):
            raise PlanError(
                f"a captured {mode} has equally many rows of every request, not {tokens} rows for {requests} requests"
            )
        return tokens // requests

    def keep(self, batch: ForwardBatch, plan: Plan) -> Captured:
        captured = Captured(plan, batch.page_table)
        self._captured[batch.forward_mode, batch.batch_size, batch.num_tokens] = captured
        return captured

    def _refuse_size(self, batch: ForwardBatch) -> Never:
        raise PlanError(
            f"a batch of {batch.batch_size} requests, {batch.num_tokens} rows and {batch.page_table.shape[1]} pages a "
            f"request does not fit the memory for graphs, of {self._requests} requests, {self._tokens} rows and "
            f"{self._pages} pages"
        )
