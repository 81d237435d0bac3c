"""Random use of the slot table over a pool: every row reads back its own data, even from shared pages."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from test_slot_table import snapshot

from attnplug import AttentionKind, DType, LayerSpec, MHAPool, PoolError
from attnplug.kernels import PageCopy
from attnplug_engine.scheduling.page_allocator import PageAllocator
from attnplug_engine.scheduling.slot_table import SlotTable


class TableOverPool(RuleBasedStateMachine):
    """Random requests over a real pool: every row reads back exactly what was written for it.

    Each token has a unique number. Free pages are NaN, which shows a row that reads one, or a copy that comes too late.
    """

    PAGE_SIZE = 3
    PAGES = 10
    LAYER = LayerSpec(0, AttentionKind.MHA, 1, 1, 2, 1, 1.0)

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(self.PAGES)
        self.table = SlotTable(self.allocator, page_size=self.PAGE_SIZE, max_requests=4, max_pages=4)
        self.pool = MHAPool(
            [self.LAYER], num_pages=self.PAGES, page_size=self.PAGE_SIZE, dtype=DType.FLOAT32, device="cpu"
        )
        self.contents: dict[int, list[float]] = {}
        self.next_token = 1.0
        self.poison_free_pages()

    def poison_free_pages(self) -> None:
        for page in range(self.PAGES):
            if not self.allocator.references(page):
                self.pool.keys(0)[page] = torch.nan
                self.pool.values(0)[page] = torch.nan

    def slots(self, row: int, first: int) -> torch.Tensor:
        pages = self.table.pages(row)
        places = range(first, self.table.length(row))
        return torch.tensor([pages[t // self.PAGE_SIZE] * self.PAGE_SIZE + t % self.PAGE_SIZE for t in places]).long()

    def write(self, row: int) -> None:
        first = len(self.contents[row])
        tokens = self.table.length(row) - first
        numbers = torch.arange(tokens) + self.next_token
        self.next_token += tokens
        self.pool.write(0, self.slots(row, first), numbers.view(-1, 1, 1).expand(-1, 1, 2), -numbers.view(-1, 1, 1))
        self.contents[row] += numbers.tolist()

    def any_row(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.contents)))

    @rule()
    def admit(self) -> None:
        if len(self.contents) == 4:
            with pytest.raises(PoolError):
                self.table.admit()
        else:
            self.contents[self.table.admit()] = []

    @precondition(lambda self: 0 < len(self.contents) < 4)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        row = self.any_row(data)
        length = data.draw(st.integers(0, self.table.length(row)))
        pages = self.table.pages(row)[: -(-length // self.PAGE_SIZE)]
        self.contents[self.table.admit(pages, length)] = self.contents[row][:length]

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def extend_several_then_copy_once_then_write(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.contents)), min_size=1, unique=True))
        copies: list[PageCopy] = []
        extended = []
        for row in rows:
            before = (self.table.pages(row), self.table.length(row), self.allocator.free_pages)
            try:
                copies += self.table.extend(row, data.draw(st.integers(0, 6)))
                extended.append(row)
            except PoolError:
                assert (self.table.pages(row), self.table.length(row), self.allocator.free_pages) == before
        self.pool.copy_pages(copies)
        for row in extended:
            self.write(row)

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def extend_each_then_copy_then_write(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.contents)), unique=True))
        before = snapshot(self.allocator, self.table, *self.contents)
        try:
            copies = self.table.extend_each(rows)
        except PoolError:
            assert snapshot(self.allocator, self.table, *self.contents) == before
            return
        self.pool.copy_pages(copies)
        for row in rows:
            self.write(row)

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        row = self.any_row(data)
        length = data.draw(st.integers(0, self.table.length(row)))
        self.table.truncate(row, length)
        del self.contents[row][length:]
        self.poison_free_pages()

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        row = self.any_row(data)
        self.table.release(row)
        del self.contents[row]
        self.poison_free_pages()

    @invariant()
    def rows_read_back_what_was_written_for_them(self) -> None:
        for row, contents in self.contents.items():
            slots = self.slots(row, 0)
            assert self.pool.read_keys(0, slots)[:, 0, 1].tolist() == contents
            assert self.pool.read_values(0, slots)[:, 0, 0].neg().tolist() == contents

    @invariant()
    def references_are_those_of_the_rows(self) -> None:
        held = Counter(page for row in self.contents for page in self.table.pages(row))
        assert [self.allocator.references(page) for page in range(self.PAGES)] == [held[p] for p in range(self.PAGES)]
        assert self.allocator.free_pages == self.PAGES - len(held)

    @invariant()
    def a_batch_shows_the_rows(self) -> None:
        rows = sorted(self.contents)
        page_table, lengths = self.table.batch(rows, width=4)
        assert page_table.tolist() == [[*p, *[-1] * (4 - len(p))] for p in (self.table.pages(row) for row in rows)]
        assert lengths.tolist() == [len(self.contents[row]) for row in rows]

    def teardown(self) -> None:
        for row in list(self.contents):
            self.table.release(row)
        assert self.allocator.free_pages == self.PAGES


TableOverPool.TestCase.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)
TestTableOverPool = TableOverPool.TestCase
