"""Pages of past requests, found again by the tokens that they hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from attnplug import PoolError
from attnplug.host import PageAllocator
from attnplug.linear import LinearStatePool


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """What the cache has done since it was made; ``pages`` alone is how it stands now."""

    pages: int
    lookups: int
    hits: int
    """Lookups that found at least one page."""
    tokens: int
    """Prompt tokens of all lookups."""
    hit_tokens: int
    """Those among them that were found and not computed."""
    evicted_pages: int


class _Node:
    """One cached page, below the pages that come before it; perhaps with the linear state after its last token."""

    __slots__ = ("children", "key", "page", "parent", "snapshot")

    def __init__(self, key: tuple[int, ...], page: int, parent: _Node | None) -> None:
        self.key = key
        self.page = page
        self.parent = parent
        self.snapshot: int | None = None
        self.children: dict[tuple[int, ...], _Node] = {}


class PrefixCache:
    """A tree of whole pages; an edge is the page's tokens, ``page_size`` of them.

    The cache owns one reference to each of its pages; a request that uses a page has its own (``SlotTable.admit``
    takes it), and a page with more references than the cache's is never evicted. A hit is exact: edges are
    compared by the token ids, and all pages before a page have to match too.

    Two orders hold at all times, and make eviction a walk from the oldest page on. A page is used no later than
    the page before it, so that children come before their parents. And a row of a slot table that holds a
    page of the tree holds the tree's pages before it as well (see ``insert``), so that below a page which is
    held by nobody else all pages are.

    For a model with linear layers a page alone is of no use: its layers need their state after the page's last token.
    ``states`` is the pool of such states; some pages have a snapshot, a slot of it that the cache owns and nobody
    writes to.
    """

    def __init__(self, allocator: PageAllocator, page_size: int, states: LinearStatePool | None = None) -> None:
        if page_size < 1:
            raise PoolError(f"a prefix cache with page_size={page_size} cannot hold anything; give 1 or more")
        self._allocator = allocator
        self._page_size = page_size
        self._root = _Node((), -1, None)
        self._oldest_first: OrderedDict[_Node, None] = OrderedDict()
        self._states = states
        self._snapshots: OrderedDict[_Node, None] = OrderedDict()  # the least recently used first
        self._lookups = self._hits = self._tokens = self._hit_tokens = self._evicted = 0

    def __len__(self) -> int:
        """How many pages are cached."""
        return len(self._oldest_first)

    @property
    def page_size(self) -> int:
        return self._page_size

    @property
    def statistics(self) -> CacheStatistics:
        return CacheStatistics(len(self), self._lookups, self._hits, self._tokens, self._hit_tokens, self._evicted)

    def match(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """The longest cached prefix of ``tokens`` as pages in order, and how many tokens they hold.

        At least one token is left over, for logits come from computing one. The pages are not held for the
        caller: take a reference before anything is evicted. Counts as a use, not as a lookup (``count_lookup``).
        """
        path = self._walk(tokens, len(tokens) - 1)
        if path:
            self._touch(path[-1])
        return [node.page for node in path], len(path) * self._page_size

    def match_snapshot(self, tokens: Sequence[int]) -> tuple[list[int], int, int | None]:
        """As ``match``, but only as far as there is a snapshot, whose slot comes third: copy it before evicting any."""
        path = self._walk(tokens, len(tokens) - 1)
        while path and path[-1].snapshot is None:
            path.pop()
        if not path:
            return [], 0, None
        self._touch(path[-1])
        self._snapshots.move_to_end(path[-1])
        return [node.page for node in path], len(path) * self._page_size, path[-1].snapshot

    def wants_snapshot(self, tokens: Sequence[int]) -> bool:
        """Whether the page that ends with the last of ``tokens`` is cached and has no snapshot yet."""
        path = self._walk(tokens, len(tokens))
        return len(path) * self._page_size == len(tokens) and bool(path) and path[-1].snapshot is None

    def add_snapshot(self, tokens: Sequence[int], slot: int) -> None:
        """Give that page its snapshot; the caller's reference to ``slot`` becomes the cache's."""
        node = self._walk(tokens, len(tokens))[-1]
        assert node.snapshot is None
        node.snapshot = slot
        self._snapshots[node] = None

    def evict_snapshot(self, keeping: int | None = None) -> bool:
        """Free the slot of the least recently used snapshot but ``keeping``; ``False`` if there is none."""
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
        """The cached pages that the first ``most`` of ``tokens`` begin with."""
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
        """Record that a request of ``tokens`` tokens was served with ``hit_tokens`` of them from the cache."""
        self._lookups += 1
        self._hits += hit_tokens > 0
        self._tokens += tokens
        self._hit_tokens += hit_tokens

    def insert(self, tokens: Sequence[int], pages: Sequence[int], *, in_use: bool = False) -> int:
        """Cache ``pages``, which hold exactly ``tokens``; returns how many are new to the cache.

        The cache takes a reference of its own to each new page, and keeps the page it has where it has one with
        the same tokens. ``in_use`` says that the caller goes on holding ``pages``: then nothing is inserted after
        a page that is not the cache's own, for the caller would hold a page without holding those before it.
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
        """Whether ``count`` pages could be evicted while those in ``keeping`` stay."""
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
        """Free up to ``count`` pages, least recently used first and each after those that follow it.

        Only pages that nobody else refers to go. Returns how many went.
        """
        freed = 0
        passed: set[_Node] = set()
        while freed < count and self._oldest_first:
            node = next(iter(self._oldest_first))
            if node in passed:  # so everything younger was passed too
                break
            if node.children or self._allocator.references(node.page) > 1:
                # Held pages are in use now, so they become the youngest: the next call need not pass them again.
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
        """Forget everything: drop the cache's references. Pages that requests hold stay theirs."""
        for node in list(self._snapshots):
            self._drop_snapshot(node)
        self._allocator.release([node.page for node in self._oldest_first])
        self._oldest_first.clear()
        self._root.children.clear()

    def _touch(self, node: _Node) -> list[_Node]:
        """Make ``node`` and the pages before it the youngest, the first page the very youngest."""
        path = []
        while node.parent is not None:
            self._oldest_first.move_to_end(node)
            path.append(node)
            node = node.parent
        return path
