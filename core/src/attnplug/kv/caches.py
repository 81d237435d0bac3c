"""Caches of one model: pools of its dense and linear layers, and keyed caches of other layer kinds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from attnplug.declare.errors import PoolError
from attnplug.kv.buffer import PageCopy
from attnplug.kv.pools import LinearStatePool, MHAPool, MLAPool


class KeyedCache(Protocol):
    """A cache addressed by the pages and slots of the requests' page table. It is copied and moved along with them.

    A cache with less than one row per token (e.g. one for every fourth token) moves what belongs to the given slots.
    """

    @property
    def num_pages(self) -> int: ...

    @property
    def page_size(self) -> int:
        """Tokens per page of the page table."""

    @property
    def nbytes(self) -> int: ...

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages in every layer, as if one after another."""

    def move_rows(self, sources: Tensor, targets: Tensor) -> None:
        """Copy rows in every layer; see ``KVPools.move_rows``."""


C = TypeVar("C", bound=KeyedCache)
C_co = TypeVar("C_co", bound=KeyedCache, covariant=True)


@dataclass(frozen=True, slots=True)
class CacheKey(Generic[C_co]):
    """Typed key of a cache in ``KVPools``: ``pools.cache(CacheKey("mean keys", MeanKeys))`` returns a ``MeanKeys``.

    ``name`` is a plural noun for messages. ``hook`` is the optional hook that layers with this cache require, if any.
    """

    name: str
    kind: type[C_co]
    hook: str | None = None


@dataclass(frozen=True, slots=True)
class KVPools:
    """Caches of one model: the pools that its layers need, and other ``caches`` by key."""

    mha: MHAPool | None = None
    mla: MLAPool | None = None
    linear: LinearStatePool | None = None
    caches: Mapping[CacheKey[KeyedCache], KeyedCache] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, cache in self.caches.items():
            if not isinstance(cache, key.kind):
                raise PoolError(f"cache {key.name!r} is a {type(cache).__name__}; its key says {key.kind.__name__}")

    def cache(self, key: CacheKey[C]) -> C:
        """Return the cache with this key. Raises PoolError if there is none."""
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
        source and target. A target of -1 skips its row, whatever its source is; other targets are distinct. This does
        not synchronise with the device and can be captured. Slots outside the pool raise PoolError on a CPU. On a GPU
        they fail later, like any index out of bounds.
        """
        for cache in self._paged():
            cache.move_rows(sources, targets)

    def _paged(self) -> Iterator[KeyedCache]:
        yield from (pool for pool in (self.mha, self.mla) if pool is not None)
        yield from self.caches.values()
