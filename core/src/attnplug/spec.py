"""What a plugin says about a backend before anything is built: names, capabilities, options, factory.

All of it is data, and :meth:`BackendSpec.refusals` is the one judge over it: selection, explicit requests,
test skips and documentation tables ask the same function.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from attnplug.claims import Claims, PageSizes
from attnplug.errors import PluginError
from attnplug.model import AttentionKind, Feature, LayerSpec
from attnplug.options import options_problems
from attnplug.problem import DType, GraphLevel, Problem, Role
from attnplug.refusal import Refusal, RefusalCode
from attnplug.requirement import requirement_problem, requirement_refusal

DEVICES = ("cpu", "cuda")

_Member = TypeVar("_Member", bound=Enum)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do, as data. What is not claimed here is refused.

    ``head_dims`` are (query/key, value) widths for MHA, ``mla_dims`` are (kv_lora_rank, rope) widths for MLA;
    ``None`` means any. ``kv_dtypes`` left out means the same as ``dtypes``. ``min_sm`` and ``max_sm`` bound the
    compute capability on CUDA, both inclusive. ``extras`` names the fields of ``ForwardExtras`` it honours.
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

    def __post_init__(self) -> None:
        def normalise(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        normalise("kinds", _members("kinds", self.kinds, AttentionKind))
        normalise("roles", _members("roles", self.roles, Role))
        normalise("dtypes", _members("dtypes", self.dtypes, DType))
        normalise("kv_dtypes", _members("kv_dtypes", self.kv_dtypes, DType) or self.dtypes)
        normalise("features", _members("features", self.features, Feature))
        normalise("devices", frozenset(_several("devices", self.devices)))
        normalise("extras", frozenset(_several("extras", self.extras)))
        for name in ("head_dims", "mla_dims"):
            pairs = getattr(self, name)
            if pairs is not None:
                normalise(name, frozenset(tuple(pair) for pair in _several(name, pairs)))

    @property
    def claims(self) -> Claims:
        """The run-time claims of a backend that is exactly as good as its spec says."""
        return Claims(
            cuda_graph=self.cuda_graph, page_sizes=self.page_sizes, needs_cpu_seq_lens=self.needs_cpu_seq_lens
        )

    def contradictions(self) -> Iterator[str]:
        """Every way in which these capabilities contradict themselves."""
        linear = {kind for kind in self.kinds if kind.is_linear}
        full = self.kinds - linear
        for name in ("kinds", "devices", "dtypes", "roles"):
            if not getattr(self, name):
                yield f"{name} is empty, so it could never be chosen"
        for device in sorted(self.devices - set(DEVICES)):
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


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """One backend, as its plugin declares it.

    ``factory`` is ``"package.module:attribute"``, a callable that takes a ``BackendContext`` and returns the
    backend; it is imported when the backend is built and not before. ``requires`` are requirement strings that
    must be installed. ``options`` is a frozen dataclass with a default for every field. ``check`` gives further
    refusals that the capabilities cannot express. Under ``auto`` the usable backend with the highest
    ``preference`` wins: 0 for a reference, 100 for a backend that is meant to be fast where it runs at all.
    """

    name: str
    summary: str
    contract: str
    factory: str
    capabilities: Capabilities
    requires: tuple[str, ...] = ()
    options: type[Any] | None = None
    check: Callable[[Problem, Role | None], Iterable[Refusal]] | None = field(default=None, compare=False)
    preference: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "requires", tuple(_several("requires", self.requires)))
        problems = list(self._problems())
        if problems:
            raise PluginError(f"backend {self.name!r}: " + "; ".join(problems))

    def _problems(self) -> Iterator[str]:
        if not isinstance(self.name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", self.name):
            yield "its name must be lower-case letters, digits and underscores, starting with a letter"
        elif self.name == "auto":
            yield "the name 'auto' asks for an automatic choice and cannot be a backend's"
        if not isinstance(self.summary, str) or not self.summary or "\n" in self.summary:
            yield f"summary {self.summary!r} must be one line of text"
        if not isinstance(self.factory, str) or not re.fullmatch(r"[\w.]+:[\w.]+", self.factory):
            yield f"factory {self.factory!r} must be a string 'package.module:attribute'"
        if not isinstance(self.preference, int):
            yield f"preference {self.preference!r} must be an integer"
        if self.check is not None and not callable(self.check):
            yield f"check {self.check!r} must be a function of (problem, role)"
        if isinstance(self.capabilities, Capabilities):
            yield from self.capabilities.contradictions()
        else:
            yield f"capabilities {self.capabilities!r} must be Capabilities(...)"
        for requirement in self.requires:
            if (problem := requirement_problem(requirement)) is not None:
                yield problem
        if self.options is not None:
            yield from options_problems(self.options)

    def refusals(self, problem: Problem, role: Role | None = None) -> list[Refusal]:
        """Every reason why this backend cannot serve ``problem`` in ``role``; empty means it can.

        Without a role or a model only what they would not decide is judged.
        """
        reasons = [
            *(reason for text in self.requires if (reason := requirement_refusal(text)) is not None),
            *_environment_refusals(self.capabilities, problem),
        ]
        if role is not None:
            reasons += _role_refusals(self.capabilities, problem, role)
        if self.check is not None:
            reasons += self._own_refusals(problem, role)
        return reasons

    def _own_refusals(self, problem: Problem, role: Role | None) -> list[Refusal]:
        assert self.check is not None
        try:
            reasons = list(self.check(problem, role))
        except Exception as error:  # a plugin's mistake must not take the other candidates with it (D2)
            text = f"its own check failed with {type(error).__name__}: {error}"
            return [Refusal(RefusalCode.CHECK_FAILED, text, value=type(error).__name__)]
        wrong = [reason for reason in reasons if not isinstance(reason, Refusal)]
        if wrong:
            text = f"its own check returned {wrong[0]!r}, which is not a Refusal"
            return [Refusal(RefusalCode.CHECK_FAILED, text, value=repr(wrong[0]))]
        return reasons


def _environment_refusals(can: Capabilities, problem: Problem) -> Iterator[Refusal]:
    """What device, element types, pages and switches decide."""
    if problem.device is not None and problem.device not in can.devices:
        yield _outside(RefusalCode.DEVICE, "device", problem.device, can.devices, "--device")
    elif problem.device == "cuda" and problem.sm is not None:
        low, high = can.min_sm, can.max_sm
        if (low is not None and problem.sm < low) or (high is not None and problem.sm > high):
            yield Refusal(
                RefusalCode.SM,
                f"it needs {_sm_range(low, high)}, this is SM {problem.sm}",
                value=problem.sm,
                allowed=_sm_range(low, high),
                option="--sm",
            )
    if problem.dtype is not None and problem.dtype not in can.dtypes:
        yield _outside(RefusalCode.DTYPE, "dtype", problem.dtype, can.dtypes, "--dtype")
    if problem.kv_dtype is not None and problem.kv_dtype not in can.kv_dtypes:
        yield _outside(RefusalCode.KV_DTYPE, "KV dtype", problem.kv_dtype, can.kv_dtypes, "--kv-dtype")
    if problem.page_size is not None and can.page_sizes.kernel_size(problem.page_size) is None:
        yield Refusal(
            RefusalCode.PAGE_SIZE,
            f"page size {problem.page_size} is not supported, only {can.page_sizes}",
            value=problem.page_size,
            allowed=sorted(can.page_sizes.kernel or ()),
            option="--page-size",
        )
    if problem.cuda_graph > can.cuda_graph:
        yield Refusal(
            RefusalCode.CUDA_GRAPH,
            f"CUDA graphs are asked for at level {problem.cuda_graph.name}, it supports {can.cuda_graph.name}",
            value=problem.cuda_graph.name,
            allowed=[level.name for level in GraphLevel if level <= can.cuda_graph],
            option="--cuda-graph",
        )
    if problem.speculative_tokens > can.max_speculative_tokens:
        yield Refusal(
            RefusalCode.SPECULATION,
            f"{problem.speculative_tokens} speculative tokens are asked for, it takes {can.max_speculative_tokens}",
            value=problem.speculative_tokens,
            allowed=can.max_speculative_tokens,
            option="--speculative-tokens",
        )


def _role_refusals(can: Capabilities, problem: Problem, role: Role) -> Iterator[Refusal]:
    """What the role and the layers that fall to it decide. Layers of one shape give one refusal."""
    if role not in can.roles:
        yield _outside(RefusalCode.ROLE, "role", role, can.roles, role.option)
    if problem.model is None:
        return
    layers = problem.model.linear_layers if role is Role.LINEAR else problem.model.full_layers
    given: list[Refusal] = []
    for layer in layers:
        for reason in _layer_refusals(can, problem, role, layer):
            if reason not in given:
                given.append(reason)
    yield from given


def _layer_refusals(can: Capabilities, problem: Problem, role: Role, layer: LayerSpec) -> Iterator[Refusal]:
    if layer.kind not in can.kinds:
        yield _outside(RefusalCode.KIND, "attention kind", layer.kind, can.kinds, role.option)
        return
    for feature in sorted(layer.features - can.features):
        yield _outside(RefusalCode.FEATURE, "feature", feature, can.features, role.option)
    if layer.kind is AttentionKind.MHA and can.head_dims is not None:
        dims = (layer.head_dim, layer.v_head_dim)
        if dims not in can.head_dims:
            yield _dims(RefusalCode.HEAD_DIM, "head dims (qk, v)", dims, can.head_dims, role)
    if layer.mla is not None and can.mla_dims is not None:
        dims = (layer.mla.kv_lora_rank, layer.mla.qk_rope_head_dim)
        if dims not in can.mla_dims:
            yield _dims(RefusalCode.MLA_DIMS, "MLA dims (kv_lora_rank, rope)", dims, can.mla_dims, role)
    ranks = problem.tensor_parallel
    if layer.num_heads % ranks:
        yield Refusal(
            RefusalCode.TENSOR_PARALLEL,
            f"{layer.num_heads} heads cannot be divided among {ranks} ranks",
            value=ranks,
            allowed=[count for count in range(1, layer.num_heads + 1) if layer.num_heads % count == 0],
            option="--tensor-parallel",
        )


def _outside(code: RefusalCode, what: str, value: str, allowed: Iterable[str], option: str) -> Refusal:
    names = sorted(str(name) for name in allowed)
    return Refusal(
        code, f"{what} {value} is not supported, only {', '.join(names) or 'none'}", str(value), names, option
    )


def _dims(
    code: RefusalCode, what: str, value: tuple[int, int], allowed: Iterable[tuple[int, int]], role: Role
) -> Refusal:
    pairs = sorted(allowed)
    text = f"{what} {value} are not supported, only {', '.join(map(str, pairs))}"
    return Refusal(code, text, list(value), [list(pair) for pair in pairs], role.option)


def _sm_range(low: int | None, high: int | None) -> str:
    if low is None:
        return f"SM {high} or older"
    if high is None:
        return f"SM {low} or newer"
    return f"SM {low}" if low == high else f"SM {low} to {high}"


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
