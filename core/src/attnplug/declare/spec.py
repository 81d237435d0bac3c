"""What a plugin says about a backend before anything is built: names, capabilities, options, factory.

All of it is data, and :meth:`BackendSpec.refusals` alone judges it: selection, explicit requests, test skips and
documentation tables call the same function.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any

from attnplug.declare.capabilities import Capabilities
from attnplug.declare.errors import PluginError, describe_error
from attnplug.declare.factory import DOTTED, factory_refusal
from attnplug.declare.model import AttentionKind, Feature, LayerSpec
from attnplug.declare.options import options_problems
from attnplug.declare.problem import FP8_CACHES, LATENT_GROUP, DType, ExtendPath, GraphLevel, Problem, Role
from attnplug.declare.refusal import Refusal, RefusalCode
from attnplug.declare.requirement import requirement_problem, requirement_refusal
from attnplug.declare.settings import Setting

LARGEST_PREFERENCE = 10**9
MOST_REFUSALS = 1000
"""The most refusals of one check. An endless generator must not hang the caller."""


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """One backend, as its plugin declares it.

    ``factory`` is ``"package.module:attribute"``, a callable that takes a ``BackendContext`` and returns the
    backend; it is imported when the backend is built and not before. ``requires`` are requirement strings that
    must be installed; one written as ``(requirement, module)`` must also bring that module. ``uses`` are names of
    distributions that it takes where they are installed: times that were measured with another version, or without one,
    no longer hold. ``options`` is a frozen dataclass with a default for every field. ``check`` gives further refusals
    that the capabilities cannot express: of a problem, a role and the backend's options, as parsed. They are the
    defaults where a user sets none, and ``None`` where the spec has no options.
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
    preference: int = 0
    """Under ``auto``, unless a host ranks otherwise, the usable backend with the highest preference is chosen, and
    among equal ones the first by name. The embedded default comes last, whatever the others' preference: it is chosen
    if nothing else is usable. Give 0 for a reference, 100 for a backend that is meant to be fast where it runs at
    all."""

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise PluginError(f"backend {self.name!r}: " + "; ".join(problems))

    def _problems(self) -> Iterator[str]:
        if not isinstance(self.name, str) or not re.fullmatch(r"[a-z][a-z0-9_]{0,63}", self.name):
            yield "its name must be at most 64 lower-case letters, digits and underscores, starting with a letter"
        elif self.name == "auto":
            yield "the name 'auto' asks for an automatic choice and cannot be a backend's"
        if not isinstance(self.summary, str) or not self.summary or not self.summary.isprintable():
            yield f"summary {self.summary!r} must be one line of text"
        if not isinstance(self.factory, str) or not re.fullmatch(rf"{DOTTED}:{DOTTED}", self.factory):
            yield f"factory {self.factory!r} must be a string 'package.module:attribute'"
        if type(self.preference) is not int:
            yield f"preference {self.preference!r} must be a whole number"
        elif abs(self.preference) > LARGEST_PREFERENCE:
            yield f"preference must be from -{LARGEST_PREFERENCE} to {LARGEST_PREFERENCE}"
        if self.check is not None:
            yield from _check_problems(self.check)
        if isinstance(self.capabilities, Capabilities):
            yield from self.capabilities.contradictions()
        else:
            yield f"capabilities {self.capabilities!r} must be Capabilities(...)"
        if isinstance(self.requires, tuple | list):
            yield from (problem for needed in self.requires if (problem := requirement_problem(needed)) is not None)
        else:
            yield f"requires {self.requires!r} must be a tuple of requirement strings or pairs (requirement, module)"
        if not isinstance(self.uses, tuple | list) or not all(_is_distribution(name) for name in self.uses):
            yield f"uses {self.uses!r} must be a tuple of distributions' names, such as 'flash-attn', without versions"
        if self.options is not None:
            yield from options_problems(self.options)

    def refusals(self, problem: Problem, role: Role | None = None, options: Any = None) -> list[Refusal]:
        """Every reason why this backend cannot serve ``problem`` in ``role``; empty means it can.

        Without a role or a model, only what does not depend on them is judged. ``options`` are the parsed ones, or
        ``None`` for the defaults.
        """
        missing = factory_refusal(self.factory)
        reasons = [
            *([] if missing is None else [missing]),
            *(reason for needed in self.requires if (reason := _requirement_refusal(needed)) is not None),
            *_environment_refusals(self.capabilities, problem, role),
        ]
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
                    raise ValueError(f"it gives more than {MOST_REFUSALS} refusals, perhaps without end")
            if wrong := [reason for reason in reasons if type(reason) is not Refusal]:
                raise TypeError(f"it returned {wrong[0]!r} in its list, which is not a Refusal")
            json.dumps([reason.as_json() for reason in reasons])  # fail here, not where reasons are printed
        except KeyboardInterrupt as error:
            raise KeyboardInterrupt(f"in the check of backend {self.name}") from error
        except BaseException as error:  # a plugin's mistake must not affect other candidates (D2)
            text = f"its own check failed with {describe_error(error)}"
            return [Refusal(RefusalCode.CHECK_FAILED, text, value=type(error).__name__)]
        return reasons


