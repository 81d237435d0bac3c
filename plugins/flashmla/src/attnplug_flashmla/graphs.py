"""Memory and planning of captured batches: everything that a graph holds the address of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Never

import torch

from attnplug import BackendId, ForwardBatch, ForwardMode, Plan, PlanError
from attnplug_flashmla.kernels import PAGE, Call, Kernels
from attnplug_flashmla.planner import Metadata, Pages


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """One captured shape of batch. All that changes from replay to replay is made inside the graph."""

    pages: Pages
    call: Call
    plan: Plan

    def fill(self, batch: ForwardBatch, page_size: int, kernels: Kernels) -> None:
        """What the captured kernels read, from the page table and the lengths that the batch has then."""
        self.pages.fill(batch.page_table, batch.seq_lens, page_size)
        self.call.schedule.become(kernels.schedule(self.pages.kv_lens, self.call.queries))


class GraphState:
    """Memory sized once, shared by every captured shape: graphs run one after the other.

    A schedule's size depends on the shape, so each shape has one of its own.
    """

    def __init__(
        self, max_bs: int, max_num_tokens: int, max_context: int, page_size: int, device: torch.device
    ) -> None:
        self._requests, self._tokens, self._page_size = max_bs, max_num_tokens, page_size
        self._pages = -(-max_context // page_size)
        self._memory = Pages.reserve(max_bs, max_num_tokens, self._pages * page_size // PAGE, device)
        self._captured: dict[tuple[ForwardMode, int, int], Captured] = {}

    def find(self, batch: ForwardBatch) -> Captured | None:
        if batch.page_table.shape[1] > self._pages:
            self._refuse_size(batch)
        return self._captured.get((batch.forward_mode, batch.batch_size, batch.num_tokens))

    def capture(self, batch: ForwardBatch, kernels: Kernels, planner: BackendId) -> Captured:
        """Plan a shape that was not captured before."""
        mode, requests, tokens = batch.forward_mode, batch.batch_size, batch.num_tokens
        if not requests or tokens % requests or (mode.is_decode and tokens != requests):
            raise PlanError(
                f"a captured batch has equally many rows of every request, not {tokens} rows for {requests} requests"
            )
        if requests > self._requests or tokens > self._tokens:
            self._refuse_size(batch)
        queries = tokens // requests
        pages = self._memory.part(requests, queries)
        pages.fill(batch.page_table, batch.seq_lens, self._page_size)
        call = Call(queries, pages.kv_lens, pages.table, kernels.schedule(pages.kv_lens, queries))
        plan = Plan(planner, mode, query_rows=tokens, kv_rows=None, metadata=Metadata(pages.slots, call))
        captured = self._captured[mode, requests, tokens] = Captured(pages, call, plan)
        return captured

    def _refuse_size(self, batch: ForwardBatch) -> Never:
        raise PlanError(
            f"a batch of {batch.batch_size} requests, {batch.num_tokens} rows and {batch.page_table.shape[1]} pages a "
            f"request does not fit the memory for graphs, of {self._requests} requests, {self._tokens} rows and "
            f"{self._pages} pages"
        )
