"""The prefix cache: exact hits, shared references, least recently used pages first out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug import AttentionKind, DType, LayerSpec, PoolError
from attnplug.linear import LinearDims, LinearStatePool
from attnplug_engine.scheduling.page_allocator import PageAllocator
from attnplug_engine.scheduling.prefix_cache import PrefixCache
from attnplug_engine.scheduling.state_allocator import StateAllocator
from attnplug_testing.errors import having, naming


class Token(int):
    """A token id whose hash always collides."""

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        return int(self) == other


def make(pages: int = 16, page_size: int = 2) -> tuple[PageAllocator, PrefixCache]:
    allocator = PageAllocator(pages)
    return allocator, PrefixCache(allocator, page_size)


def put(allocator: PageAllocator, cache: PrefixCache, tokens: Sequence[int]) -> list[int]:
    """Cache the tokens on new pages, and release these as a request that ends does."""
    pages = allocator.allocate(len(tokens) // cache.page_size)
    cache.insert(tokens, pages)
    allocator.release(pages)
    return pages


def test_a_prefix_is_found_in_whole_pages() -> None:
    allocator, cache = make()
    pages = put(allocator, cache, [1, 2, 3, 4])
    assert cache.match([1, 2, 3, 4, 5]) == (pages, 4)
    assert cache.match([1, 2, 3, 9, 9]) == (pages[:1], 2)
    assert cache.match([1, 9, 3, 4, 5]) == ([], 0)


@pytest.mark.parametrize(("length", "found"), [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (6, 2)])
def test_at_least_one_token_is_left_to_compute(length: int, found: int) -> None:
    allocator, cache = make()
    pages = put(allocator, cache, [1, 2, 3, 4, 5, 6])
    assert cache.match([1, 2, 3, 4, 5, 6][:length]) == (pages[:found], 2 * found)


def test_the_same_page_of_tokens_behind_another_prefix_is_no_hit() -> None:
    allocator, cache = make()
    put(allocator, cache, [1, 2, 3, 4])
    assert cache.match([3, 4, 5]) == ([], 0)
    assert cache.match([9, 9, 3, 4, 5]) == ([], 0)


def test_tokens_with_equal_hashes_are_not_mistaken_for_each_other() -> None:
    allocator, cache = make()
    first = put(allocator, cache, [Token(1), Token(2)])
    second = put(allocator, cache, [Token(1), Token(3)])
    assert cache.match([Token(1), Token(2), Token(0)]) == (first, 2)
    assert cache.match([Token(1), Token(3), Token(0)]) == (second, 2)
    assert cache.match([Token(1), Token(4), Token(0)]) == ([], 0)


def test_the_cache_holds_one_reference_to_each_page() -> None:
    allocator, cache = make()
    pages = allocator.allocate(2)
    assert cache.insert([1, 2, 3, 4], pages) == 2
    assert [allocator.references(page) for page in pages] == [2, 2]
    assert cache.insert([1, 2, 3, 4], pages) == 0
    allocator.release(pages)
    assert [allocator.references(page) for page in pages] == [1, 1]
    cache.clear()
    assert (len(cache), allocator.free_pages) == (0, 16)
    assert cache.match([1, 2, 3]) == ([], 0)


def test_a_page_that_is_cached_already_stays_and_its_duplicate_is_not_held() -> None:
    allocator, cache = make()
    first = put(allocator, cache, [1, 2, 3, 4])
    second = put(allocator, cache, [1, 2, 5, 6])
    assert cache.match([1, 2, 5, 6, 7]) == ([first[0], second[1]], 4)
    assert allocator.references(second[0]) == 0


def test_nothing_in_use_is_put_behind_a_page_that_its_holder_does_not_hold() -> None:
    allocator, cache = make()
    put(allocator, cache, [1, 2])
    pages = allocator.allocate(2)
    assert cache.insert([1, 2, 3, 4], pages, in_use=True) == 0
    assert [allocator.references(page) for page in pages] == [1, 1]
    assert cache.evict(5) == 1


def test_the_least_recently_used_goes_first_and_a_page_after_those_behind_it() -> None:
    allocator, cache = make()
    first = put(allocator, cache, [1, 2, 3, 4])
    second = put(allocator, cache, [5, 6])
    third = put(allocator, cache, [7, 8])
    cache.match([5, 6, 0])
    gone = []
    for _ in range(4):
        assert cache.evict(1) == 1
        gone += [page for page in (*first, *second, *third) if not allocator.references(page) and page not in gone]
    assert gone == [first[1], first[0], *third, *second]
    assert cache.evict(1) == 0


def test_a_page_that_a_request_holds_is_not_evicted() -> None:
    allocator, cache = make()
    pages = put(allocator, cache, [1, 2, 3, 4, 5, 6])
    allocator.share(pages[:2])
    assert not cache.can_evict(2)
    assert cache.can_evict(1)
    assert not cache.can_evict(1, keeping={pages[2]})
    assert cache.evict(3) == 1
    allocator.release(pages[:2])
    assert cache.can_evict(2)
    assert cache.evict(3) == 2
    assert allocator.free_pages == 16


def test_a_page_held_behind_one_that_is_not_keeps_both() -> None:
    allocator, cache = make()
    pages = put(allocator, cache, [1, 2, 3, 4])
    allocator.share(pages[1:])
    assert cache.evict(2) == 0
    assert cache.match([1, 2, 3, 4, 5]) == (pages, 4)


def test_an_evicted_page_gives_its_snapshot_back() -> None:
    layer = LayerSpec(0, AttentionKind.LIGHTNING, 1, 1, 1, 1, 1.0, linear=LinearDims(1, 1, 1, 1))
    states = StateAllocator(LinearStatePool([layer], num_slots=2, dtype=DType.FLOAT32, device="cpu"))
    allocator = PageAllocator(4)
    cache = PrefixCache(allocator, 2, states)
    put(allocator, cache, [1, 2, 3, 4])
    for tokens in ([1, 2], [1, 2, 3, 4]):
        cache.add_snapshot(tokens, states.allocate())
    assert cache.evict(1) == 1
    assert (states.free_slots, cache.match_snapshot([1, 2, 3, 4, 5])[1]) == (1, 2)
    assert cache.evict(1) == 1
    assert states.free_slots == 2


def test_statistics_count_what_was_served() -> None:
    allocator, cache = make()
    put(allocator, cache, [1, 2, 3, 4])
    cache.count_lookup(5, 4)
    cache.count_lookup(3, 0)
    cache.evict(1)
    statistics = cache.statistics
    assert (statistics.pages, statistics.lookups, statistics.hits) == (1, 2, 1)
    assert (statistics.tokens, statistics.hit_tokens, statistics.evicted_pages) == (8, 4, 1)


def test_pages_and_tokens_that_do_not_fit_are_refused_and_nothing_is_cached() -> None:
    allocator, cache = make()
    pages = allocator.allocate(2)
    with pytest.raises(PoolError, check=naming(2, 3)):
        cache.insert([1, 2, 3], pages)
    allocator.release(pages)
    with pytest.raises(PoolError, check=having(pages=(0, 1))):
        cache.insert([1, 2, 3, 4], pages)
    assert (len(cache), cache.match([1, 2, 3])) == (0, ([], 0))
    with pytest.raises(PoolError, check=naming("page_size=0")):
        PrefixCache(allocator, 0)


@settings(max_examples=24, deadline=None)
@given(
    page_size=st.integers(1, 3),
    actions=st.lists(
        st.tuples(
            st.sampled_from(["put", "hold", "drop", "evict"]),
            st.lists(st.integers(0, 1), max_size=12),
            st.integers(1, 6),
        ),
        max_size=40,
    ),
)
def test_whatever_happens_hits_are_exact_and_held_pages_stay(
    page_size: int, actions: list[tuple[str, list[int], int]]
) -> None:
    allocator, cache = make(pages=24, page_size=page_size)
    contents: dict[int, tuple[int, ...]] = {}  # page -> all tokens up to its end
    held: list[list[int]] = []
    for action, tokens, count in actions:
        if action == "put":
            whole = tokens[: len(tokens) // page_size * page_size]
            needed = len(whole) // page_size
            if needed > allocator.free_pages:
                cache.evict(needed - allocator.free_pages)
            if needed <= allocator.free_pages:
                for number, page in enumerate(put(allocator, cache, whole), 1):
                    contents[page] = tuple(whole[: number * page_size])
        elif action == "hold":
            pages, length = cache.match(tokens)
            assert length == len(pages) * page_size < max(len(tokens), 1)
            assert [contents[page] for page in pages] == [
                tuple(tokens[: number * page_size]) for number in range(1, len(pages) + 1)
            ]
            allocator.share(pages)
            held.append(pages)
        elif action == "drop" and held:
            allocator.release(held.pop(count % len(held)))
        elif action == "evict":
            possible, free = cache.can_evict(count), allocator.free_pages
            freed = cache.evict(count)
            assert possible == (freed == count)
            assert allocator.free_pages == free + freed
    for pages in held:
        assert all(allocator.references(page) for page in pages)
        allocator.release(pages)
    left = len(cache)
    assert cache.evict(24) == left
    assert allocator.free_pages == 24
