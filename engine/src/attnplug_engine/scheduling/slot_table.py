"""Slot table: the pages of each request, as page table rows ``[requests, pages]`` and lengths."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from attnplug import PoolError
from attnplug.kernels import PageCopy, to_device
from attnplug_engine.memory.capacity import Capacity
from attnplug_engine.scheduling.page_allocator import PageAllocator

_UNUSED = -1


class SlotTable:
    """Page table rows of all requests that are being served.

    A row owns one reference to each of its pages. Token t of a row lies at offset ``t % page_size`` of its page ``t //
    page_size``. Rows share pages (a common prefix, a fork), but a row never gets room in a page that has other
    references: ``extend`` replaces such a page and returns the copy to make.

    A method that raises has changed nothing.
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
        self._free_rows = list(range(max_requests - 1, -1, -1))
        # A row is its length, which implies its number of pages, and these pages in its part of the entries; unused
        # entries are -1. Python reads and writes the arrays element by element, numpy gathers a batch.
        self._lengths = [_UNUSED] * max_requests
        self._entries = array("i", [_UNUSED]) * ((max_requests + 1) * max_pages)
        self._page_table = np.frombuffer(self._entries, np.int32).reshape(max_requests + 1, max_pages)
        self._mirror: Tensor | None = None
        self._changed: dict[int, int] = {}  # entries that are not yet sent to the mirror
        self._changes = [0] * max_requests

    @property
    def page_size(self) -> int:
        return self._page_size

    @property
    def max_requests(self) -> int:
        return len(self._lengths)

    @property
    def max_pages(self) -> int:
        return self._max_pages

    @property
    def device(self) -> torch.device:
        return self._device

    def admit(self, shared_pages: Sequence[int] = (), length: int = 0) -> int:
        """Return a row for a new request whose first ``length`` tokens are already in ``shared_pages``.

        The row takes its own reference to each of these pages.
        """
        if not self._free_rows:
            limit = self.max_requests
            raise PoolError(
                f"request {limit + 1} cannot be admitted: the table holds {limit} requests; "
                "wait for one to finish, or raise `max_batch`",
                settings=["max_batch"],
            )
        if length < 0 or len(shared_pages) != self._pages_for(length):
            raise PoolError(
                f"{len(shared_pages)} shared pages do not hold exactly {length} tokens; "
                f"with {self._page_size} tokens to a page that takes {self._pages_for(max(length, 0))}"
            )
        self._check_room(length)
        self._allocator.share(shared_pages)
        row = self._free_rows.pop()
        self._lengths[row] = length
        self._write(row, 0, shared_pages)
        return row

    def extend(self, row: int, tokens: int) -> tuple[PageCopy, ...]:
        """Reserve room for ``tokens`` more tokens.

        Pass the returned copies, in their order, to the pools' ``copy_pages`` before new tokens of any row are written.
        """
        length = self.length(row)
        if tokens < 0:
            raise PoolError(f"row {row} cannot be extended by {tokens} tokens; use truncate to make it shorter")
        if tokens == 0:
            return ()
        self._check_room(length + tokens)
        held = self._pages_for(length)
        # Only the last page is ever replaced, and only if new tokens would go into it.
        last = self._page(row, held - 1) if length % self._page_size else None
        copied = last is not None and self._allocator.references(last) > 1
        fresh = self._allocator.allocate(self._pages_for(length + tokens) - held + copied)
        self._write(row, held - copied, fresh)
        self._lengths[row] = length + tokens
        if last is None or not copied:
            return ()
        self._allocator.release((last,))
        return (PageCopy(last, fresh[0]),)

    def extend_each(self, rows: Sequence[int]) -> tuple[PageCopy, ...]:
        """Reserve room for one more token in each of ``rows``, all different: ``extend`` for a whole decode step.

        Rows that share the page they would write to each count as needing a page of their own.
        """
        lengths = self._lengths_of(rows)
        if len(set(rows)) != len(rows):
            raise PoolError(f"rows {list(rows)} cannot be extended by one token each: a row is named twice")
        size, width, entries = self._page_size, self._max_pages, self._entries
        pages = {
            row: entries[row * width + length // size]
            for row, length in zip(rows, lengths, strict=True)
            if length % size  # otherwise the last page is full
        }
        shared = self._allocator.shared(list(pages.values()))
        ready = {row for row, page in pages.items() if page not in shared}
        growing = [row for row in rows if row not in ready]
        if growing:
            self._check_room(max(self._lengths[row] for row in growing) + 1)
            self._allocator.require(len(growing))
        copies = [copy for row in growing for copy in self.extend(row, 1)]
        for row in ready:
            self._lengths[row] += 1
        return tuple(copies)

    def truncate(self, row: int, length: int) -> None:
        """Drop the tokens from position ``length`` on, and release the pages that held only these."""
        before = self.length(row)
        if not 0 <= length <= before:
            raise PoolError(f"row {row} of {before} tokens cannot be truncated to {length}")
        kept = self._pages_for(length)
        dropped = self.pages(row)[kept:]
        self._allocator.release(dropped)
        self._write(row, kept, [_UNUSED] * len(dropped))
        self._lengths[row] = length

    def release(self, row: int) -> None:
        """End the request: drop its references, and free its row."""
        self.truncate(row, 0)
        self._lengths[row] = _UNUSED
        self._free_rows.append(row)

    def length(self, row: int) -> int:
        length = self._lengths[row] if 0 <= row < len(self._lengths) else _UNUSED
        if length == _UNUSED:
            raise PoolError(f"row {row} is not in use: it was never admitted, or has been released")
        return length

    def pages(self, row: int) -> tuple[int, ...]:
        """Return the row's pages in the order of its tokens."""
        first = row * self._max_pages
        return tuple(self._entries[first : first + self._pages_for(self.length(row))])

    def changes(self, rows: Sequence[int]) -> list[int]:
        """Return how often the pages of each row have changed. A plan over them is valid as long as this stays the
        same."""
        return [self._changes[row] for row in rows]

    def lengths_cpu(self, rows: Sequence[int]) -> Tensor:
        """Return lengths ``[rows]`` int32 on the CPU, without synchronizing with the device."""
        return torch.from_numpy(np.array(self._lengths_of(rows), np.int32))

    def batch(self, rows: Sequence[int], width: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the page table ``[rows, width]``, -1 where unused, and lengths ``[rows]``, int32 on the table's
        device.

        Both are copies: later changes to the table do not reach them. ``width`` defaults to the longest row's number of
        pages, at least 1.
        """
        lengths = self._lengths_of(rows)
        needed = self._pages_for(max(lengths, default=0))
        if width is None:
            width = max(needed, 1)
        elif width < needed:
            raise PoolError(f"a page table of width {width} cannot hold a row of {needed} pages; make it {needed} wide")
        page_table = self._page_table[:, :width].take(rows, 0)
        if width > self._max_pages:
            page_table = np.pad(page_table, ((0, 0), (0, width - self._max_pages)), constant_values=_UNUSED)
        return to_device(page_table, self._device, np.int32), to_device(lengths, self._device, np.int32)

    def mirror(self) -> Tensor:
        """Return the whole table ``[max_requests + 1, max_pages]`` int32 on its device, always at the same address.

        It equals the host's table at the time of the call; only entries that changed since are sent. The last row
        belongs to no request and serves padded ones. Entries behind a request's last page are undefined.
        """
        if self._mirror is None:
            whole = torch.from_numpy(self._page_table)  # shares memory on a CPU
            self._mirror = whole.to(self._device)
        elif self._changed:
            changed = np.array([[*self._changed], [*self._changed.values()]], np.int64)
            places, pages = to_device(changed, self._device).unbind()
            self._mirror.view(-1)[places] = pages.int()
        self._changed.clear()
        return self._mirror

    def _lengths_of(self, rows: Sequence[int]) -> list[int]:
        try:
            lengths = [self._lengths[row] for row in rows]
        except IndexError:
            lengths = [_UNUSED]
        if _UNUSED in lengths or (rows and min(rows) < 0):
            for row in rows:
                self.length(row)  # raises, naming the row
        return lengths

    def _pages_for(self, length: int) -> int:
        return -(-length // self._page_size)

    def _check_room(self, length: int) -> None:
        if self._pages_for(length) > self._max_pages:
            raise PoolError(
                f"{length} tokens need {self._pages_for(length)} pages, and a row holds {self._max_pages} "
                f"({self._max_pages * self._page_size} tokens); shorten the request, or build the table wider"
            )

    def _page(self, row: int, number: int) -> int:
        return self._entries[row * self._max_pages + number]

    def _write(self, row: int, first: int, pages: Sequence[int]) -> None:
        self._changes[row] += bool(pages)
        self._page_table[row, first : first + len(pages)] = pages
        if self._mirror is not None and not self._mirror.is_cpu:
            start = row * self._max_pages + first
            self._changed |= zip(range(start, start + len(pages)), pages, strict=True)


def build_table(capacity: Capacity, device: torch.device) -> tuple[PageAllocator, SlotTable]:
    """Build the page allocator and the slot table. Raises PoolError if host memory does not suffice."""
    # A config may claim any context, which is the table's width; but no request gets more pages than there are.
    longest = capacity.context_length + capacity.lookahead
    width = min(-(-longest // capacity.page_size), max(capacity.num_pages, 1 << 16))
    try:
        allocator = PageAllocator(capacity.num_pages)
        table = SlotTable(
            allocator,
            page_size=capacity.page_size,
            max_requests=capacity.max_batch,
            max_pages=width,
            device=device,
        )
    except MemoryError as error:
        raise PoolError(
            f"the table of {capacity.max_batch} requests with {width} pages of {capacity.page_size} tokens each, of "
            f"{capacity.num_pages} pages in all, cannot be allocated; lower `max_batch`, `context_length` or "
            "`num_pages`",
            settings=["max_batch", "context_length", "num_pages"],
        ) from error
    return allocator, table
