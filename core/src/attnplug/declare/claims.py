"""What a backend claims of itself at run time, and how the claims of several combine (A9)."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import reduce
from typing import Any

from attnplug.declare.errors import PluginError
from attnplug.declare.problem import ExtendPath, GraphLevel
from attnplug.declare.reading import integer, members, of_type, several


@dataclass(frozen=True, slots=True)
class PageSizes:
    """The page sizes that a kernel reads, in tokens; ``None`` means any.

    The manager's page may be larger than the kernel's. A manager page size is served if one of the kernel's divides it,
    because a page of 128 tokens is also two pages of 64.
    """

    kernel: frozenset[int] | None = None

    @classmethod
    def of(cls, *sizes: int) -> PageSizes:
        return cls(frozenset(sizes))

    @staticmethod
    def read(value: object) -> PageSizes:
        """A declared value, checked: ``PageSizes`` of whole numbers."""
        sizes = value.kernel if isinstance(value, PageSizes) else value
        if not isinstance(value, PageSizes) or not (sizes is None or isinstance(sizes, frozenset)):
            raise PluginError(f"page_sizes={value!r} must be PageSizes(), for any, or PageSizes.of(32, 64)")
        for size in sizes or ():
            integer("page_sizes", size)
        return value

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

    def within(self, other: PageSizes) -> bool:
        """Whether the other serves every page size that this one does."""
        return all(other.kernel_size(size) is not None for size in (self.kernel if self.kernel is not None else {1}))

    def __str__(self) -> str:
        if self.kernel is None or 1 in self.kernel:
            return "any"
        least = [size for size in sorted(self.kernel) if all(size % other or size == other for other in self.kernel)]
        return " or ".join(f"a multiple of {size}" for size in least)


def _claim(default: Any, weaker: Callable[[Any, Any], Any], within: Callable[[Any, Any], bool]) -> Any:
    """``weaker`` combines the claims of two children. ``within`` says whether one claim is no wider than another."""
    return field(default=default, metadata={"weaker": weaker, "within": within})


@dataclass(frozen=True, slots=True)
class Claims:
    """What callers may rely on. Every field carries the rule by which a wrapper weakens it.

    Checked as strictly as ``Capabilities``: a list of extend paths becomes a set, and a misspelled one is an error.
    """

    cuda_graph: GraphLevel = _claim(GraphLevel.NEVER, min, operator.le)
    page_sizes: PageSizes = _claim(PageSizes(), PageSizes.intersection, PageSizes.within)
    needs_cpu_seq_lens: bool = _claim(True, operator.or_, operator.ge)
    mla_extend: frozenset[ExtendPath] = _claim(
        frozenset({ExtendPath.ABSORBED}), frozenset.intersection, frozenset.issubset
    )
    extras: frozenset[str] = _claim(frozenset(), frozenset.intersection, frozenset.issubset)
    """The fields of ``ForwardExtras`` that it honours."""
    trees: bool = _claim(False, operator.and_, operator.le)
    """Whether it plans a batch that has a ``tree``."""

    def __post_init__(self) -> None:
        read = {
            "cuda_graph": of_type("cuda_graph", self.cuda_graph, GraphLevel, "a GraphLevel"),
            "page_sizes": PageSizes.read(self.page_sizes),
            "needs_cpu_seq_lens": of_type("needs_cpu_seq_lens", self.needs_cpu_seq_lens, bool, "True or False"),
            "mla_extend": members("mla_extend", self.mla_extend, ExtendPath),
            "extras": frozenset(several("extras", self.extras)),
            "trees": of_type("trees", self.trees, bool, "True or False"),
        }
        if any(size < 1 for size in self.page_sizes.kernel or ()):
            raise PluginError(f"page_sizes={self.page_sizes!r} holds a size below 1")
        for name, value in read.items():
            object.__setattr__(self, name, value)

    def beyond(self, declared: Claims) -> Iterator[str]:
        """Every claim that is wider than what was declared. A narrower one is fine: a backend may find out, when it is
        built, that it can do less."""
        for claim in fields(self):
            mine, allowed = getattr(self, claim.name), getattr(declared, claim.name)
            if not claim.metadata["within"](mine, allowed):
                yield f"it claims {claim.name} {_shown(mine)}, but its spec declares {_shown(allowed)}"


def _shown(value: Any) -> str:
    if isinstance(value, frozenset):
        return ", ".join(sorted(value)) or "none"
    return value.name if isinstance(value, GraphLevel) else str(value)


@dataclass(frozen=True, slots=True)
class CombinedClaims:
    """The weakest claims of several children. ``limited_by`` has the children that weakened each claim."""

    claims: Claims
    limited_by: Mapping[str, tuple[str, ...]]


def weakest(children: Mapping[str, Claims], decided_by: Mapping[str, str] | None = None) -> CombinedClaims:
    """Combine the claims of named children. A claim on which all agree is limited by none.

    ``decided_by`` names, for a claim, the one child that decides it; the others do not count.
    """
    values: dict[str, Any] = {}
    limited_by: dict[str, tuple[str, ...]] = {}
    for claim in fields(Claims):
        weaker, decider = claim.metadata["weaker"], (decided_by or {}).get(claim.name)
        asked = children if decider is None else {decider: children[decider]}
        named = {name: getattr(claims, claim.name) for name, claims in asked.items()}
        combined = values[claim.name] = _combine(weaker, named.values())
        if all(value == combined for value in named.values()):
            continue
        decisive = [name for name in named if _without(weaker, named, name) != combined]
        limited_by[claim.name] = tuple(decisive or [name for name, value in named.items() if value == combined])
    return CombinedClaims(Claims(**values), limited_by)


def _combine(weaker: Callable[[Any, Any], Any], values: Iterable[Any]) -> Any:
    return reduce(weaker, values)


def _without(weaker: Callable[[Any, Any], Any], named: Mapping[str, Any], name: str) -> Any:
    others = [value for other, value in named.items() if other != name]
    return _combine(weaker, others) if others else None
