"""Backend selection for a vLLM configuration, before anything is built.

vLLM asks backend classes for block sizes while no configuration is set. The selections made for an engine's layers are
therefore remembered until another engine in this process makes its layers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from functools import reduce
from typing import Any
from weakref import ReferenceType, ref

from attnplug import BackendSpec, GraphLevel, ModelSpec, PageSizes, Problem, Refusal, Role
from attnplug.host import (
    AttnplugError,
    BackendRequest,
    Selection,
    choose_importable,
    default_ranking,
)
from attnplug_vllm.host import HOST, refusal_message, refused_without_lse, render, returns_lse
from attnplug_vllm.kv_formats import registry
from attnplug_vllm.settings import OPTION, read_request
from attnplug_vllm.specs import Machine, context_ranks, problem_of, unsupported

logger = logging.getLogger(f"vllm.{__name__}")

_selections: dict[tuple[str, Problem], Selection] = {}
"""Selections of one engine, by request and problem. Most layers of a model are alike, so this is also a cache."""
_groups: list[tuple[frozenset[str], str]] = []
"""KV groups that were not logged yet: names of their layers, and text."""
_logged: set[str] = set()
"""Lines that were logged for this engine."""
_engine: ReferenceType[Any] | None = None
"""Compilation configuration of that engine: the one object that a model shares with its draft."""


class Refused(ValueError):
    """A configuration that cannot be served, with every reason in vLLM's option names.

    ``refusals`` are the bridge's own reasons; ``error`` is attnplug's error, if one is the cause. A ValueError, because
    vLLM shows those to users.
    """

    def __init__(self, message: str, refusals: Iterable[Refusal] = (), error: AttnplugError | None = None) -> None:
        super().__init__(message)
        self.refusals, self.error = tuple(refusals), error


def request_of(config: Any) -> BackendRequest:
    """Read attnplug's section of a vLLM configuration. Raises :class:`Refused` if it is malformed."""
    try:
        return read_request(config.additional_config)
    except AttnplugError as error:
        raise Refused(error.format(render), error=error) from None


def choose(config: Any, model: ModelSpec, kv_cache_dtype: str, machine: Machine | None = None) -> Selection:
    """Select the backends for layers of one KV group. Raises :class:`Refused` with every reason. Builds nothing."""
    request = request_of(config)
    raise_if_refused(version_refusals())
    _forget_other_engines(config.compilation_config)
    try:
        problem = problem_of(config, model, machine or Machine.current(), kv_cache_dtype)
        raise_if_refused([*unsupported(config), *HOST.refuse(problem)])
        key = repr(request), problem
        if (selection := _selections.get(key)) is None:
            installed = registry()
            if context_ranks(config) > 1:
                raise_if_refused(refused_without_lse(request, installed))
                backends = {name: backend for name, backend in installed.backends.items() if returns_lse(backend.spec)}
                installed = replace(installed, backends=backends)
            ranking = default_ranking(installed, problem, per_batch=HOST.per_batch(problem))
            selection = choose_importable(installed, request, problem, ranking)
    except AttnplugError as error:
        raise Refused(error.format(render), error=error) from None
    _selections[key] = selection
    return selection


def log_group(config: Any, names: Iterable[str], model: ModelSpec, selection: Selection) -> None:
    """Note the backends of a KV group for the log. Logs one line for all groups once every attnplug layer has its own:
    vLLM's log says CUSTOM for all of them."""
    if config.parallel_config.rank != 0:
        return
    _groups.append((frozenset(names), f"{_described(model)}: {_backends(selection)}"))
    layers = config.compilation_config.static_forward_context.items()
    ours = {name for name, layer in layers if hasattr(getattr(layer, "impl", None), "selection")}
    if ours <= frozenset().union(*(group for group, _ in _groups)):
        log_groups()


def log_groups() -> None:
    """Log the noted KV groups, if any. vLLM may make the builders of an engine twice, to profile memory."""
    line = "; ".join(text for _, text in _groups)
    _groups.clear()
    if line and line not in _logged:
        _logged.add(line)
        logger.info("attnplug: %s", line)


def _described(model: ModelSpec) -> str:
    windows = {layer.sliding_window for layer in model.layers} - {None}
    text = f"{len(model.layers)} layer" + "s" * (len(model.layers) > 1)
    return text + "".join(f", window {window}" for window in sorted(filter(None, windows)))


def _backends(selection: Selection) -> str:
    """Backends of each role with the reason for the choice."""
    parts = []
    if selection.problem.mla_by_host and selection.problem.prefilled_by_host and Role.PREFILL not in selection.choices:
        parts.append(f"{Role.PREFILL} by vLLM's own MLA prefill backend ({OPTION}.prefill names another one)")
    for role, choice in selection.choices.items():
        names = [spec.name for spec in serving_specs(selection, role)]
        by_batch = ", depending on the batch" * (len(names) > 1)
        parts.append(f"{role} by {' or '.join(names)}{by_batch} ({choice.why(render)})")
    return ", ".join(parts)


def _forget_other_engines(engine: Any) -> None:
    global _engine
    if _engine is None or _engine() is not engine:
        forget()
        _engine = ref(engine)


def version_refusals() -> list[Refusal]:
    """The refusal of the installed vLLM version, if this bridge does not support it."""
    from vllm import __version__

    refusal = HOST.version_refusal(__version__)
    return [] if refusal is None else [refusal]


def raise_if_refused(refusals: Iterable[Refusal]) -> None:
    """Raise :class:`Refused` with all refusals, if there are any."""
    if reasons := list(refusals):
        raise Refused(refusal_message(reasons), reasons)


def remembered() -> tuple[Selection, ...]:
    """All selections of the engine whose layers were made last."""
    return tuple(_selections.values())


def forget() -> None:
    """Drop the remembered selections."""
    _selections.clear()
    _groups.clear()
    _logged.clear()


def serving_specs(selection: Selection, *roles: Role) -> tuple[BackendSpec, ...]:
    """Backends that serve ``roles`` (all if none is given).

    Several, if one prefills and another decodes, or if the backend depends on the batch.
    """
    serving = (backend.spec for role in roles or selection.choices for backend in selection.serving(role))
    return tuple({spec.name: spec for spec in serving}.values())


def page_sizes() -> PageSizes:
    """Page sizes that every backend selected for the engine supports."""
    specs = [spec for selection in remembered() for spec in serving_specs(selection)]
    return reduce(PageSizes.intersection, (spec.capabilities.page_sizes for spec in specs), PageSizes())


def graph_level(selection: Selection) -> GraphLevel:
    """Highest CUDA-graph level that every decode backend supports on this machine. Decode includes verification.

    A backend may declare more than it accepts here. Prefill backends take no part in captured batches.
    """
    return min(_graph_level(backend, selection) for backend in serving_specs(selection, Role.DECODE))


def _graph_level(backend: BackendSpec, selection: Selection) -> GraphLevel:
    problem, options = selection.problem, selection.options.get(backend.name)
    problems = (replace(problem, cuda_graph=level) for level in GraphLevel)
    accepted = [each.cuda_graph for each in problems if not backend.refusals(each, Role.DECODE, options)]
    return max(accepted, default=GraphLevel.NEVER)