def _is_distribution(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", name) is not None


def _check_problems(check: object) -> Iterator[str]:
    if not callable(check):
        yield f"check {check!r} must be a function of (problem, role, options)"
        return
    try:
        given = inspect.signature(check)
    except (TypeError, ValueError):  # a builtin has no signature
        return
    try:
        given.bind(None, None, None)
    except TypeError:
        yield (
            f"its check takes ({', '.join(given.parameters)}); let it take (problem, role, options), the last one the "
            "backend's options as parsed"
        )


def _requirement_refusal(needed: str | tuple[str, str]) -> Refusal | None:
    return requirement_refusal(needed) if isinstance(needed, str) else requirement_refusal(*needed)


def _environment_refusals(can: Capabilities, problem: Problem, role: Role | None) -> Iterator[Refusal]:
    """Refusals that depend on device, element types, pages and switches."""
    if problem.device is not None and problem.device not in can.devices:
        yield _outside(RefusalCode.DEVICE, "device", problem.device, can.devices, Setting.DEVICE)
    elif (needed := _other_sms(problem, can.min_sm, can.max_sm)) is not None:
        message = f"it needs {needed}, this is SM {problem.sm}"
        yield Refusal(RefusalCode.SM, message, problem.sm, needed)  # no setting: nobody can change the GPU
    if problem.dtype is not None and problem.dtype not in can.dtypes:
        yield _outside(RefusalCode.DTYPE, "dtype", problem.dtype, can.dtypes, Setting.DTYPE)
    if problem.kv_dtype is not None:
        yield from _kv_dtype_refusals(can, problem, problem.kv_dtype)
    if problem.page_size is not None and can.page_sizes.kernel_size(problem.page_size) is None:
        yield Refusal(
            RefusalCode.PAGE_SIZE,
            f"page size {problem.page_size} is not supported, only {can.page_sizes}",
            value=problem.page_size,
            allowed=sorted(can.page_sizes.kernel or ()),
            setting=Setting.PAGE_SIZE,
        )
    if problem.layout is not None and problem.layout not in can.layouts:
        yield _outside(RefusalCode.LAYOUT, "cache layout", problem.layout, can.layouts, Setting.LAYOUT)
    if can.needs_cpu_seq_lens and not problem.exact_lengths:
        yield Refusal(
            RefusalCode.LENGTHS,
            "it needs exact lengths on the CPU, and this host has upper bounds only",
            value=False,
            allowed=True,
            setting=Setting.EXACT_LENGTHS,
        )
    if problem.captured([role]) > can.cuda_graph:
        yield Refusal(
            RefusalCode.CUDA_GRAPH,
            f"CUDA graphs are asked for at level {problem.cuda_graph.name}, it supports {can.cuda_graph.name}",
            value=problem.cuda_graph.name,
            allowed=[level.name for level in GraphLevel if level <= can.cuda_graph],
            setting=Setting.CUDA_GRAPH,
        )
    if problem.speculative_tokens > can.max_speculative_tokens:
        yield Refusal(
            RefusalCode.SPECULATION,
            f"{problem.speculative_tokens} speculative tokens are asked for, it takes {can.max_speculative_tokens}",
            value=problem.speculative_tokens,
            allowed=can.max_speculative_tokens,
            setting=Setting.SPECULATIVE_TOKENS,
        )
    coordinator = problem.coordinator
    if coordinator is not None and Feature.SPARSE in can.features and coordinator not in can.coordinators:
        yield Refusal(
            RefusalCode.FEATURE,
            f"latent rows are kept outside the pools by {coordinator}, and it reads those inside by the page table",
            value=coordinator,
            setting=Setting.ENABLE_HISPARSE,
        )
    if problem.speculative_topk > 1 and not can.trees:
        yield Refusal(
            RefusalCode.SPECULATION,
            f"drafts with {problem.speculative_topk} branches are trees, and it takes chains only",
            value=problem.speculative_topk,
            allowed=1,
            setting=Setting.SPECULATIVE_TOPK,
        )


def _kv_dtype_refusals(can: Capabilities, problem: Problem, kv_dtype: DType) -> Iterator[Refusal]:
    if kv_dtype not in can.kv_dtypes:
        yield _outside(RefusalCode.KV_DTYPE, "KV dtype", kv_dtype, can.kv_dtypes, Setting.KV_DTYPE)
        return
    allowed = [dtype for dtype in DType if dtype in can.kv_dtypes]
    if can.kv_matches_dtype and problem.dtype in can.dtypes:
        allowed = [dtype for dtype in allowed if dtype in {problem.dtype, *FP8_CACHES}]
    if kv_dtype not in allowed:
        message = f"a cache in {kv_dtype} cannot be read with {problem.dtype} queries"
    elif kv_dtype in FP8_CACHES and (needed := _other_sms(problem, can.min_fp8_sm, can.max_fp8_sm)) is not None:
        message = f"an fp8 cache is read on {needed}, this is SM {problem.sm}"
        allowed = [dtype for dtype in allowed if dtype not in FP8_CACHES]
    else:
        return
    yield Refusal(RefusalCode.KV_DTYPE, message, str(kv_dtype), list(map(str, allowed)), Setting.KV_DTYPE)


def _role_refusals(can: Capabilities, problem: Problem, role: Role) -> Iterator[Refusal]:
    """Refusals that depend on the role and its layers. Layers of one shape give one refusal."""
    if role not in can.roles:
        yield _outside(RefusalCode.ROLE, "role", role, can.roles, role.setting)
    if problem.model is None:
        return
    layers = problem.model.linear_layers if role is Role.LINEAR else problem.model.full_layers
    given: list[Refusal] = []
    for layer in layers:
        for reason in _layer_refusals(can, problem, role, layer):
            if reason not in given:
                given.append(reason)
    yield from given
    served = [layer for layer in layers if layer.kind in can.kinds]
    heads = max((layer.num_heads // problem.tensor_parallel for layer in served), default=0)
    if can.max_heads is not None and heads > can.max_heads:
        message = f"{heads} heads on one rank are too many, at most {can.max_heads}"
        yield Refusal(RefusalCode.HEADS, message, heads, can.max_heads, Setting.TENSOR_PARALLEL)
    if can.layers_alike and (differing := _differing(served, problem.tensor_parallel)):
        listed = "; ".join(f"{name} {', '.join(map(_number, values))}" for name, values in differing.items())
        yield Refusal(RefusalCode.LAYERS, f"one plan serves all layers, but they differ: {listed}", differing)


def _shape(layer: LayerSpec, ranks: int) -> dict[str, Any]:
    """All that a plan may depend on, with the query heads that one rank has."""
    parts = [part for part in (layer, layer.mla, layer.linear) if part is not None]
    shape = {each.name: getattr(part, each.name) for part in parts for each in fields(part)}
    shape["compression"] = None if layer.compressed is None else layer.compressed.ratio
    shape["index topk"] = None if layer.indexer is None else layer.indexer.topk  # whose index it is changes no plan
    # A latent row has no heads.
    apart = ("layer_id", "mla", "linear", "indexer", "compressed", *(["num_kv_heads"] if layer.mla else []))
    return {name: shape[name] for name in shape if name not in apart} | {"num_heads": layer.num_heads // ranks}


def _differing(layers: list[LayerSpec], ranks: int) -> dict[str, list[Any]]:
    """What layers differ in, with the values that they have."""
    shapes = [_shape(layer, ranks) for layer in layers]
    names = dict.fromkeys(name for shape in shapes for name in shape)
    values = {name: list(dict.fromkeys(shape.get(name) for shape in shapes)) for name in names}
    return {name: found for name, found in values.items() if len(found) > 1}


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _layer_refusals(can: Capabilities, problem: Problem, role: Role, layer: LayerSpec) -> Iterator[Refusal]:
    if layer.kind not in can.kinds:
        yield _outside(RefusalCode.KIND, "attention kind", layer.kind, can.kinds, role.setting)
    for feature in sorted(layer.features - can.features):
        yield _feature_refusal(can, role, layer, feature)
    yield from _cache_refusals(can, problem, layer)
    if layer.kind is AttentionKind.MHA and can.head_dims is not None:
        dims = (layer.head_dim, layer.v_head_dim)
        if dims not in can.head_dims:
            yield _dims(RefusalCode.HEAD_DIM, "head dims (qk, v)", dims, can.head_dims, role)
    if layer.mla is not None and can.mla_dims is not None:
        dims = (layer.mla.kv_lora_rank, layer.mla.qk_rope_head_dim)
        if dims not in can.mla_dims:
            yield _dims(RefusalCode.MLA_DIMS, "MLA dims (kv_lora_rank, rope)", dims, can.mla_dims, role)
    if problem.speculative_topk > 1 and can.trees and layer.sliding_window is not None:
        message = (
            f"trees of drafts are not supported with the feature {Feature.SLIDING_WINDOW}, here of "
            f"{layer.sliding_window} tokens: which keys it hides from a row depends on the row's depth in its tree"
        )
        yield Refusal(RefusalCode.FEATURE, message, problem.speculative_topk, 1, Setting.SPECULATIVE_TOPK)
    as_mha = can.mla_extend - {ExtendPath.ABSORBED}
    if layer.mla is not None and role is Role.PREFILL and problem.mla_by_host and not as_mha:
        message = (
            "this host prefills MLA as MHA, and it extends absorbed only; leave the role to the host's own kernels"
        )
        yield Refusal(RefusalCode.FEATURE, message, sorted(can.mla_extend), setting=role.setting)
    path, prefills = problem.mla_extend, role is Role.PREFILL and role in can.roles and layer.kind in can.kinds
    if layer.mla is not None and prefills and path is not None and path not in can.mla_extend:
        setting = Setting.MLA_EXTEND
        yield _outside(RefusalCode.FEATURE, "MLA extend path", path, can.mla_extend, setting)
    ranks = problem.tensor_parallel
    if layer.num_heads % ranks:
        yield Refusal(
            RefusalCode.TENSOR_PARALLEL,
            f"{layer.num_heads} heads cannot be divided among {ranks} ranks",
            value=ranks,
            allowed=[count for count in range(1, layer.num_heads + 1) if layer.num_heads % count == 0],
            setting=Setting.TENSOR_PARALLEL,
        )


def _cache_refusals(can: Capabilities, problem: Problem, layer: LayerSpec) -> Iterator[Refusal]:
    """Refusals of types that a cache of this layer cannot have, or that the backend cannot read."""
    index_dtype, sparse = problem.index_dtype, layer.indexer is not None and Feature.SPARSE in can.features
    if sparse and index_dtype is not None and index_dtype not in can.index_dtypes:
        setting = Setting.INDEX_DTYPE
        yield _outside(RefusalCode.INDEX_DTYPE, "index dtype", index_dtype, can.index_dtypes, setting)
    if problem.kv_dtype is not DType.FP8_DS_MLA or problem.kv_dtype not in can.kv_dtypes or layer.linear is not None:
        return
    rank = None if layer.mla is None else layer.mla.kv_lora_rank
    if rank is None or rank % LATENT_GROUP:
        message = (
            f"a cache of {problem.kv_dtype} holds latent rows with a scale for every {LATENT_GROUP} values of "
            f"kv_lora_rank, and there are layers with {'no latent rows' if rank is None else f'a rank of {rank}'}"
        )
        others = sorted(map(str, can.kv_dtypes - {problem.kv_dtype}))
        yield Refusal(RefusalCode.KV_DTYPE, message, str(problem.kv_dtype), others, Setting.KV_DTYPE)


def _feature_refusal(can: Capabilities, role: Role, layer: LayerSpec, feature: Feature) -> Refusal:
    if feature is Feature.SPARSE and layer.indexer is not None:
        what = f"layers attend to the {layer.indexer.topk} rows that an index chooses, and it attends to all rows"
    elif feature is Feature.COMPRESSED and layer.compressed is not None:
        what = f"layers attend to entries that stand for {layer.compressed.ratio} tokens each, and it reads rows alone"
    else:
        return _outside(RefusalCode.FEATURE, "feature", feature, can.features, role.setting)
    message = f"feature {feature} is not supported: {what}"
    return Refusal(RefusalCode.FEATURE, message, str(feature), sorted(map(str, can.features)), role.setting)


def _outside(code: RefusalCode, what: str, value: str, allowed: Iterable[str], setting: Setting) -> Refusal:
    names = sorted(str(name) for name in allowed)
    return Refusal(
        code, f"{what} {value} is not supported, only {', '.join(names) or 'none'}", str(value), names, setting
    )


def _dims(
    code: RefusalCode, what: str, value: tuple[int, int], allowed: Iterable[tuple[int, int]], role: Role
) -> Refusal:
    pairs = sorted(allowed)
    text = f"{what} {value} are not supported, only {', '.join(map(str, pairs))}"
    return Refusal(code, text, list(value), [list(pair) for pair in pairs], role.setting)


def _other_sms(problem: Problem, low: int | None, high: int | None) -> str | None:
    """The bounds of a compute capability in words, if a problem's GPU is outside of them."""
    sm = problem.sm
    if problem.device != "cuda" or sm is None or ((low is None or low <= sm) and (high is None or sm <= high)):
        return None
    if low is None:
        return f"SM {high} or older"
    if high is None:
        return f"SM {low} or newer"
    return f"SM {low}" if low == high else f"SM {low} to {high}"
