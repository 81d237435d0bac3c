"""Page allocator with reference counts. It does not know what a page holds, so slots of linear states are pages too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from attnplug import PoolError


class OutOfPages(PoolError):
    """More pages were requested than are free. Nothing was allocated."""

    def __init__(self, asked: int, free: int, total: int, unit: str = "page") -> None:
        self.asked = asked
        self.free = free
        self.total = total
        super().__init__(
            f"{asked} {unit}s requested, {free} of {total} free; "
            f"wait for a request to finish, preempt one, or build the pool with more {unit}s"
        )


class BadPages(PoolError):
    """A call named pages for which it is not valid. Nothing changed."""

    def __init__(self, pages: Iterable[int], message: str) -> None:
        self.pages = tuple(pages)
        super().__init__(message)


class PageAllocator:
    """Allocates the page ids ``0 … num_pages - 1`` and counts the references to each.

    A page is free if it has no reference. Every call checks all of its arguments before it changes anything, and its
    cost depends on the number of pages it names, not on the size of the pool. ``unit`` is the word for a page in
    messages.
    """

    def __init__(self, num_pages: int, *, unit: str = "page") -> None:
        if num_pages < 1:
            raise PoolError(f"a pool of {num_pages} {unit}s cannot hold anything; give 1 or more")
        self._unit = unit
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_pages(self) -> int:
        return len(self._references)

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def references(self, page: int) -> int:
        """Return the number of references to ``page``; 0 if it is free."""
        self._check_inside((page,))
        return self._references[page]

    def shared(self, pages: Sequence[int]) -> set[int]:
        """Return those of ``pages`` that have more than one reference."""
        self._check_inside(pages)
        return {page for page in pages if self._references[page] > 1}

    def require(self, n: int) -> None:
        """Raise ``OutOfPages`` unless ``n`` pages are free."""
        if n > len(self._free):
            raise OutOfPages(n, len(self._free), self.num_pages, self._unit)

    def allocate(self, n: int) -> list[int]:
        """Return ``n`` pages with one reference each. Raises ``OutOfPages`` if fewer are free."""
        if n < 0:
            raise PoolError(f"{n} {self._unit}s requested; give 0 or more")
        self.require(n)
        first = len(self._free) - n
        pages = self._free[first:]
        del self._free[first:]
        pages.reverse()
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add a reference to each of ``pages``, two for a page named twice. All must be in use."""
        self._check_inside(pages)
        unused = sorted({page for page in pages if not self._references[page]})
        if unused:
            raise BadPages(unused, f"{self._unit}s {unused} are free and cannot be shared; allocate them first")
        for page in pages:
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop a reference to each of ``pages``, two for a page named twice. A page without references is free."""
        self._check_inside(pages)
        drops = Counter(pages)
        excess = sorted(page for page, dropped in drops.items() if dropped > self._references[page])
        if excess:
            counts = ", ".join(f"{page} ({self._references[page]} held, {drops[page]} dropped)" for page in excess)
            raise BadPages(
                excess,
                f"{self._unit}s released more often than they are held: {counts}; "
                "release once what was allocated or shared once",
            )
        for page, dropped in drops.items():
            self._references[page] -= dropped
            if not self._references[page]:
                self._free.append(page)

    def _check_inside(self, pages: Sequence[int]) -> None:
        if not pages or (min(pages) >= 0 and max(pages) < self.num_pages):
            return
        outside = sorted({page for page in pages if not 0 <= page < self.num_pages})
        if outside:
            raise BadPages(
                outside, f"{self._unit}s {outside} are not in this pool, which holds 0 to {self.num_pages - 1}"
            )
