"""Which backends serve a vLLM configuration, judged before anything is built, and remembered for the engine.

vLLM asks a class for block sizes where no configuration is set. What was chosen when the layers were made is
remembered for that, until another engine makes its layers in this process.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache, reduce
from typing import Any
from weakref import ReferenceType, ref

from attnplug import BackendSpec, GraphLevel, ModelSpec, PageSizes, Problem, Refusal, Role
from attnplug.host import AttnplugError, Registry, Selection, choose_importable, default_ranking, load_registry
from attnplug_vllm.config import Settings, read_settings
from attnplug_vllm.host import HOST, render
from attnplug_vllm.specs import Machine, problem_of, unsupported
from attnplug_vllm.words import refused

_chosen: dict[tuple[str, Problem], Selection] = {}
"""The selections of an engine, by what was asked for. Most layers of a model are alike, and are judged once."""
_engine: ReferenceType[Any] | None = None
"""The compilation configuration of that engine: the one thing that a model shares with its draft."""


class Refused(ValueError):
    """A choice that cannot be served, with every reason in vLLM's words. A ValueError: vLLM shows those to users."""


@cache
def registry() -> Registry:
    return load_registry()


def settings_of(config: Any) -> Settings:
    """What a vLLM configuration asks for, in vLLM's words if it cannot be read."""
    try:
        return read_settings(config.additional_config)
    except AttnplugError as error:
        raise Refused(error.told(render)) from None


def choose(config: Any, model: ModelSpec, kv_cache_dtype: str, machine: Machine | None = None) -> Selection:
    """The backends for layers of one KV group. Raises :class:`Refused` with every reason; nothing is built yet."""
    settings = settings_of(config)
    insist(other_version())
    _turn_to(config.compilation_config)
    try:
        problem = problem_of(config, model, machine or Machine.current(), kv_cache_dtype)
        insist([*unsupported(config), *HOST.refuse(problem)])
        key = repr(settings.request), problem
        if (selection := _chosen.get(key)) is None:
            ranking = default_ranking(registry(), problem, per_batch=HOST.per_batch(problem))
            selection = choose_importable(registry(), settings.request, problem, ranking)
    except AttnplugError as error:
        raise Refused(error.told(render)) from None
    _chosen[key] = selection
    return selection


def _turn_to(engine: Any) -> None:
    global _engine
    if _engine is None or _engine() is not engine:
        _chosen.clear()
        _engine = ref(engine)


def other_version() -> list[Refusal]:
    """The refusal of a vLLM that this bridge does not know."""
    from vllm import __version__

    found = HOST.version_refusal(__version__)
    return [] if found is None else [found]


def insist(refusals: Iterable[Refusal]) -> None:
    """Raise all of some refusals, if there are any."""
    if found := list(refusals):
        raise Refused(refused(found))


def remembered() -> tuple[Selection, ...]:
    """All that was chosen for the engine whose layers were made last."""
    return tuple(_chosen.values())


def forget() -> None:
    """For tests: as in a new process."""
    _chosen.clear()


def serving_specs(selection: Selection, *roles: Role) -> tuple[BackendSpec, ...]:
    """The backends that serve these roles, or all; several if one prefills and another decodes, or by batch."""
    serving = (backend.spec for role in roles or selection.choices for backend in selection.serving(role))
    return tuple({spec.name: spec for spec in serving}.values())


def page_sizes() -> PageSizes:
    """The page sizes that everything chosen for an engine reads."""
    specs = [spec for selection in remembered() for spec in serving_specs(selection)]
    return reduce(PageSizes.intersection, (spec.capabilities.page_sizes for spec in specs), PageSizes())


def graph_level(selection: Selection) -> GraphLevel:
    """The most that can be captured here: by every backend that decodes, which verifies drafts too.

    One may declare more, and refuse it on this machine. What prefills takes no part in captured batches.
    """
    return min(_graph_level(backend, selection) for backend in serving_specs(selection, Role.DECODE))


def _graph_level(backend: BackendSpec, selection: Selection) -> GraphLevel:
    problem, options = selection.problem, selection.options.get(backend.name)
    levels = (replace(problem, cuda_graph=level) for level in GraphLevel)
    able = [asked.cuda_graph for asked in levels if not backend.refusals(asked, Role.DECODE, options)]
    return max(able, default=GraphLevel.NEVER)
