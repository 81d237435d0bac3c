"""Prefix cache: pages of earlier requests, found by their tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from attnplug import PoolError
from attnplug_engine.scheduling.page_allocator import PageAllocator
from attnplug_engine.scheduling.state_allocator import StateAllocator


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Counters since the cache was built; ``pages`` is the current number."""

    pages: int
    lookups: int
    hits: int
    """Lookups that found at least one page."""
    tokens: int
    """Prompt tokens of all lookups."""
    hit_tokens: int
    """Prompt tokens that were found in the cache."""
    evicted_pages: int


class _Node:
    """One cached page, a child of the page before it; may have the linear state behind its last token."""

    __slots__ = ("children", "key", "page", "parent", "snapshot")

    def __init__(self, key: tuple[int, ...], page: int, parent: _Node | None) -> None:
        self.key = key
        self.page = page
        self.parent = parent
        self.snapshot: int | None = None
        self.children: dict[tuple[int, ...], _Node] = {}


class PrefixCache:
    """Radix tree of whole pages. An edge is a page's ``page_size`` tokens.

    The cache owns one reference to each of its pages. A request that uses a page has its own (``SlotTable.admit`` takes
    it), and a page with other references than the cache's is never evicted. A hit is exact: edges are compared by token
    ids, and all pages before a page have to match too.

    Two invariants make eviction a walk from the oldest page on. A page is used no later than its parent, so children
    come before their parents. And a slot table row that holds a page of the tree also holds its ancestors (see
    ``insert``), so if only the cache holds a page, only the cache holds its descendants.

    For a model with linear layers, a page is of use only together with the layers' states behind its last token.
    ``states`` allocates such states; a page may have a snapshot, which is a slot that the cache owns and that is never
    written to.
    """

    def __init__(self, allocator: PageAllocator, page_size: int, states: StateAllocator | None = None) -> None:
        if page_size < 1:
            raise PoolError(f"a prefix cache with page_size={page_size} cannot hold anything; give 1 or more")
        self._allocator = allocator
        self._page_size = page_size
        self._root = _Node((), -1, None)
        self._oldest_first: OrderedDict[_Node, None] = OrderedDict()
        self._states = states
        self._snapshots: OrderedDict[_Node, None] = OrderedDict()  # least recently used first
        self._lookups = self._hits = self._tokens = self._hit_tokens = self._evicted = 0

    def __len__(self) -> int:
        """Number of cached pages."""
        return len(self._oldest_first)

    @property
    def page_size(self) -> int:
        return self._page_size

    @property
    def statistics(self) -> CacheStatistics:
        return CacheStatistics(len(self), self._lookups, self._hits, self._tokens, self._hit_tokens, self._evicted)

    def match(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """Return the longest cached prefix of ``tokens``: its pages in order, and the number of tokens in them.

        At least one token is left over, because logits come from computing one. The caller gets no reference: take one
        before anything is evicted. Counts as a use, not as a lookup (``count_lookup``).
        """
        path = self._walk(tokens, len(tokens) - 1)
        if path:
            self._touch(path[-1])
        return [node.page for node in path], len(path) * self._page_size

    def match_snapshot(self, tokens: Sequence[int]) -> tuple[list[int], int, int | None]:
        """Like ``match``, up to the last page with a snapshot, whose slot is returned third. Copy it before any
        eviction."""
        path = self._walk(tokens, len(tokens) - 1)
        while path and path[-1].snapshot is None:
            path.pop()
        if not path:
            return [], 0, None
        self._touch(path[-1])
        self._snapshots.move_to_end(path[-1])
        return [node.page for node in path], len(path) * self._page_size, path[-1].snapshot

    def wants_snapshot(self, tokens: Sequence[int]) -> bool:
        """Return True if the page that ends with the last of ``tokens`` is cached and has no snapshot yet."""
        path = self._walk(tokens, len(tokens))
        return len(path) * self._page_size == len(tokens) and bool(path) and path[-1].snapshot is None

    def add_snapshot(self, tokens: Sequence[int], slot: int) -> None:
        """Give that page its snapshot. The caller's reference to ``slot`` becomes the cache's."""
        node = self._walk(tokens, len(tokens))[-1]
        assert node.snapshot is None
        node.snapshot = slot
        self._snapshots[node] = None

    def evict_snapshot(self, keeping: int | None = None) -> bool:
        """Free the slot of the least recently used snapshot other than ``keeping``; return False if there is none."""
        node = next((node for node in self._snapshots if node.snapshot != keeping), None)
        if node is None:
            return False
        self._drop_snapshot(node)
        return True

    def _drop_snapshot(self, node: _Node) -> None:
        if node.snapshot is not None and self._states is not None:
            self._states.release(node.snapshot)
            node.snapshot = None
            del self._snapshots[node]

    def _walk(self, tokens: Sequence[int], most: int) -> list[_Node]:
        """Return the cached pages with which the first ``most`` of ``tokens`` begin."""
        size, node = self._page_size, self._root
        path: list[_Node] = []
        for start in range(0, most - size + 1, size):
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            node = child
            path.append(node)
        return path

    def count_lookup(self, tokens: int, hit_tokens: int) -> None:
        """Record that a request of ``tokens`` tokens took ``hit_tokens`` of them from the cache."""
        self._lookups += 1
        self._hits += hit_tokens > 0
        self._tokens += tokens
        self._hit_tokens += hit_tokens

    def insert(self, tokens: Sequence[int], pages: Sequence[int], *, in_use: bool = False) -> int:
        """Cache ``pages``, which hold exactly ``tokens``; return how many are new to the cache.

        The cache takes its own reference to each new page, and keeps its own page if it has one with the same tokens.
        ``in_use`` says that the caller keeps holding ``pages``: then nothing is inserted behind a page that is not the
        cache's own, because the caller would hold a page of the tree without its ancestors.
        """
        size = self._page_size
        if len(tokens) != len(pages) * size:
            raise PoolError(
                f"{len(pages)} pages of {size} tokens cannot be cached for {len(tokens)} tokens; "
                "give whole pages and exactly the tokens that they hold"
            )
        node, start = self._root, 0
        for page in pages:
            key = tuple(tokens[start : start + size])
            child = node.children.get(key)
            if child is None:
                break
            if in_use and child.page != page:
                self._touch(child)
                return 0
            node, start = child, start + size
        new = pages[start // size :]
        self._allocator.share(new)
        for page in new:
            child = _Node(tuple(tokens[start : start + size]), page, node)
            node.children[child.key] = child
            self._oldest_first[child] = None
            node, start = child, start + size
        self._touch(node)
        return len(new)

    def can_evict(self, count: int, keeping: Collection[int] = ()) -> bool:
        """Return True if ``count`` pages could be evicted while those in ``keeping`` stay."""
        if count > len(self):
            return False
        references = self._allocator.references
        for node in self._oldest_first:
            if count <= 0:
                break
            if references(node.page) == 1 and node.page not in keeping:
                count -= 1
        return count <= 0

    def evict(self, count: int) -> int:
        """Free up to ``count`` pages, least recently used first, children before parents; return how many were freed.

        Only pages without other references are freed.
        """
        freed = 0
        passed: set[_Node] = set()
        while freed < count and self._oldest_first:
            node = next(iter(self._oldest_first))
            if node in passed:  # all younger pages were passed too
                break
            if node.children or self._allocator.references(node.page) > 1:
                # Held pages are in use, so they become the youngest: the next call need not pass them again.
                passed.update(self._touch(node))
                continue
            assert node.parent is not None
            self._drop_snapshot(node)
            del node.parent.children[node.key]
            del self._oldest_first[node]
            self._allocator.release((node.page,))
            freed += 1
        self._evicted += freed
        return freed

    def clear(self) -> None:
        """Drop all of the cache's references. Pages that requests hold stay theirs."""
        for node in list(self._snapshots):
            self._drop_snapshot(node)
        self._allocator.release([node.page for node in self._oldest_first])
        self._oldest_first.clear()
        self._root.children.clear()

    def _touch(self, node: _Node) -> list[_Node]:
        """Make ``node`` and its ancestors the youngest, the root page the very youngest."""
        path = []
        while node.parent is not None:
            self._oldest_first.move_to_end(node)
            path.append(node)
            node = node.parent
        return path
