"""Which pages hold which request's tokens: slot tables as ``[requests, pages]`` plus lengths."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug.errors import PoolError
from attnplug.kv.allocator import PageAllocator, PageCopy


@dataclass(slots=True)
class _Row:
    """One request: its pages in order, always exactly as many as its length needs."""

    pages: list[int]
    length: int


class SlotTable:
    """The rows of all requests that are being served.

    A row owns one reference to each of its pages. Token t of a row lies at offset ``t % page_size`` of its
    page ``t // page_size``. Rows share pages (a common prefix, a fork); a row never gets room in a page that
    another holder refers to: ``extend`` replaces such a page and returns the copy to make.

    Every method changes all that it says or, when it raises, nothing.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        page_size: int,
        max_requests: int,
        max_pages: int,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, value in (("page_size", page_size), ("max_requests", max_requests), ("max_pages", max_pages)):
            if value < 1:
                raise PoolError(f"a slot table with {name}={value} cannot hold anything; give 1 or more")
        self._allocator = allocator
        self._page_size = page_size
        self._max_pages = max_pages
        self._device = torch.device(device)
        self._rows: list[_Row | None] = [None] * max_requests
        self._free_rows = list(range(max_requests - 1, -1, -1))
        # The same pages as in the rows, so that a batch is one gather and not a loop over its pages; unused
        # places are -1 at all times.
        self._entries = array("i", [-1]) * (max_requests * max_pages)
        self._master = torch.frombuffer(self._entries, dtype=torch.int32).view(max_requests, max_pages)

    @property
    def page_size(self) -> int:
        return self._page_size

    @property
    def max_requests(self) -> int:
        return len(self._rows)

    @property
    def max_pages(self) -> int:
        return self._max_pages

    def admit(self, shared_pages: Sequence[int] = (), length: int = 0) -> int:
        """A row for a new request whose first ``length`` tokens are already in ``shared_pages``.

        The row takes a reference of its own to each of these pages.
        """
        if not self._free_rows:
            limit = self.max_requests
            raise PoolError(
                f"request {limit + 1} cannot be admitted: the table holds {limit} requests; "
                "wait for one to finish, or raise --max-batch"
            )
        if length < 0 or len(shared_pages) != self._pages_for(length):
            raise PoolError(
                f"{len(shared_pages)} shared pages do not hold exactly {length} tokens; "
                f"with {self._page_size} tokens to a page that takes {self._pages_for(max(length, 0))}"
            )
        self._check_room(length)
        self._allocator.share(shared_pages)
        row = self._free_rows.pop()
        self._rows[row] = _Row(list(shared_pages), length)
        self._write_master(row, 0, shared_pages)
        return row

    def extend(self, row: int, tokens: int) -> tuple[PageCopy, ...]:
        """Make room for ``tokens`` more tokens.

        Hand the copies, in the order they were returned, to the pools' ``copy_pages`` before any row's new
        tokens are written.
        """
        entry = self._row(row)
        if tokens < 0:
            raise PoolError(f"row {row} cannot be extended by {tokens} tokens; use truncate to make it shorter")
        if tokens == 0:
            return ()
        length = entry.length + tokens
        self._check_room(length)
        held = len(entry.pages)
        # What is replaced is only ever the last page, and only when new tokens would go into it.
        copied = entry.length % self._page_size != 0 and self._allocator.references(entry.pages[-1]) > 1
        needed = self._pages_for(length) - held + copied
        fresh = self._allocator.allocate(needed) if needed else []
        copies: tuple[PageCopy, ...] = ()
        if copied:
            shared = entry.pages.pop()
            self._allocator.release((shared,))
            copies = (PageCopy(shared, fresh[0]),)
        if fresh:
            self._write_master(row, len(entry.pages), fresh)
            entry.pages += fresh
        entry.length = length
        return copies

    def truncate(self, row: int, length: int) -> None:
        """Forget the tokens from position ``length`` on, and give back the pages that held only these."""
        entry = self._row(row)
        if not 0 <= length <= entry.length:
            raise PoolError(f"row {row} of {entry.length} tokens cannot be truncated to {length}")
        kept = self._pages_for(length)
        self._allocator.release(entry.pages[kept:])
        self._master[row, kept : len(entry.pages)] = -1
        del entry.pages[kept:]
        entry.length = length

    def release(self, row: int) -> None:
        """End the request: drop its references, and let its row be used again."""
        self.truncate(row, 0)
        self._rows[row] = None
        self._free_rows.append(row)

    def length(self, row: int) -> int:
        return self._row(row).length

    def pages(self, row: int) -> tuple[int, ...]:
        """The row's pages in the order of its tokens."""
        return tuple(self._row(row).pages)

    def lengths_cpu(self, rows: Sequence[int]) -> Tensor:
        """Lengths ``[rows]`` int32 on the CPU, without asking the device."""
        return torch.tensor([self._row(row).length for row in rows], dtype=torch.int32)

    def batch(self, rows: Sequence[int], width: int | None = None) -> tuple[Tensor, Tensor]:
        """Page table ``[rows, width]``, -1 where unused, and lengths ``[rows]``: int32, on the table's device.

        Both are copies: later changes to the table do not reach them. ``width`` is by default the longest
        row's number of pages, at least 1.
        """
        needed = max((len(self._row(row).pages) for row in rows), default=0)
        if width is None:
            width = max(needed, 1)
        elif width < needed:
            raise PoolError(f"a page table of width {width} cannot hold a row of {needed} pages; make it {needed} wide")
        page_table = torch.full((len(rows), width), -1, dtype=torch.int32)
        page_table[:, :needed] = self._master[torch.tensor(rows, dtype=torch.int64), :needed]
        return self._on_device(page_table), self._on_device(self.lengths_cpu(rows))

    def _row(self, row: int) -> _Row:
        entry = self._rows[row] if 0 <= row < len(self._rows) else None
        if entry is None:
            raise PoolError(f"row {row} is not in use: it was never admitted, or has been released")
        return entry

    def _pages_for(self, length: int) -> int:
        return -(-length // self._page_size)

    def _check_room(self, length: int) -> None:
        if self._pages_for(length) > self._max_pages:
            raise PoolError(
                f"{length} tokens need {self._pages_for(length)} pages, and a row holds {self._max_pages} "
                f"({self._max_pages * self._page_size} tokens); shorten the request, or build the table wider"
            )

    def _write_master(self, row: int, first: int, pages: Sequence[int]) -> None:
        start = row * self._max_pages + first
        self._entries[start : start + len(pages)] = array("i", pages)  # a tenth of the cost of a tensor's slice

    def _on_device(self, tensor: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return tensor
        if self._device.type == "cuda":
            # Pinned memory makes the copy asynchronous; torch keeps it until the copy is done.
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor.to(self._device)
