"""Declaration of one backend: name, capabilities, options, requirements and factory; and the plugin it comes from.

All of it is data. Selection, explicit requests, test skips and documentation tables all call
:meth:`BackendSpec.refusals`.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any, Generic, TypeVar

from importlib_metadata import EntryPoint

from attnplug.declare.capabilities import Capabilities
from attnplug.declare.errors import PluginError, Refusal, RefusalCode, Setting, describe_error
from attnplug.declare.installed import (
    DOTTED,
    HasMetadata,
    factory_refusal,
    metadata_lines,
    requirement_problem,
    requirement_refusal,
)
from attnplug.declare.kv_format import PLAIN_FORMATS
from attnplug.declare.model import AttentionKind, Feature, LayerSpec
from attnplug.declare.options import options_problems
from attnplug.declare.problem import ExtendPath, Problem, Role

LARGEST_PREFERENCE = 10**9
MOST_REFUSALS = 1000
"""Maximum number of refusals of one check: an endless generator must not hang the caller."""


@dataclass(frozen=True, slots=True)
class KernelBuild:
    """A kernel, or a module of kernels, that a backend compiles just in time.

    - ``name``: unique among the backend's kernels. The same name always stands for the same binary.
    - ``build()``: loads the kernel into the calling process, and compiles it into the library's disk cache if it is not
      there. Idempotent. It is called in a new process first, so it must be picklable and need no state of this one.
    - ``is_cached()``: True if ``build`` would compile nothing.
    """

    name: str
    build: Callable[[], object]
    is_cached: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """Declaration of one backend, returned by a plugin's ``attnplug_backends`` hook.

    ::

        BackendSpec(
            name="acme",
            summary="MHA by Acme's kernels",
            contract="1.0",
            factory="attnplug_acme.backend:AcmeBackend",
            capabilities=Capabilities(kinds={"mha"}, devices={"cuda"}, dtypes={"bfloat16"}),
            requires=("acme-kernels>=2",),
        )

    - ``contract``: lowest version of the contract that the backend needs, as a literal.
    - ``factory``: ``"package.module:attribute"``, a callable that takes a ``BackendContext`` and returns the backend.
      It is not imported before the backend is built.
    - ``requires``: requirement strings that must be installed. ``(requirement, module)`` must also provide the module.
    - ``uses``: optional distributions. Measured times are valid only for the versions they were measured with.
    - ``options``: a frozen dataclass with a default for every field.
    - ``check(problem, role, options)``: yields refusals that capabilities cannot express. ``options`` are the parsed
      options (defaults if the user sets none), ``None`` if the spec has no options.

    - ``kernel_builds``: ``"package.module:attribute"``, a function of ``(problem, roles, options)`` that returns a list
      of ``KernelBuild``: every kernel that the backend compiles just in time. Hosts compile them in parallel processes
      before they build the backend, so that no request waits for a compiler (E1). Not for kernels of Triton, which
      hosts compile by running requests of every kind.

    Raises :class:`PluginError` with every mistake of the declaration.
    """

    name: str
    summary: str
    contract: str
    factory: str
    capabilities: Capabilities
    requires: tuple[str | tuple[str, str], ...] = ()
    uses: tuple[str, ...] = ()
    options: type[Any] | None = None
    check: Callable[[Problem, Role | None, Any], Iterable[Refusal]] | None = field(default=None, compare=False)
    kernel_builds: str | None = None
    preference: int = 0
    """Rank under ``auto`` unless a host ranks otherwise: the highest wins, then the first by name. 0 for a reference,
    100 for a fast backend. The embedded default always comes last."""

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise PluginError(f"backend {self.name!r}: " + "; ".join(problems))

    def _problems(self) -> Iterator[str]:
        if not isinstance(self.name, str) or not re.fullmatch(r"[a-z][a-z0-9_]{0,63}", self.name):
            yield "name must be at most 64 lower-case letters, digits and underscores, starting with a letter"
        elif self.name == "auto":
            yield "name 'auto' is reserved for automatic selection"
        if not isinstance(self.summary, str) or not self.summary or not self.summary.isprintable():
            yield f"summary {self.summary!r} must be one line of text"
        for name, reference in {"factory": self.factory, "kernel_builds": self.kernel_builds or "none:none"}.items():
            if not isinstance(reference, str) or not re.fullmatch(rf"{DOTTED}:{DOTTED}", reference):
                yield f"{name} {reference!r} must be a string 'package.module:attribute'"
        if type(self.preference) is not int:
            yield f"preference {self.preference!r} must be a whole number"
        elif abs(self.preference) > LARGEST_PREFERENCE:
            yield f"preference must be from -{LARGEST_PREFERENCE} to {LARGEST_PREFERENCE}"
        if self.check is not None and not callable(self.check):
            yield f"check {self.check!r} must be a function of (problem, role, options)"
        elif self.check is not None:
            with suppress(ValueError):  # a builtin has no signature
                given = inspect.signature(self.check)
                try:
                    given.bind(None, None, None)
                except TypeError:
                    takes = ", ".join(given.parameters)
                    yield f"check takes ({takes}); it must take (problem, role, options), options as parsed"
        if isinstance(self.capabilities, Capabilities):
            yield from self.capabilities.contradictions()
        else:
            yield f"capabilities {self.capabilities!r} must be Capabilities(...)"
        if isinstance(self.requires, tuple | list):
            yield from (problem for needed in self.requires if (problem := requirement_problem(needed)) is not None)
        else:
            yield f"requires {self.requires!r} must be a tuple of requirement strings or pairs (requirement, module)"
        if not isinstance(self.uses, tuple | list) or not all(
            isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", name)
            for name in self.uses
        ):
            yield f"uses {self.uses!r} must be a tuple of distributions' names, such as 'flash-attn', without versions"
        if self.options is not None:
            yield from options_problems(self.options)

    def refusals(self, problem: Problem, role: Role | None = None, options: Any = None) -> list[Refusal]:
        """Return every reason why this backend cannot serve ``problem`` in ``role``; empty if it can.

        Without a role or a model, checks that depend on them are skipped. ``options`` are parsed; ``None``: defaults.
        """
        requirements = [(needed,) if isinstance(needed, str) else needed for needed in self.requires]
        installed = [factory_refusal(self.factory), *(requirement_refusal(*needed) for needed in requirements)]
        reasons = [reason for reason in installed if reason is not None]
        reasons += _environment_refusals(self.capabilities, problem, role)
        if role is not None:
            reasons += _role_refusals(self.capabilities, problem, role)
        if self.check is not None:
            reasons += self._own_refusals(problem, role, options)
        return reasons

    def _own_refusals(self, problem: Problem, role: Role | None, options: Any) -> list[Refusal]:
        assert self.check is not None
        try:
            if options is None and self.options is not None:
                options = self.options()
            with redirect_stdout(sys.stderr):  # what it prints must not end up in our output
                found = self.check(problem, role, options)
                if not isinstance(found, Iterable):
                    raise TypeError(f"it returned {found!r}; return a list of Refusal")
                reasons = list(islice(found, MOST_REFUSALS + 1))
                if len(reasons) > MOST_REFUSALS:
                    raise ValueError(f"it yields more than {MOST_REFUSALS} refusals, perhaps endlessly")
            if wrong := [reason for reason in reasons if type(reason) is not Refusal]:
                raise TypeError(f"it returned {wrong[0]!r} in its list, which is not a Refusal")
            json.dumps([reason.as_json() for reason in reasons])  # fail here, not where reasons are printed
        except KeyboardInterrupt as error:
            raise KeyboardInterrupt(f"in the check of backend {self.name}") from error
        except BaseException as error:  # a plugin's mistake must not affect other candidates (D2)
            text = f"its check failed: {describe_error(error)}"
            return [Refusal(RefusalCode.CHECK_FAILED, text, value=type(error).__name__)]
        return reasons


def _environment_refusals(can: Capabilities, problem: Problem, role: Role | None) -> Iterator[Refusal]:
    """Yield refusals that depend on device, dtypes, pages, graphs and speculation."""
    devices = can.devices or {problem.device or ""}
    yield from _unsupported(RefusalCode.DEVICE, "device", problem.device, devices, Setting.DEVICE)
    if problem.device in devices:
        # No setting: a user cannot change the device.
        here, on_cuda = problem.device_architecture, problem.device == "cuda"
        requirement = (can.min_sm, can.max_sm) if on_cuda else can.architectures.get(problem.device or "")
        try:
            needed = None if here is None or requirement is None else here.unmet(requirement)
        except Exception as error:  # of a plugin, which must not affect other candidates (D2)
            needed = f"{requirement!r}, which {problem.device} cannot compare ({describe_error(error)})"
        if needed is not None:
            code, value = (RefusalCode.SM, problem.sm) if on_cuda else (RefusalCode.ARCHITECTURE, str(here))
            yield Refusal(code, f"requires {needed}; this {'GPU' if on_cuda else 'device'} is {here}", value, needed)
    yield from _unsupported(RefusalCode.DTYPE, "dtype", problem.dtype, can.dtypes, Setting.DTYPE)
    kv_dtype, formats = problem.kv_dtype, can.kv_dtypes or PLAIN_FORMATS
    yield from _unsupported(RefusalCode.KV_DTYPE, "KV dtype", kv_dtype, can.kv_dtypes, Setting.KV_DTYPE)
    if can.kv_matches_dtype and problem.dtype in can.dtypes and kv_dtype in formats & PLAIN_FORMATS - {problem.dtype}:
        message = f"a cache in {kv_dtype} cannot be read with {problem.dtype} queries"
        allowed = sorted(map(str, formats - PLAIN_FORMATS | {problem.dtype} & formats))
        yield Refusal(RefusalCode.KV_DTYPE, message, str(kv_dtype), allowed, Setting.KV_DTYPE)
    yield from can.refusals(problem, [role], ["page_sizes"])
    yield from _unsupported(RefusalCode.LAYOUT, "cache layout", problem.layout, can.layouts, Setting.LAYOUT)
    yield from can.refusals(problem, [role], ["needs_cpu_seq_lens", "cuda_graph"])
    tokens, most = problem.speculative_tokens, can.max_speculative_tokens
    if tokens > most:
        message = f"{tokens} speculative tokens are requested; this backend supports at most {most}"
        yield Refusal(RefusalCode.SPECULATION, message, tokens, most, Setting.SPECULATIVE_TOKENS)
    coordinator = problem.coordinator
    if coordinator is not None and Feature.SPARSE in can.features and coordinator not in can.coordinators:
        message = f"{coordinator} keeps latent rows outside the pools; this backend reads only rows inside them"
        yield Refusal(RefusalCode.FEATURE, message, coordinator, setting=Setting.ENABLE_HISPARSE)
    yield from can.refusals(problem, [role], ["trees", "invariant"])


def _role_refusals(can: Capabilities, problem: Problem, role: Role) -> Iterator[Refusal]:
    """Yield refusals that depend on the role and its layers. Equal refusals of several layers are yielded once."""
    yield from _unsupported(RefusalCode.ROLE, "role", role, can.roles, role.setting)
    if problem.model is None:
        return
    layers = problem.model.linear_layers if role is Role.LINEAR else problem.model.full_layers
    distinct: list[Refusal] = []  # value and allowed may be lists, so refusals are not hashable
    for layer in layers:
        distinct += [reason for reason in _layer_refusals(can, problem, role, layer) if reason not in distinct]
    yield from distinct
    served = [layer for layer in layers if layer.kind in can.kinds]
    heads = max((layer.num_heads // problem.tensor_parallel for layer in served), default=0)
    if can.max_heads is not None and heads > can.max_heads:
        message = f"{heads} heads per rank exceed the maximum of {can.max_heads}"
        yield Refusal(RefusalCode.HEADS, message, heads, can.max_heads, Setting.TENSOR_PARALLEL)
    shapes = [_shape(layer, problem.tensor_parallel) for layer in served] if can.layers_alike else []
    names = dict.fromkeys(name for shape in shapes for name in shape)
    values = {name: list(dict.fromkeys(shape.get(name) for shape in shapes)) for name in names}
    if differing := {name: distinct for name, distinct in values.items() if len(distinct) > 1}:
        listed = "; ".join(
            f"{name} {', '.join(f'{value:.4g}' if isinstance(value, float) else str(value) for value in values)}"
            for name, values in differing.items()
        )
        yield Refusal(RefusalCode.LAYERS, f"one plan serves all layers, but they differ: {listed}", differing)


def _shape(layer: LayerSpec, ranks: int) -> dict[str, Any]:
    """Return every layer property that a plan may depend on, with the query heads of one rank."""
    parts = [part for part in (layer, layer.mla, layer.linear) if part is not None]
    shape = {each.name: getattr(part, each.name) for part in parts for each in fields(part)}
    shape["compression"] = None if layer.compressed is None else layer.compressed.ratio
    shape["index topk"] = None if layer.indexer is None else layer.indexer.topk  # a shared index changes no plan
    shape["num_heads"] = layer.num_heads // ranks
    # A latent row has no heads.
    ignored = ("layer_id", "mla", "linear", "indexer", "compressed", *(["num_kv_heads"] if layer.mla else []))
    return {name: value for name, value in shape.items() if name not in ignored}


def _layer_refusals(can: Capabilities, problem: Problem, role: Role, layer: LayerSpec) -> Iterator[Refusal]:
    yield from _unsupported(RefusalCode.KIND, "attention kind", layer.kind, can.kinds, role.setting)
    supported = sorted(map(str, can.features))
    for feature in sorted(layer.features - can.features):
        why = f", only {', '.join(supported) or 'none'}"
        if feature is Feature.SPARSE and layer.indexer is not None:
            why = f": layers attend to the {layer.indexer.topk} rows that an index selects; this backend attends to all"
        elif feature is Feature.COMPRESSED and layer.compressed is not None:
            ratio = layer.compressed.ratio
            why = f": layers attend to entries of {ratio} tokens each; this backend reads token rows only"
        message = f"feature {feature} is not supported{why}"
        yield Refusal(RefusalCode.FEATURE, message, str(feature), supported, role.setting)
    if layer.indexer is not None and Feature.SPARSE in can.features:
        index = problem.index_dtype
        yield from _unsupported(RefusalCode.INDEX_DTYPE, "index dtype", index, can.index_dtypes, Setting.INDEX_DTYPE)
    if layer.kind is AttentionKind.MHA:
        dims = (layer.head_dim, layer.v_head_dim)
        yield from _unsupported(RefusalCode.HEAD_DIM, "head dims (qk, v)", dims, can.head_dims, role.setting)
    if layer.mla is not None:
        dims, noun = (layer.mla.kv_lora_rank, layer.mla.qk_rope_head_dim), "MLA dims (kv_lora_rank, rope)"
        yield from _unsupported(RefusalCode.MLA_DIMS, noun, dims, can.mla_dims, role.setting)
    if problem.speculative_topk > 1 and can.trees and layer.sliding_window is not None:
        message = (
            f"draft trees are not supported with the feature {Feature.SLIDING_WINDOW} (here {layer.sliding_window} "
            "tokens): the keys that a window hides from a row depend on the row's depth in its tree"
        )
        yield Refusal(RefusalCode.FEATURE, message, problem.speculative_topk, 1, Setting.SPECULATIVE_TOPK)
    if layer.mla is not None and role is Role.PREFILL:
        if problem.mla_by_host and can.mla_extend <= {ExtendPath.ABSORBED}:
            message = "this host prefills MLA as MHA; this backend extends absorbed only; use the host's own kernels"
            yield Refusal(RefusalCode.FEATURE, message, sorted(can.mla_extend), setting=role.setting)
        if role in can.roles and layer.kind in can.kinds:
            path, setting = problem.extend_path, Setting.MLA_EXTEND
            yield from _unsupported(RefusalCode.FEATURE, "MLA extend path", path, can.mla_extend, setting)
    ranks, heads = problem.tensor_parallel, layer.num_heads
    if heads % ranks:
        allowed = [count for count in range(1, heads + 1) if heads % count == 0]
        message = f"{heads} heads cannot be divided among {ranks} ranks"
        yield Refusal(RefusalCode.TENSOR_PARALLEL, message, ranks, allowed, Setting.TENSOR_PARALLEL)


def _unsupported(
    code: RefusalCode, noun: str, value: Any, supported: Collection[Any] | None, setting: Setting
) -> Iterator[Refusal]:
    """Yield the refusal of a value that is given and not supported. ``None`` supports any value."""
    if supported is not None and value is not None and value not in supported:
        verb, names = "are" if type(value) is tuple else "is", ", ".join(map(str, sorted(supported)))
        message = f"{noun} {value} {verb} not supported, only {names or 'none'}"
        plain, *allowed = (list(each) if type(each) is tuple else str(each) for each in (value, *sorted(supported)))
        yield Refusal(code, message, plain, allowed, setting)


Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Source:
    """Origin of a plugin: its entry point and its distribution."""

    entry_point: str
    target: str
    distribution: str
    version: str

    @classmethod
    def of(cls, point: EntryPoint) -> Source:
        return cls(point.name, point.value, *distribution_identity(point.dist))

    @property
    def embedded(self) -> bool:
        """True if the plugin is core's own. Its module decides, because anyone can choose names and metadata."""
        return self.target.startswith("attnplug.")

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def distribution_identity(distribution: HasMetadata | None) -> tuple[str, str]:
    """Name and version of a distribution, with placeholders for what damaged or missing metadata lacks."""
    found = {} if distribution is None else metadata_lines(distribution)
    place = getattr(distribution, "_path", "made by hand")
    return found.get("name") or f"unknown distribution ({place})", found.get("version") or "?"


@dataclass(frozen=True, slots=True)
class Registered:
    """A backend that can be requested by name, and the plugin that provides it."""

    spec: BackendSpec
    source: Source


@dataclass(frozen=True, slots=True)
class Provided(Generic[Item]):
    """An object other than a backend, and the plugin that provides it."""

    value: Item
    source: Source
