"""Static capabilities of a backend, validated when a plugin is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from attnplug.declare.claims import Claims, declared
from attnplug.declare.kv_format import PLAIN_FORMATS
from attnplug.declare.model import AttentionKind, Feature
from attnplug.declare.problem import LARGEST_PAGE, SM_RANGE, CacheLayout, DType, GraphLevel, Role
from attnplug.declare.reading import (
    boolean,
    device_names,
    format_names,
    integer,
    members_of,
    names,
    of_type,
    optional_integer,
    pairs,
)

EXTRAS = ("entries", "lse", "out", "q_rope", "selected", "sinks")
"""Fields of ``ForwardExtras``, which is defined elsewhere because it needs torch."""
_DICT = partial(of_type, wanted=dict, words="a dict")


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
    architectures: Mapping[str, Any] = field(default_factory=dict, hash=False, metadata={"read": _DICT})
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
        yield from self._sm_contradictions()
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

    def _sm_contradictions(self) -> Iterator[str]:
        given = {name: sm for name in ("min_sm", "max_sm") if (sm := getattr(self, name)) is not None}
        if given and self.devices is not None and "cuda" not in self.devices:
            yield f"it bounds the SM but its devices are {_listed(self.devices)}, without cuda"
        if len(given) == 2 and given["min_sm"] > given["max_sm"]:
            yield f"min_sm {self.min_sm} is above max_sm {self.max_sm}"
        for name, sm in given.items():
            if sm not in SM_RANGE:
                yield f"{name} {sm} is not a compute capability; write 9.0 as 90, 10.3 as 103"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(str(name) for name in names))
