"""What a backend can do, as data. It is checked when a plugin is loaded, so no choice of a backend fails on it
later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from attnplug.declare.claims import Claims, PageSizes
from attnplug.declare.model import AttentionKind, Feature
from attnplug.declare.problem import (
    FP8_CACHES,
    LARGEST_PAGE,
    SM_RANGE,
    CacheLayout,
    DType,
    ExtendPath,
    GraphLevel,
    Role,
)
from attnplug.declare.reading import integer, members, of_type, pairs, several

DEVICES = ("cpu", "cuda")
EXTRAS = ("entries", "lse", "out", "q_rope", "selected", "sinks")
"""The fields of ``ForwardExtras``, which needs torch and is therefore defined elsewhere."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do, as data. What is not claimed here is refused.

    ``head_dims`` are (query/key, value) widths for MHA, ``mla_dims`` are (kv_lora_rank, rope) widths for MLA;
    ``None`` means any. ``kv_dtypes`` left out means the same as ``dtypes``. ``min_sm`` and ``max_sm`` bound the
    compute capability on CUDA, both inclusive. ``extras`` names the fields of ``ForwardExtras`` it honours,
    ``mla_extend`` the ways in which it can run an MLA extend, ``layouts`` the layouts of a cache that it reads.

    ``max_heads`` is the most query heads that one rank may have, ``None`` any number. ``layers_alike``: one plan serves
    all layers, so they must have one shape. ``kv_matches_dtype``: a cache that is not fp8 has the activations' type.
    ``min_fp8_sm`` and ``max_fp8_sm`` bound the compute capability for which it reads an fp8 cache, both inclusive.
    ``trees``: it verifies drafts that are trees (``Geometry.tree``) on layers without a window, as well as chains.
    ``index_dtypes`` are the types of cached index keys that it reads, for sparse layers; left out, they are ``dtypes``.
    ``coordinators`` names the coordinators that it works with, for sparse layers: ``attend`` reads no cache rows but
    those of ``extras.selected``, and takes them as ``SelectedSlots``.
    """

    kinds: frozenset[AttentionKind]
    devices: frozenset[str]
    dtypes: frozenset[DType]
    kv_dtypes: frozenset[DType] = frozenset()
    roles: frozenset[Role] = frozenset({Role.PREFILL, Role.DECODE})
    min_sm: int | None = None
    max_sm: int | None = None
    page_sizes: PageSizes = PageSizes()
    head_dims: frozenset[tuple[int, int]] | None = None
    mla_dims: frozenset[tuple[int, int]] | None = None
    features: frozenset[Feature] = frozenset()
    max_heads: int | None = None
    layers_alike: bool = False
    kv_matches_dtype: bool = False
    max_speculative_tokens: int = 0
    cuda_graph: GraphLevel = GraphLevel.NEVER
    needs_cpu_seq_lens: bool = True
    extras: frozenset[str] = frozenset()
    mla_extend: frozenset[ExtendPath] = frozenset({ExtendPath.ABSORBED})
    layouts: frozenset[CacheLayout] = frozenset({CacheLayout.TOKEN_MAJOR})
    trees: bool = False
    index_dtypes: frozenset[DType] = frozenset()
    coordinators: frozenset[str] = frozenset()
    min_fp8_sm: int | None = None
    max_fp8_sm: int | None = None

    def __post_init__(self) -> None:
        read = {
            "kinds": (kinds := members("kinds", self.kinds, AttentionKind)),
            "devices": frozenset(several("devices", self.devices)),
            "dtypes": (dtypes := members("dtypes", self.dtypes, DType)),
            "kv_dtypes": members("kv_dtypes", self.kv_dtypes, DType) or dtypes,
            "roles": members("roles", self.roles, Role),
            "min_sm": integer("min_sm", self.min_sm, optional=True),
            "max_sm": integer("max_sm", self.max_sm, optional=True),
            "page_sizes": PageSizes.read(self.page_sizes),
            "head_dims": pairs("head_dims", self.head_dims),
            "mla_dims": pairs("mla_dims", self.mla_dims),
            "features": members("features", self.features, Feature),
            "max_heads": integer("max_heads", self.max_heads, optional=True),
            "layers_alike": of_type("layers_alike", self.layers_alike, bool, "True or False"),
            "kv_matches_dtype": of_type("kv_matches_dtype", self.kv_matches_dtype, bool, "True or False"),
            "max_speculative_tokens": integer("max_speculative_tokens", self.max_speculative_tokens),
            "cuda_graph": of_type("cuda_graph", self.cuda_graph, GraphLevel, "a GraphLevel"),
            "needs_cpu_seq_lens": of_type("needs_cpu_seq_lens", self.needs_cpu_seq_lens, bool, "True or False"),
            "extras": frozenset(several("extras", self.extras)),
            "mla_extend": members("mla_extend", self.mla_extend, ExtendPath),
            "layouts": _layouts(members("layouts", self.layouts, CacheLayout), kinds),
            "trees": of_type("trees", self.trees, bool, "True or False"),
            "index_dtypes": members("index_dtypes", self.index_dtypes, DType) or dtypes,
            "coordinators": frozenset(several("coordinators", self.coordinators)),
            "min_fp8_sm": integer("min_fp8_sm", self.min_fp8_sm, optional=True),
            "max_fp8_sm": integer("max_fp8_sm", self.max_fp8_sm, optional=True),
        }
        for name, value in read.items():
            object.__setattr__(self, name, value)

    @property
    def claims(self) -> Claims:
        """The run-time claims of a backend that is exactly as good as its spec says."""
        return Claims(
            cuda_graph=self.cuda_graph,
            page_sizes=self.page_sizes,
            needs_cpu_seq_lens=self.needs_cpu_seq_lens,
            mla_extend=self.mla_extend,
            extras=self.extras,
            trees=self.trees,
        )

    def contradictions(self) -> Iterator[str]:
        """Every way in which these capabilities contradict themselves."""
        linear = {kind for kind in self.kinds if kind.is_linear}
        full = self.kinds - linear
        for name in ("kinds", "devices", "dtypes", "roles", "layouts", "head_dims", "mla_dims"):
            if (value := getattr(self, name)) is not None and not value:
                yield f"{name} is empty, so it could never be chosen"
        for extra in sorted(self.extras - set(EXTRAS), key=str):
            yield f"extra {extra!r} is unknown; known are {', '.join(EXTRAS)}"
        for device in sorted(self.devices - set(DEVICES), key=str):
            yield f"device {device!r} is unknown; known are {', '.join(DEVICES)}"
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
        if self.cuda_graph > GraphLevel.NEVER and "cuda" not in self.devices:
            yield f"it claims CUDA graphs ({self.cuda_graph.name}) but its devices are {_listed(self.devices)}"
        if any(not 1 <= size <= LARGEST_PAGE for size in self.page_sizes.kernel or ()):
            yield f"page sizes {sorted(self.page_sizes.kernel or ())} hold one that is not from 1 to {LARGEST_PAGE}"
        if self.page_sizes.kernel is not None and not self.page_sizes.kernel:
            yield "page_sizes allows no page size at all"
        if AttentionKind.MLA in self.kinds and Role.PREFILL in self.roles and not self.mla_extend:
            yield "it claims the role prefill for the kind mla but no way to do so: mla_extend is empty"
        if self.mla_dims is not None and AttentionKind.MLA not in self.kinds:
            yield f"it gives mla_dims but does not claim the kind mla, only {_listed(self.kinds)}"
        if self.head_dims is not None and AttentionKind.MHA not in self.kinds:
            yield f"it gives head_dims but does not claim the kind mha, only {_listed(self.kinds)}"
        if self.max_heads is not None and self.max_heads < 1:
            yield f"max_heads {self.max_heads} allows no head at all"
        if self.kv_matches_dtype and self.kv_dtypes.isdisjoint(self.dtypes | FP8_CACHES):
            yield f"kv_matches_dtype, but none of the KV dtypes {_listed(self.kv_dtypes)} is fp8 or one of its dtypes"
        if self.max_speculative_tokens < 0:
            yield f"max_speculative_tokens {self.max_speculative_tokens} is negative"
        if Role.DRAFT in self.roles and not self.max_speculative_tokens:
            yield "it claims the role draft but max_speculative_tokens is 0"
        if self.trees and not self.max_speculative_tokens:
            yield "it claims trees of drafts but max_speculative_tokens is 0"
        if self.coordinators and Feature.SPARSE not in self.features:
            yield f"it claims the coordinators {_listed(self.coordinators)} but not the feature sparse"

    def _sm_contradictions(self) -> Iterator[str]:
        bounds = {name: getattr(self, name) for name in ("min_sm", "max_sm", "min_fp8_sm", "max_fp8_sm")}
        given = {name: sm for name, sm in bounds.items() if sm is not None}
        if given and "cuda" not in self.devices:
            yield f"it bounds the SM but its devices are {_listed(self.devices)}, without cuda"
        for low, high in (("min_sm", "max_sm"), ("min_fp8_sm", "max_fp8_sm")):
            if low in given and high in given and given[low] > given[high]:
                yield f"{low} {given[low]} is above {high} {given[high]}"
        for name, sm in given.items():
            if sm not in SM_RANGE:
                yield f"{name} {sm} is not a compute capability; write 9.0 as 90, 10.3 as 103"
        if given.keys() & {"min_fp8_sm", "max_fp8_sm"} and self.kv_dtypes.isdisjoint(FP8_CACHES):
            yield f"it bounds the SM of an fp8 cache but claims none, only the KV dtypes {_listed(self.kv_dtypes)}"


def _layouts(layouts: frozenset[CacheLayout], kinds: frozenset[AttentionKind]) -> frozenset[CacheLayout]:
    """With both names of one memory: a latent row of MLA is one head."""
    both = frozenset({CacheLayout.TOKEN_MAJOR, CacheLayout.HEAD_MAJOR})
    return layouts | both if kinds == {AttentionKind.MLA} and layouts & both else layouts


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(str(name) for name in names))
