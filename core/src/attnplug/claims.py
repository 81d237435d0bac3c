"""What a backend claims of itself at run time, and how the claims of several combine (A9)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import reduce
from typing import Any

from attnplug.problem import GraphLevel


class ExtendPath(StrEnum):
    """The ways to run an MLA extend (C1)."""

    ABSORBED = "absorbed"
    """In latent space, over the paged cache."""
    ONE_SHOT = "one_shot"
    """Gather all rows, up-project them, one causal call."""
    CHUNKED = "chunked"
    """Causal over the new rows, then chunk by chunk over the prefix, merged by log-sum-exp."""


@dataclass(frozen=True, slots=True)
class PageSizes:
    """The page sizes that a kernel reads, in tokens; ``None`` means any.

    The manager's page may be larger than the kernel's: a manager page size is served when one of the kernel's
    divides it, because a page of 128 tokens is also two pages of 64.
    """

    kernel: frozenset[int] | None = None

    @classmethod
    def of(cls, *sizes: int) -> PageSizes:
        return cls(frozenset(sizes))

    def kernel_size(self, page_size: int) -> int | None:
        """The largest kernel page size that serves this manager page size; ``None`` if none does."""
        if self.kernel is None:
            return page_size
        return max((size for size in self.kernel if page_size % size == 0), default=None)

    def intersection(self, other: PageSizes) -> PageSizes:
        """The page sizes that both serve."""
        if self.kernel is None or other.kernel is None:
            return other if self.kernel is None else self
        return PageSizes(frozenset(math.lcm(mine, theirs) for mine in self.kernel for theirs in other.kernel))

    def __str__(self) -> str:
        if self.kernel is None or 1 in self.kernel:
            return "any"
        least = [size for size in sorted(self.kernel) if all(size % other or size == other for other in self.kernel)]
        return " or ".join(f"a multiple of {size}" for size in least)


def _claim(default: Any, weaker: Callable[[Any, Any], Any]) -> Any:
    return field(default=default, metadata={"weaker": weaker})


@dataclass(frozen=True, slots=True)
class Claims:
    """What callers may rely on. Every field carries the rule by which a wrapper weakens it."""

    cuda_graph: GraphLevel = _claim(GraphLevel.NEVER, min)
    page_sizes: PageSizes = _claim(PageSizes(), PageSizes.intersection)
    needs_cpu_seq_lens: bool = _claim(True, lambda mine, theirs: mine or theirs)
    mla_extend: frozenset[ExtendPath] = _claim(frozenset({ExtendPath.ABSORBED}), frozenset.intersection)


@dataclass(frozen=True, slots=True)
class CombinedClaims:
    """The weakest claims of some children, and for each claim the children that forced it down."""

    claims: Claims
    forced_by: Mapping[str, tuple[str, ...]]


def weakest(children: Mapping[str, Claims]) -> CombinedClaims:
    """Combine the claims of named children. A claim on which all agree was forced by nobody."""
    values: dict[str, Any] = {}
    forced_by: dict[str, tuple[str, ...]] = {}
    for claim in fields(Claims):
        weaker = claim.metadata["weaker"]
        named = {name: getattr(claims, claim.name) for name, claims in children.items()}
        combined = values[claim.name] = _combine(weaker, named.values())
        if all(value == combined for value in named.values()):
            continue
        decisive = [name for name in named if _without(weaker, named, name) != combined]
        forced_by[claim.name] = tuple(decisive or [name for name, value in named.items() if value == combined])
    return CombinedClaims(Claims(**values), forced_by)


def _combine(weaker: Callable[[Any, Any], Any], values: Iterable[Any]) -> Any:
    return reduce(weaker, values)


def _without(weaker: Callable[[Any, Any], Any], named: Mapping[str, Any], name: str) -> Any:
    others = [value for other, value in named.items() if other != name]
    return _combine(weaker, others) if others else None
