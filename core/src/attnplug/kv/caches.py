"""All caches of one model: the pools for its kinds of layer, and further caches that a kind of layer needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from attnplug.declare.errors import PoolError
from attnplug.kv.page_copy import PageCopy
from attnplug.kv.pools import LinearStatePool, MHAPool, MLAPool


class PagedCache(Protocol):
    """A cache that is addressed by the pages and slots of the requests' page table, and so moves when they do.

    Index keys and compressed entries are such caches. A cache with less than a row per token (an entry for every
    fourth token, say) moves what belongs to the slots it is given.
    """

    @property
    def nbytes(self) -> int: ...

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages in every layer, as if one after another."""
        ...

    def move_rows(self, sources: Tensor, targets: Tensor) -> None:
        """Copy rows in every layer; see ``KVPools.move_rows``."""
        ...


C = TypeVar("C", bound=PagedCache)
C_co = TypeVar("C_co", bound=PagedCache, covariant=True)


@dataclass(frozen=True, slots=True)
class CacheKey(Generic[C_co]):
    """Finds a cache of class ``kind`` in ``KVPools``: ``INDEX_KEYS = CacheKey("index keys", IndexKeys)``."""

    name: str
    kind: type[C_co]


@dataclass(frozen=True, slots=True)
class KVPools:
    """The caches of one model: the pools that its layers need, and further ``caches`` by their keys."""

    mha: MHAPool | None = None
    mla: MLAPool | None = None
    linear: LinearStatePool | None = None
    caches: Mapping[CacheKey[PagedCache], PagedCache] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, cache in self.caches.items():
            if not isinstance(cache, key.kind):
                raise PoolError(f"cache {key.name!r} is a {type(cache).__name__}; its key says {key.kind.__name__}")

    def cache(self, key: CacheKey[C]) -> C:
        """The cache under this key."""
        held = self.caches.get(key)
        if not isinstance(held, key.kind):
            names = ", ".join(sorted(repr(other.name) for other in self.caches)) or "none"
            raise PoolError(
                f"the pools hold no cache {key.name!r} of class {key.kind.__name__}; caches held: {names}; "
                "build the pools with it"
            )
        return held

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self._paged()) + (0 if self.linear is None else self.linear.nbytes)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages in every layer that has pages; linear states are copied by ``LinearStatePool.copy``."""
        for cache in self._paged():
            cache.copy_pages(copies)

    def move_rows(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the row at slot ``sources[i]`` to slot ``targets[i]``, in every layer that has rows per token.

        Both are ``[n]`` integers on the pools' device. All rows are read before any is written, so a slot may be
        source and target. A target of -1 skips its row, whatever its source is; other targets are distinct. This waits
        for no device and can be captured. Slots outside of the pool raise PoolError on a CPU. A GPU fails later, as it
        does for any index that is out of bounds.
        """
        for cache in self._paged():
            cache.move_rows(sources, targets)

    def _paged(self) -> Iterator[PagedCache]:
        yield from (pool for pool in (self.mha, self.mla) if pool is not None)
        yield from self.caches.values()
