"""Run-time claims of a backend, and how a wrapper combines those of its children (A9)."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import reduce
from typing import Any

from attnplug.declare.errors import PluginError
from attnplug.declare.problem import ExtendPath, GraphLevel, Problem, Role
from attnplug.declare.reading import boolean, graph_level, integer, members_of, names
from attnplug.declare.refusal import Refusal, RefusalCode
from attnplug.declare.settings import Setting


@dataclass(frozen=True, slots=True)
class PageSizes:
    """Page sizes that a kernel reads, in tokens; ``None`` means any.

    The cache manager's page may be larger than the kernel's: a page of 128 tokens is also two pages of 64. So a
    manager page size is supported if one of the kernel's sizes divides it.
    """

    kernel: frozenset[int] | None = None

    @classmethod
    def of(cls, *sizes: int) -> PageSizes:
        return cls(frozenset(sizes))

    @staticmethod
    def read(value: object) -> PageSizes:
        """Validate a declared value: ``PageSizes`` of whole numbers."""
        sizes = value.kernel if isinstance(value, PageSizes) else value
        if not isinstance(value, PageSizes) or not (sizes is None or isinstance(sizes, frozenset)):
            raise PluginError(f"page_sizes={value!r} must be PageSizes(), for any, or PageSizes.of(32, 64)")
        if any(integer("page_sizes", size) < 1 for size in sizes or ()):
            raise PluginError(f"page_sizes={value!r} holds a size below 1")
        return value

    def kernel_size(self, page_size: int) -> int | None:
        """Return the largest kernel page size that divides this manager page size; ``None`` if none does."""
        if self.kernel is None:
            return page_size
        return max((size for size in self.kernel if page_size % size == 0), default=None)

    def intersection(self, other: PageSizes) -> PageSizes:
        """Return the page sizes that both support."""
        if self.kernel is None or other.kernel is None:
            return other if self.kernel is None else self
        return PageSizes(frozenset(math.lcm(mine, theirs) for mine in self.kernel for theirs in other.kernel))

    def within(self, other: PageSizes) -> bool:
        """Return True if ``other`` supports every page size that this one does."""
        return all(other.kernel_size(size) is not None for size in (self.kernel if self.kernel is not None else {1}))

    def __str__(self) -> str:
        if self.kernel is None or 1 in self.kernel:
            return "any"
        least = [size for size in sorted(self.kernel) if all(size % other or size == other for other in self.kernel)]
        return " or ".join(f"a multiple of {size}" for size in least)


def declared(
    read: Callable[[str, Any], Any],
    *default: Any,
    weaker: Callable[[Any, Any], Any] | None = None,
    within: Callable[[Any, Any], bool] | None = None,
    refuse: Callable[[Any, Problem, Collection[Role | None]], Refusal | None] | None = None,
) -> Any:
    """Dataclass field of a declaration; everything that depends on the field is said here, once.

    ``read(name, value)`` validates and normalizes a declared value. ``weaker`` combines the values of two children of a
    wrapper, ``within`` is True if a built backend's value is no wider than its spec's. ``refuse`` returns the refusal
    of a problem that the value does not serve.
    """
    metadata = {"read": read, "weaker": weaker, "within": within, "refuse": refuse}
    return field(metadata=metadata, **({"default": default[0]} if default else {}))


def _refuse_graphs(level: GraphLevel, problem: Problem, roles: Collection[Role | None]) -> Refusal | None:
    if problem.captured(roles) <= level:
        return None
    return Refusal(
        RefusalCode.CUDA_GRAPH,
        f"CUDA graphs are asked for at level {problem.cuda_graph.name}, it supports {level.name}",
        value=problem.cuda_graph.name,
        allowed=[each.name for each in GraphLevel if each <= level],
        setting=Setting.CUDA_GRAPH,
    )


def _refuse_page_size(sizes: PageSizes, problem: Problem, roles: Collection[Role | None]) -> Refusal | None:
    if problem.page_size is None or sizes.kernel_size(problem.page_size) is not None:
        return None
    return Refusal(
        RefusalCode.PAGE_SIZE,
        f"page size {problem.page_size} is not supported, only {sizes}",
        value=problem.page_size,
        allowed=sorted(sizes.kernel or ()),
        setting=Setting.PAGE_SIZE,
    )


def _refuse_bounds(needs_exact: bool, problem: Problem, roles: Collection[Role | None]) -> Refusal | None:
    if not needs_exact or problem.exact_lengths:
        return None
    return Refusal(
        RefusalCode.LENGTHS,
        "it needs exact lengths on the CPU, and this host has upper bounds only",
        value=False,
        allowed=True,
        setting=Setting.EXACT_LENGTHS,
    )


def _refuse_trees(trees: bool, problem: Problem, roles: Collection[Role | None]) -> Refusal | None:
    if trees or problem.speculative_topk == 1:
        return None
    return Refusal(
        RefusalCode.SPECULATION,
        f"drafts with {problem.speculative_topk} branches are trees, and it supports chains only",
        value=problem.speculative_topk,
        allowed=1,
        setting=Setting.SPECULATIVE_TOPK,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """Run-time claims of a backend: what its callers may rely on.

    ``Capabilities`` inherits these fields. A built backend may claim less than its spec declares. Values are validated:
    a list of extend paths becomes a set, and a misspelled one raises :class:`PluginError`.
    """

    cuda_graph: GraphLevel = declared(
        graph_level, GraphLevel.NEVER, weaker=min, within=operator.le, refuse=_refuse_graphs
    )
    page_sizes: PageSizes = declared(
        lambda _, sizes: PageSizes.read(sizes),
        PageSizes(),
        weaker=PageSizes.intersection,
        within=PageSizes.within,
        refuse=_refuse_page_size,
    )
    needs_cpu_seq_lens: bool = declared(boolean, True, weaker=operator.or_, within=operator.ge, refuse=_refuse_bounds)
    """Planning reads exact lengths on the CPU; upper bounds do not suffice."""
    mla_extend: frozenset[ExtendPath] = declared(
        members_of(ExtendPath),
        frozenset({ExtendPath.ABSORBED}),
        weaker=frozenset.intersection,
        within=frozenset.issubset,
    )
    """The ways in which it can run an MLA extend (C1)."""
    extras: frozenset[str] = declared(names, frozenset(), weaker=frozenset.intersection, within=frozenset.issubset)
    """The fields of ``ForwardExtras`` that it honours."""
    trees: bool = declared(boolean, False, weaker=operator.and_, within=operator.le, refuse=_refuse_trees)
    """It verifies drafts that are trees (``Geometry.tree``) on layers without a window, as well as chains."""

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, each.metadata["read"](each.name, getattr(self, each.name)))

    def refusal(self, name: str, problem: Problem, roles: Collection[Role | None]) -> Refusal | None:
        """Return the refusal of ``problem`` by the claim ``name``; ``None`` if the claim serves it."""
        refuse = _REFUSE[name]
        found: Refusal | None = refuse(getattr(self, name), problem, roles)
        return found

    def refusals(self, problem: Problem, roles: Collection[Role | None]) -> Iterator[Refusal]:
        """Yield the refusal of every claim that does not serve ``problem`` in these roles."""
        for name in _REFUSE:
            if (refusal := self.refusal(name, problem, roles)) is not None:
                yield refusal

    def exceeding(self, declared: Claims) -> Iterator[str]:
        """Yield every claim that is wider than the spec declares. A narrower one is fine: a backend may find out when
        it is built that it can do less."""
        for claim in fields(Claims):
            mine, allowed = getattr(self, claim.name), getattr(declared, claim.name)
            if not claim.metadata["within"](mine, allowed):
                yield f"it claims {claim.name} {_shown(mine)}, but its spec declares {_shown(allowed)}"


_REFUSE = {each.name: each.metadata["refuse"] for each in fields(Claims) if each.metadata["refuse"] is not None}


def _shown(value: Any) -> str:
    if isinstance(value, frozenset):
        return ", ".join(sorted(value)) or "none"
    return value.name if isinstance(value, GraphLevel) else str(value)


@dataclass(frozen=True, slots=True)
class CombinedClaims:
    """The weakest claims of several children."""

    claims: Claims
    limited_by: Mapping[str, tuple[str, ...]]
    """For each claim, the names of the children that limit it."""


def weakest(children: Mapping[str, Claims], decided_by: Mapping[str, str] | None = None) -> CombinedClaims:
    """Combine the claims of named children. A claim on which all agree is limited by none of them.

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
