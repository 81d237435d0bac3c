"""What a backend's memory for CUDA graphs was made for, and the batches that it therefore refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Never

import torch

from attnplug.batch import ForwardBatch
from attnplug.errors import PlanError
from attnplug.plan import ForwardMode

_UNIFORM = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """The most that memory for graphs of level ``UNIFORM`` was made for; ``pages`` is the width of a page table."""

    max_bs: int
    max_num_tokens: int
    pages: int

    def check_table(self, batch: ForwardBatch) -> None:
        """Refuse a page table that does not fit, whenever it comes."""
        if batch.page_table.shape[1] > self.pages:
            self._refuse_size(batch)

    def check(self, batch: ForwardBatch) -> None:
        """Refuse a batch that cannot be captured."""
        mode, requests, tokens = batch.forward_mode, batch.batch_size, batch.num_tokens
        if mode not in _UNIFORM:
            raise PlanError(f"a batch in mode {mode} cannot be captured, only {', '.join(_UNIFORM)}")
        if batch.seq_lens.dtype is not torch.int32:
            raise PlanError(f"a captured batch has seq_lens in int32, not in {batch.seq_lens.dtype}")
        if not requests or tokens % requests or (mode.is_decode and tokens != requests):
            raise PlanError(
                f"a captured batch has equally many rows of every request, not {tokens} rows for {requests} requests"
            )
        if requests > self.max_bs or tokens > self.max_num_tokens:
            self._refuse_size(batch)
        self.check_table(batch)

    def _refuse_size(self, batch: ForwardBatch) -> Never:
        raise PlanError(
            f"a batch of {batch.batch_size} requests, {batch.num_tokens} rows and {batch.page_table.shape[1]} pages a "
            f"request does not fit the memory for graphs, of {self.max_bs} requests, {self.max_num_tokens} rows and "
            f"{self.pages} pages"
        )
