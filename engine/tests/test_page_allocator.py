"""PageAllocator: pages that are allocated, shared and freed, and that a refused call changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from attnplug import PoolError
from attnplug_engine.scheduling.page_allocator import BadPages, OutOfPages, PageAllocator
from attnplug_testing.errors import having, naming


def counts(allocator: PageAllocator) -> list[int]:
    return [allocator.references(page) for page in range(allocator.num_pages)]


def test_allocated_pages_are_distinct_and_held_once() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(4)
    assert sorted(pages) == [0, 1, 2, 3]
    assert counts(allocator) == [1, 1, 1, 1]
    assert allocator.free_pages == 0


def test_allocating_nothing_gives_nothing() -> None:
    allocator = PageAllocator(4)
    assert allocator.allocate(0) == []
    assert allocator.free_pages == 4


def test_allocation_is_all_or_nothing() -> None:
    allocator = PageAllocator(4)
    allocator.allocate(1)
    with pytest.raises(OutOfPages) as caught:
        allocator.allocate(5)
    assert (caught.value.asked, caught.value.free, caught.value.total) == (5, 3, 4)
    assert allocator.free_pages == 3
    assert sum(counts(allocator)) == 1


def test_a_shared_page_is_free_only_after_its_last_release() -> None:
    allocator = PageAllocator(2)
    pages = allocator.allocate(1)
    allocator.share(pages)
    allocator.release(pages)
    assert (allocator.references(pages[0]), allocator.free_pages) == (1, 1)
    allocator.release(pages)
    assert (allocator.references(pages[0]), allocator.free_pages) == (0, 2)


def test_shared_pages_are_distinguished_from_the_others() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(3)
    allocator.share(pages[1:])
    assert allocator.shared(pages) == set(pages[1:])
    assert allocator.shared([]) == set()
    with pytest.raises(BadPages, check=having(pages=(4,))):
        allocator.shared([0, 4])


def test_a_page_named_twice_is_shared_and_released_twice() -> None:
    allocator = PageAllocator(1)
    (page,) = allocator.allocate(1)
    allocator.share([page, page])
    assert allocator.references(page) == 3
    allocator.release([page, page, page])
    assert allocator.free_pages == 1


def test_a_freed_page_is_handed_out_again() -> None:
    allocator = PageAllocator(1)
    for _ in range(3):
        allocator.release(allocator.allocate(1))
    assert allocator.allocate(1) == [0]


Call = Callable[[PageAllocator], object]
REFUSED: dict[str, tuple[Call, tuple[int, ...]]] = {
    "double free": (lambda a: a.release([0, 3]), (3,)),
    "the same page twice in one release": (lambda a: a.release([1, 0, 0]), (0,)),
    "release of a negative page": (lambda a: a.release([0, -1]), (-1,)),
    "release beyond the pool": (lambda a: a.release([0, 4]), (4,)),
    "sharing a free page": (lambda a: a.share([0, 2, 3]), (2, 3)),
    "sharing a negative page": (lambda a: a.share([0, -2]), (-2,)),
    "sharing beyond the pool": (lambda a: a.share([0, 9]), (9,)),
    "references of a negative page": (lambda a: a.references(-1), (-1,)),
}


@pytest.mark.parametrize(("call", "named"), REFUSED.values(), ids=REFUSED.keys())
def test_a_refused_call_names_the_pages_and_changes_nothing(call: Call, named: tuple[int, ...]) -> None:
    allocator = PageAllocator(4)
    assert allocator.allocate(2) == [0, 1]
    with pytest.raises(BadPages) as caught:
        call(allocator)
    assert caught.value.pages == named
    assert all(str(page) in str(caught.value) for page in named)
    assert (counts(allocator), allocator.free_pages) == ([1, 1, 0, 0], 2)
    assert sorted(allocator.allocate(2)) == [2, 3]


@pytest.mark.parametrize("num_pages", [0, -1])
def test_a_pool_without_pages_is_refused(num_pages: int) -> None:
    with pytest.raises(PoolError, check=naming(num_pages)):
        PageAllocator(num_pages)


def test_a_negative_number_of_pages_is_refused() -> None:
    with pytest.raises(PoolError, check=naming(-1)):
        PageAllocator(2).allocate(-1)


def test_a_call_costs_time_in_its_pages_and_not_in_the_pool() -> None:
    allocator = PageAllocator(1_000_000)
    began = time.perf_counter()
    for _ in range(2_000):
        allocator.release(allocator.allocate(2))
    # Anything that looks at all pages takes at least 10 ms a call here: 20 s in all.
    assert time.perf_counter() - began < 2


class AllocatorAgainstCounts(RuleBasedStateMachine):
    """State machine that compares the allocator with a list of reference counts."""

    SIZE = 6

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(self.SIZE)
        self.model = [0] * self.SIZE

    @rule(n=st.integers(0, SIZE + 1))
    def allocate(self, n: int) -> None:
        free = [page for page, held in enumerate(self.model) if not held]
        if n > len(free):
            with pytest.raises(OutOfPages):
                self.allocator.allocate(n)
            return
        pages = self.allocator.allocate(n)
        assert len(set(pages)) == n
        assert set(pages) <= set(free)
        for page in pages:
            self.model[page] = 1

    @rule(pages=st.lists(st.integers(-1, SIZE), max_size=4))
    def share(self, pages: list[int]) -> None:
        if all(0 <= page < self.SIZE and self.model[page] for page in pages):
            self.allocator.share(pages)
            for page in pages:
                self.model[page] += 1
        else:
            with pytest.raises(PoolError):
                self.allocator.share(pages)

    @rule(pages=st.lists(st.integers(-1, SIZE), max_size=4))
    def release(self, pages: list[int]) -> None:
        if all(0 <= page < self.SIZE and self.model[page] >= pages.count(page) for page in pages):
            self.allocator.release(pages)
            for page in pages:
                self.model[page] -= 1
        else:
            with pytest.raises(PoolError):
                self.allocator.release(pages)

    @precondition(lambda self: any(self.model))
    @rule()
    def release_everything(self) -> None:
        self.allocator.release([page for page, held in enumerate(self.model) for _ in range(held)])
        self.model = [0] * self.SIZE
        assert self.allocator.free_pages == self.SIZE

    @invariant()
    def same_counts(self) -> None:
        assert counts(self.allocator) == self.model
        assert self.allocator.free_pages == self.model.count(0)


AllocatorAgainstCounts.TestCase.settings = settings(max_examples=12, stateful_step_count=30, deadline=None)
TestAllocatorAgainstCounts = AllocatorAgainstCounts.TestCase
