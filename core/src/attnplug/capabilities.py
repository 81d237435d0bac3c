"""What a backend can do, as data: read strictly when a plugin is loaded, so that no choice fails on it later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from attnplug.claims import Claims, ExtendPath, PageSizes
from attnplug.errors import PluginError
from attnplug.model import AttentionKind, Feature
from attnplug.problem import DType, GraphLevel, Role

DEVICES = ("cpu", "cuda")
EXTRAS = ("lse", "sinks")
"""The fields of ``ForwardExtras``, which needs torch and so lives elsewhere."""

_Member = TypeVar("_Member", bound=Enum)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do, as data. What is not claimed here is refused.

    ``head_dims`` are (query/key, value) widths for MHA, ``mla_dims`` are (kv_lora_rank, rope) widths for MLA;
    ``None`` means any. ``kv_dtypes`` left out means the same as ``dtypes``. ``min_sm`` and ``max_sm`` bound the
    compute capability on CUDA, both inclusive. ``extras`` names the fields of ``ForwardExtras`` it honours,
    ``mla_extend`` the ways in which it can run an MLA extend.
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
    max_speculative_tokens: int = 0
    cuda_graph: GraphLevel = GraphLevel.NEVER
    needs_cpu_seq_lens: bool = True
    extras: frozenset[str] = frozenset()
    mla_extend: frozenset[ExtendPath] = frozenset({ExtendPath.ABSORBED})

    def __post_init__(self) -> None:
        read = {
            "kinds": _members("kinds", self.kinds, AttentionKind),
            "devices": frozenset(_several("devices", self.devices)),
            "dtypes": (dtypes := _members("dtypes", self.dtypes, DType)),
            "kv_dtypes": _members("kv_dtypes", self.kv_dtypes, DType) or dtypes,
            "roles": _members("roles", self.roles, Role),
            "min_sm": _integer("min_sm", self.min_sm, optional=True),
            "max_sm": _integer("max_sm", self.max_sm, optional=True),
            "page_sizes": _page_sizes(self.page_sizes),
            "head_dims": _pairs("head_dims", self.head_dims),
            "mla_dims": _pairs("mla_dims", self.mla_dims),
            "features": _members("features", self.features, Feature),
            "max_speculative_tokens": _integer("max_speculative_tokens", self.max_speculative_tokens),
            "cuda_graph": _of_type("cuda_graph", self.cuda_graph, GraphLevel, "a GraphLevel"),
            "needs_cpu_seq_lens": _of_type("needs_cpu_seq_lens", self.needs_cpu_seq_lens, bool, "True or False"),
            "extras": frozenset(_several("extras", self.extras)),
            "mla_extend": _members("mla_extend", self.mla_extend, ExtendPath),
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
        )

    def contradictions(self) -> Iterator[str]:
        """Every way in which these capabilities contradict themselves."""
        linear = {kind for kind in self.kinds if kind.is_linear}
        full = self.kinds - linear
        for name in ("kinds", "devices", "dtypes", "roles", "head_dims", "mla_dims"):
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
        if (self.min_sm is not None or self.max_sm is not None) and "cuda" not in self.devices:
            yield f"it bounds the SM but its devices are {_listed(self.devices)}, without cuda"
        if self.min_sm is not None and self.max_sm is not None and self.min_sm > self.max_sm:
            yield f"min_sm {self.min_sm} is above max_sm {self.max_sm}"
        if self.cuda_graph > GraphLevel.NEVER and "cuda" not in self.devices:
            yield f"it claims CUDA graphs ({self.cuda_graph.name}) but its devices are {_listed(self.devices)}"
        if self.page_sizes.kernel is not None and any(size < 1 for size in self.page_sizes.kernel):
            yield f"page sizes {sorted(self.page_sizes.kernel)} hold one below 1"
        if self.page_sizes.kernel is not None and not self.page_sizes.kernel:
            yield "page_sizes allows no page size at all"
        if self.mla_dims is not None and AttentionKind.MLA not in self.kinds:
            yield f"it gives mla_dims but does not claim the kind mla, only {_listed(self.kinds)}"
        if self.head_dims is not None and AttentionKind.MHA not in self.kinds:
            yield f"it gives head_dims but does not claim the kind mha, only {_listed(self.kinds)}"
        if self.max_speculative_tokens < 0:
            yield f"max_speculative_tokens {self.max_speculative_tokens} is negative"
        if Role.DRAFT in self.roles and not self.max_speculative_tokens:
            yield "it claims the role draft but max_speculative_tokens is 0"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(str(name) for name in names))


def _several(name: str, values: object) -> tuple[Any, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise PluginError(f"{name}={values!r} must be a set or list, not {type(values).__name__}")
    return tuple(values)


def _members(name: str, values: object, enum: type[_Member]) -> frozenset[_Member]:
    known = {str(member.value): member for member in enum}
    members = []
    for value in _several(name, values):
        text = str(value.value) if isinstance(value, Enum) else str(value)
        if text not in known:
            raise PluginError(f"{name} holds {value!r}; known are {', '.join(known)}")
        members.append(known[text])
    return frozenset(members)


def _of_type(name: str, value: object, wanted: type[Any], words: str) -> Any:
    if not isinstance(value, wanted):
        raise PluginError(f"{name}={value!r} must be {words}")
    return value


def _integer(name: str, value: object, optional: bool = False) -> int | None:
    if value is None and optional:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise PluginError(f"{name}={value!r} must be a whole number" + (" or None" if optional else ""))
    return value


def _pairs(name: str, values: object) -> frozenset[tuple[int, int]] | None:
    if values is None:
        return None
    pairs = []
    for pair in _several(name, values):
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(width, int) for width in pair):
            raise PluginError(f"{name} holds {pair!r}; give pairs of whole numbers, such as (128, 128)")
        pairs.append((pair[0], pair[1]))
    return frozenset(pairs)


def _page_sizes(value: object) -> PageSizes:
    sizes = value.kernel if isinstance(value, PageSizes) else value
    if not isinstance(value, PageSizes) or not (sizes is None or isinstance(sizes, frozenset)):
        raise PluginError(f"page_sizes={value!r} must be PageSizes(), for any, or PageSizes.of(32, 64)")
    for size in sizes or ():
        _integer("page_sizes", size)
    return value
