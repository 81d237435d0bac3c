"""Static capabilities of a backend, validated when a plugin is loaded, and its run-time claims (A9)."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial, reduce
from typing import Any, NamedTuple

from attnplug.declare.errors import PluginError, Refusal, RefusalCode, Setting
from attnplug.declare.kv_format import PLAIN_FORMATS
from attnplug.declare.model import AttentionKind, Feature
from attnplug.declare.problem import (
    LARGEST_PAGE,
    SM_RANGE,
    CacheLayout,
    DType,
    ExtendPath,
    GraphLevel,
    Problem,
    Role,
    sorted_levels,
)
from attnplug.declare.reading import (
    boolean,
    device_names,
    dictionary,
    format_names,
    graph_level,
    integer,
    invariance_levels,
    members_of,
    names,
    optional_integer,
    pairs,
)


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


_set = partial(declared, weaker=frozenset.intersection, within=frozenset.issubset)


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
    mla_extend: frozenset[ExtendPath] = _set(members_of(ExtendPath), frozenset({ExtendPath.ABSORBED}))
    """Supported MLA extend paths (C1)."""
    ragged_graphs: bool = declared(boolean, False, weaker=operator.and_, within=operator.le)
    """Ragged calls can be captured: they are planned and run by lengths on the device (``RaggedCall.padded_rows``)."""
    extras: frozenset[str] = _set(names, frozenset())
    """Supported fields of ``ForwardExtras``."""
    trees: bool = declared(boolean, False, weaker=operator.and_, within=operator.le, refuse=_refuse_trees)
    """Draft trees (``Geometry.tree``) are verified as well as chains, on layers without a sliding window."""
    invariant: frozenset[str] = _set(invariance_levels, frozenset(), refuse=_refuse_invariance)
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


class CombinedClaims(NamedTuple):
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


EXTRAS = ("entries", "lse", "out", "q_rope", "selected", "sinks")
"""Fields of ``ForwardExtras``, which is defined elsewhere because it needs torch."""


@dataclass(frozen=True, slots=True)
class Capabilities(Claims):
    """Static capabilities of a backend and the widest claims it may make once built. Anything undeclared is refused.

    ``Capabilities(kinds={"mha"}, devices={"cuda"}, dtypes={"bfloat16"}, min_sm=80)`` suffices for a backend that
    prefills and decodes. Sets and lists are accepted, of enum members or of their values.
    """

    kinds: frozenset[AttentionKind] = declared(members_of(AttentionKind))
    devices: frozenset[str] | None = declared(device_names)
    """Names of torch device types; ``None`` means any, for a backend of torch operations alone."""
    dtypes: frozenset[DType] = declared(members_of(DType))
    """Supported dtypes of activations."""
    kv_dtypes: frozenset[str] | None = declared(format_names, frozenset())
    """Names of supported KV formats; default: ``dtypes``. ``None`` means any: rows are read by the pools."""
    roles: frozenset[Role] = declared(members_of(Role), frozenset({Role.PREFILL, Role.DECODE}))
    min_sm: int | None = declared(optional_integer, None)
    """Lowest compute capability on CUDA: 90 for 9.0. ``architectures`` are the requirements on other devices."""
    max_sm: int | None = declared(optional_integer, None)
    """Highest compute capability, inclusive."""
    head_dims: frozenset[tuple[int, int]] | None = declared(pairs, None)
    """(query/key, value) widths of MHA; ``None`` means any."""
    mla_dims: frozenset[tuple[int, int]] | None = declared(pairs, None)
    """(kv_lora_rank, rope) widths of MLA; ``None`` means any."""
    features: frozenset[Feature] = declared(members_of(Feature), frozenset())
    max_heads: int | None = declared(optional_integer, None)
    """Maximum number of query heads per rank; ``None`` means any number."""
    layers_alike: bool = declared(boolean, False)
    """One plan serves all layers, so they must have one shape."""
    kv_matches_dtype: bool = declared(boolean, False)
    """A cache in a dtype of activations must have theirs."""
    max_speculative_tokens: int = declared(integer, 0)
    layouts: frozenset[CacheLayout] = declared(members_of(CacheLayout), frozenset({CacheLayout.TOKEN_MAJOR}))
    index_dtypes: frozenset[str] | None = declared(format_names, frozenset())
    """Names of supported formats of cached index keys, for sparse layers, as ``kv_dtypes``."""
    coordinators: frozenset[str] = declared(names, frozenset())
    """Names of supported coordinators, for sparse and compressed layers. With one, ``attend`` must read only the cache
    rows of ``extras.selected``, given as ``SelectedSlots``, and what it loaded by ``load_entries``."""
    architectures: Mapping[str, Any] = field(default_factory=dict, hash=False, metadata={"read": dictionary})
    """Required architectures by device, such as ``{"acme": 3}``, in the form that the device's plugin compares."""

    def __post_init__(self) -> None:
        super(Capabilities, self).__post_init__()
        for name in ("kv_dtypes", "index_dtypes"):
            if getattr(self, name) == frozenset():
                object.__setattr__(self, name, self.dtypes)
        both = frozenset({CacheLayout.TOKEN_MAJOR, CacheLayout.HEAD_MAJOR})
        if self.kinds == {AttentionKind.MLA} and self.layouts & both:  # a latent row is one head
            object.__setattr__(self, "layouts", self.layouts | both)

    @property
    def claims(self) -> Claims:
        """Run-time claims of a backend whose claims equal its spec's."""
        return Claims(**{each.name: getattr(self, each.name) for each in fields(Claims)})

    def contradictions(self) -> Iterator[str]:
        """Yield every way in which these capabilities contradict each other."""
        linear = {kind for kind in self.kinds if kind.is_linear}
        full = self.kinds - linear
        for name in ("kinds", "devices", "dtypes", "roles", "layouts", "head_dims", "mla_dims"):
            if (value := getattr(self, name)) is not None and not value:
                yield f"{name} is empty, so it could never be chosen"
        for extra in sorted(self.extras - set(EXTRAS), key=str):
            yield f"extra {extra!r} is unknown; known are {', '.join(EXTRAS)}"
        for device in self.architectures:
            if device == "cuda" or device not in (self.devices or self.architectures):
                yield f"architectures has {device!r}; give min_sm and max_sm for cuda, and no device it does not claim"
        if self.kinds and self.roles:
            if linear and Role.LINEAR not in self.roles:
                yield f"it claims the linear kinds {_listed(linear)} but not the role linear"
            if Role.LINEAR in self.roles and not linear:
                yield f"it claims the role linear but no linear kind, only {_listed(full)}"
            if full and self.roles == {Role.LINEAR}:
                yield f"it claims the kinds {_listed(full)} but only the role linear"
            if not full and self.roles - {Role.LINEAR}:
                yield f"it claims the roles {_listed(self.roles - {Role.LINEAR})} but only linear kinds"
        given = {name: sm for name in ("min_sm", "max_sm") if (sm := getattr(self, name)) is not None}
        if given and self.devices is not None and "cuda" not in self.devices:
            yield f"it bounds the SM but its devices are {_listed(self.devices)}, without cuda"
        if len(given) == 2 and given["min_sm"] > given["max_sm"]:
            yield f"min_sm {self.min_sm} is above max_sm {self.max_sm}"
        for name, sm in given.items():
            if sm not in SM_RANGE:
                yield f"{name} {sm} is not a compute capability; write 9.0 as 90, 10.3 as 103"
        if self.cuda_graph > GraphLevel.NEVER and self.devices == frozenset({"cpu"}):
            yield f"it claims CUDA graphs ({self.cuda_graph.name}) but its devices are cpu"
        if any(size > LARGEST_PAGE for size in self.page_sizes.kernel or ()):
            yield f"page sizes {sorted(self.page_sizes.kernel or ())} hold one that is not from 1 to {LARGEST_PAGE}"
        if self.page_sizes.kernel is not None and not self.page_sizes.kernel:
            yield "page_sizes allows no page size at all"
        if AttentionKind.MLA in self.kinds and Role.PREFILL in self.roles and not self.mla_extend:
            yield "it claims the role prefill for the kind mla, but mla_extend is empty"
        for name, kind in (("mla_dims", AttentionKind.MLA), ("head_dims", AttentionKind.MHA)):
            if getattr(self, name) is not None and kind not in self.kinds:
                yield f"it gives {name} but does not claim the kind {kind}, only {_listed(self.kinds)}"
        if self.max_heads is not None and self.max_heads < 1:
            yield f"max_heads {self.max_heads} allows no head at all"
        formats = self.kv_dtypes
        if self.kv_matches_dtype and formats is not None and formats <= PLAIN_FORMATS - self.dtypes:
            yield f"kv_matches_dtype, but all of the KV formats {_listed(formats)} are dtypes that it does not claim"
        if self.max_speculative_tokens < 0:
            yield f"max_speculative_tokens {self.max_speculative_tokens} is negative"
        if Role.DRAFT in self.roles and not self.max_speculative_tokens:
            yield "it claims the role draft but max_speculative_tokens is 0"
        if self.trees and not self.max_speculative_tokens:
            yield "it claims draft trees but max_speculative_tokens is 0"
        if self.invariant and "run" not in self.invariant:
            yield f"it claims invariance {_listed(self.invariant)} but not run, which every level needs"
        if self.coordinators and Feature.SPARSE not in self.features:
            yield f"it claims the coordinators {_listed(self.coordinators)} but not the feature sparse"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(str(name) for name in names))
