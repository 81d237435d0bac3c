"""KV cache manager: slot table rows and pages of requests, with eviction from the prefix cache if no page is free."""

from __future__ import annotations

from collections.abc import Sequence

from attnplug import UsageError
from attnplug.kernels import PageCopy
from attnplug.sparse import Coordinator
from attnplug_engine.request import Request
from attnplug_engine.scheduling.page_allocator import OutOfPages, PageAllocator
from attnplug_engine.scheduling.prefix_cache import PrefixCache
from attnplug_engine.scheduling.slot_table import SlotTable


class KVCacheManager:
    """Rows and pages of all running requests. A method that returns False has changed no row."""

    def __init__(
        self,
        table: SlotTable,
        allocator: PageAllocator,
        cache: PrefixCache | None,
        coordinator: Coordinator | None = None,
    ) -> None:
        if cache is not None and cache.page_size != table.page_size:
            raise UsageError(
                f"the prefix cache has pages of {cache.page_size} tokens and the slot table of {table.page_size}; "
                "build both with the same page size"
            )
        self._table, self._allocator, self._cache = table, allocator, cache
        self._coordinator = coordinator

    @property
    def num_pages(self) -> int:
        return self._allocator.num_pages

    @property
    def free_pages(self) -> int:
        return self._allocator.free_pages

    @property
    def available_pages(self) -> int:
        """Pages that are free or cached."""
        return self.free_pages + (0 if self._cache is None else len(self._cache))

    def count_pages(self, request: Request) -> int:
        return 0 if request.row is None else len(self._table.pages(request.row))

    def has_room(self, pages: int, *, keeping: Sequence[int]) -> bool:
        """Return True if ``pages`` pages are free, or could be evicted while those in ``keeping`` stay."""
        lacking = pages - self.free_pages
        return lacking <= 0 or (self._cache is not None and self._cache.can_evict(lacking, frozenset(keeping)))

    def admit(self, request: Request, pages: Sequence[int], tokens: int) -> None:
        """Give a request a row that begins with ``tokens`` tokens in cached ``pages``."""
        request.row = self._table.admit(pages, tokens)
        request.computed = tokens

    def extend(self, request: Request, tokens: int, copies: list[PageCopy]) -> bool:
        """Reserve room for ``tokens`` more tokens of a request; return False if there are not enough pages."""
        row = request.row
        assert row is not None
        try:
            copies += self._table.extend(row, tokens)
        except OutOfPages as error:
            if not self._evict(error):
                return False
            copies += self._table.extend(row, tokens)
        return True

    def extend_each(self, requests: Sequence[Request], copies: list[PageCopy]) -> bool:
        """Reserve room for one more token of each request; return False if there are not enough pages."""
        rows: list[int] = [request.row for request in requests]  # type: ignore[misc] # every running request has a row
        try:
            copies += self._table.extend_each(rows)
        except OutOfPages as error:
            if not self._evict(error):
                return False
            copies += self._table.extend_each(rows)
        return True

    def extend_to(self, requests: Sequence[Request], lengths: Sequence[int], copies: list[PageCopy]) -> bool:
        """Reserve room up to ``lengths`` tokens of each request; return False if there are not enough pages."""
        rows: list[int] = [request.row for request in requests]  # type: ignore[misc] # every running request has a row
        held = [self._table.length(row) for row in rows]
        size, lacking = self._table.page_size, -self.free_pages
        for length, have in zip(lengths, held, strict=True):
            lacking += max(-(-length // size) - -(-have // size), 0)
        if lacking > 0 and (self._cache is None or self._cache.evict(lacking) < lacking):
            return False
        for row, length, have in zip(rows, lengths, held, strict=True):
            if length > have:
                # Only whole pages are cached, so no page that is written to is shared, and none is copied.
                copies += self._table.extend(row, length - have)
        return True

    def truncate(self, request: Request, length: int) -> None:
        """Drop a request's tokens from position ``length`` on."""
        assert request.row is not None
        self._table.truncate(request.row, length)
        request.computed = length

    def cache(self, request: Request, computed: int, *, in_use: bool) -> None:
        """Cache the whole pages of a request's first ``computed`` tokens, which finished steps have computed."""
        assert request.row is not None
        size = self._table.page_size
        if self._cache is not None and (full := computed // size):
            tokens = request.tokens(0, full * size)
            self._cache.insert(tokens, self._table.pages(request.row)[:full], in_use=in_use)

    def forget(self, request: Request) -> None:
        """Make the coordinator drop what it keeps for a request. It brings rows in again when they are needed."""
        assert request.row is not None
        if self._coordinator is not None:
            self._coordinator.release(request.row)

    def release(self, request: Request) -> None:
        assert request.row is not None
        self.forget(request)
        self._table.release(request.row)
        request.row, request.computed = None, 0

    def _evict(self, error: OutOfPages) -> bool:
        """Evict pages for a failed allocation; return True if it can succeed now."""
        lacking = error.asked - error.free
        return self._cache is not None and self._cache.evict(lacking) >= lacking
