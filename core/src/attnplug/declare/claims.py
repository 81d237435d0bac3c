"""Run-time claims of a backend, and their combination by wrappers (A9)."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import reduce
from typing import Any

from attnplug.declare.errors import PluginError, Refusal, RefusalCode, Setting
from attnplug.declare.problem import ExtendPath, GraphLevel, Problem, Role, sorted_levels
from attnplug.declare.reading import boolean, graph_level, integer, invariance_levels, members_of, names


@dataclass(frozen=True, slots=True)
class PageSizes:
    """Page sizes that a kernel reads, in tokens: ``PageSizes.of(32, 64)``; ``None`` means any.

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
    """Return a dataclass field together with all rules that depend on it.

    ``read(name, value)`` validates and normalizes a declared value. ``weaker`` combines the values of two children of a
    wrapper. ``within`` returns True if a built backend's value is no wider than its spec's. ``refuse`` returns the
    refusal of a problem that the value does not serve.
    """
    metadata = {"read": read, "weaker": weaker, "within": within, "refuse": refuse}
    return field(metadata=metadata, **({"default": default[0]} if default else {}))


def _refuse_graphs(level: GraphLevel, problem: Problem, roles: Collection[Role | None]) -> Refusal | None:
    if problem.captured(roles) <= level:
        return None
    wanted, allowed = problem.cuda_graph.name, [each.name for each in GraphLevel if each <= level]
    message = f"CUDA graph level {wanted} is requested; this backend supports {level.name}"
    return Refusal(RefusalCode.CUDA_GRAPH, message, wanted, allowed, Setting.CUDA_GRAPH)


def _refuse_page_size(sizes: PageSizes, problem: Problem, roles: Collection[Role | None]) -> Refusal | None:
    size = problem.page_size
    if size is None or sizes.kernel_size(size) is not None:
        return None
    message = f"page size {size} is not supported, only {sizes}"
    return Refusal(RefusalCode.PAGE_SIZE, message, size, sorted(sizes.kernel or ()), Setting.PAGE_SIZE)


def _refuse_bounds(needs_exact: bool, problem: Problem, roles: Collection[Role | None]) -> Refusal | None:
    if not needs_exact or problem.exact_lengths:
        return None
    message = "requires exact lengths on the CPU; this host has upper bounds only"
    return Refusal(RefusalCode.LENGTHS, message, False, True, Setting.EXACT_LENGTHS)


def _refuse_trees(trees: bool, problem: Problem, roles: Collection[Role | None]) -> Refusal | None:
    topk = problem.speculative_topk
    if trees or topk == 1:
        return None
    message = f"drafts with {topk} branches are trees; this backend verifies chains only"
    return Refusal(RefusalCode.SPECULATION, message, topk, 1, Setting.SPECULATIVE_TOPK)


def _refuse_invariance(levels: frozenset[str], problem: Problem, roles: Collection[Role | None]) -> Refusal | None:
    if problem.invariant <= levels:
        return None
    missing, claimed = sorted_levels(problem.invariant - levels), sorted_levels(levels)
    message = f"invariance {', '.join(missing)} is requested; this backend claims {', '.join(claimed) or 'none'}"
    requested = sorted_levels(problem.invariant)
    return Refusal(RefusalCode.INVARIANCE, message, requested, claimed, Setting.BATCH_INVARIANT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """Properties of a built backend that callers may rely on.

    ``Capabilities`` inherits these fields. A built backend may claim less than its spec declares. Values are
    normalized (lists become sets); an invalid one raises :class:`PluginError`. ``replace(claims, trees=False)``.
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
    """Supported MLA extend paths (C1)."""
    extras: frozenset[str] = declared(names, frozenset(), weaker=frozenset.intersection, within=frozenset.issubset)
    """Supported fields of ``ForwardExtras``."""
    trees: bool = declared(boolean, False, weaker=operator.and_, within=operator.le, refuse=_refuse_trees)
    """Draft trees (``Geometry.tree``) are verified as well as chains, on layers without a sliding window."""
    invariant: frozenset[str] = declared(
        invariance_levels,
        frozenset(),
        weaker=frozenset.intersection,
        within=frozenset.issubset,
        refuse=_refuse_invariance,
    )
    """Levels of ``INVARIANCE`` that hold if they were requested when the backend was built (E3)."""

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, each.metadata["read"](each.name, getattr(self, each.name)))

    def refusals(
        self, problem: Problem, roles: Collection[Role | None], names: Collection[str] | None = None
    ) -> Iterator[Refusal]:
        """Yield the refusals of claims that do not serve ``problem`` in these roles: of all claims, or of ``names``."""
        for name in _REFUSE if names is None else names:
            if (refusal := _REFUSE[name](getattr(self, name), problem, roles)) is not None:
                yield refusal

    def exceeding(self, declared: Claims) -> Iterator[str]:
        """Yield every claim that is wider than the spec declares. Narrower claims are allowed: a backend may detect at
        construction that it can do less."""
        for claim in fields(Claims):
            claimed, allowed = getattr(self, claim.name), getattr(declared, claim.name)
            if not claim.metadata["within"](claimed, allowed):
                yield f"it claims {claim.name} {_shown(claimed)}, but its spec declares {_shown(allowed)}"


_REFUSE = {each.name: each.metadata["refuse"] for each in fields(Claims) if each.metadata["refuse"] is not None}


def _shown(value: Any) -> str:
    if isinstance(value, frozenset):
        return ", ".join(sorted(value)) or "none"
    return value.name if isinstance(value, GraphLevel) else str(value)


@dataclass(frozen=True, slots=True)
class CombinedClaims:
    """Weakest claims of several children."""

    claims: Claims
    limited_by: Mapping[str, tuple[str, ...]]
    """Names of the children that limit each claim."""


def weakest(children: Mapping[str, Claims], decided_by: Mapping[str, str] | None = None) -> CombinedClaims:
    """Combine the claims of named children. A claim on which all agree is limited by none of them.

    ``decided_by`` maps a claim to the only child that counts for it.
    """
    values: dict[str, Any] = {}
    limited_by: dict[str, tuple[str, ...]] = {}
    for claim in fields(Claims):
        weaker, decider = claim.metadata["weaker"], (decided_by or {}).get(claim.name)
        counted = children if decider is None else {decider: children[decider]}
        by_child = {name: getattr(claims, claim.name) for name, claims in counted.items()}
        combined = values[claim.name] = reduce(weaker, by_child.values())
        if all(value == combined for value in by_child.values()):
            continue
        others = {name: [value for other, value in by_child.items() if other != name] for name in by_child}
        limiting = [name for name in by_child if reduce(weaker, others[name]) != combined]
        limited_by[claim.name] = tuple(limiting or [name for name, value in by_child.items() if value == combined])
    return CombinedClaims(Claims(**values), limited_by)
