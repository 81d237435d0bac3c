"""Selection of one backend per role, or every reason against each candidate (D3).

Nothing is built and no kernel library is imported. A selection depends only on specs and a problem, both plain data, so
it also works for absent hardware.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from attnplug.auto.ranking import BY_PREFERENCE, Ranking, by_preference
from attnplug.declare.capabilities import PageSizes
from attnplug.declare.errors import AttnplugError, Refusal, RefusalCode, Render, Setting, UsageError
from attnplug.declare.options import parse_options
from attnplug.declare.problem import DEFAULT_PAGE_SIZE, GraphLevel, Problem, Role, sorted_levels
from attnplug.declare.spec import Registered
from attnplug.registry.registry import Registry
from attnplug.registry.selection import AUTO, BackendRequest, Candidate, RoleChoice, Selection, refusal_lines

_CAPTURED = (Role.DECODE, Role.LINEAR, Role.DRAFT)
"""Roles that take part in a captured decode step."""


class SelectionError(AttnplugError):
    """A role cannot be served. ``selection`` holds every candidate with every refusal."""

    def __init__(self, selection: Selection) -> None:
        super().__init__("\n".join(refusal_lines(selection, str)))
        self.selection = selection

    def format(self, render: Render) -> str:
        return "\n".join(refusal_lines(self.selection, render))


def explain(
    registry: Registry,
    request: BackendRequest,
    problem: Problem,
    failed: Mapping[str, Refusal] | None = None,
    ranking: Ranking = BY_PREFERENCE,
) -> Selection:
    """Select backends for every role: ``explain(load_registry(), BackendRequest("auto"), problem)``.

    Only an invalid request raises (UsageError); refusals are part of the result.

    ``failed`` holds backends that were selected before and could not be built, with the reason, by name.
    """
    given = {name: _parsed(registry, name, settings) for name, settings in request.options.items()}
    for name in (request.attention, *request.roles.values()):
        if name != AUTO:
            registry.get(name)  # an unknown name is an error even if the role is not needed or no model is known
    named = ((Setting.KV_DTYPE, problem.kv_dtype, None), (Setting.INDEX_DTYPE, problem.index_dtype, "index"))
    formats = {setting: registry.kv_format(name, setting, holds) for setting, name, holds in named if name is not None}
    if problem.model is None:
        return Selection(problem, {}, problem.page_size, given, failed or {}, request.verify)
    for setting, format in formats.items():
        format.check(problem.model, problem.page_size, setting)
    chooser = _Chooser(registry, request, problem, failed or {}, given, ranking)
    by_name = [Role.PREFILL] if problem.prefilled_by_host and Role.PREFILL in request.roles else []
    choices = {role: chooser.choose(role) for role in (*by_name, *problem.roles())}
    registry.raise_if_check_failed((c.backend, c.refusals) for choice in choices.values() for c in choice.candidates)
    for role, name in request.roles.items():
        if role not in choices and name != AUTO:
            raise UsageError(f"`{role.setting}` {name} is given, but {_why_unneeded(role, problem)}; leave it out")
    if request.attention != AUTO and set(choices) == {Role.LINEAR}:
        raise UsageError(
            f"`{Setting.ATTENTION_BACKEND}` {request.attention} is given, but {_why_unneeded(Role.PREFILL, problem)}; "
            f"leave it out, or give `{Role.LINEAR.setting}`"
        )
    multiple = math.lcm(problem.model.page_multiple, *(format.page_multiple for format in formats.values()))
    chosen = [choice.chosen for choice in choices.values() if choice.chosen is not None]
    page_size = problem.page_size
    if page_size is None and chosen:  # a multiple of ``multiple`` that all chosen backends support
        common = reduce(PageSizes.intersection, (backend.spec.capabilities.page_sizes for backend in chosen))
        page_size = math.lcm(DEFAULT_PAGE_SIZE, multiple)
        if common.kernel_size(page_size) is None:
            assert common.kernel is not None
            page_size = math.lcm(min(common.kernel), multiple)
    for role, choice in choices.items():
        if choice.schedule is not None and page_size is not None:
            able = [b for b in choice.serving if b.spec.capabilities.page_sizes.kernel_size(page_size) is not None]
            choices[role] = _restricted(choice, able, f"pages of {page_size}")
    _raise_if_options_unused(registry, request, choices)
    names = {backend.spec.name for choice in choices.values() for backend in choice.serving}
    options = {name: given.get(name, _parsed(registry, name, {})) for name in sorted(names)}
    return Selection(problem, choices, page_size, options, failed or {}, request.verify)


def select(
    registry: Registry,
    request: BackendRequest,
    problem: Problem,
    failed: Mapping[str, Refusal] | None = None,
    ranking: Ranking = BY_PREFERENCE,
    roles: Collection[Role] = tuple(Role),
) -> Selection:
    """Select the backends to build. Raises :class:`SelectionError`, with every refusal, if a role cannot be served.

    ``roles``: those that the host leaves to attnplug. Example::

        problem = Problem(load_model("tiny:llama"), device="cpu")
        select(load_registry(), BackendRequest(), problem).chosen(Role.DECODE).spec.name
    """
    selection = explain(registry, request, problem, failed, ranking)
    selection = replace(selection, choices={role: each for role, each in selection.choices.items() if role in roles})
    if selection.unserved:
        raise SelectionError(selection)
    return selection


@dataclass(frozen=True, slots=True)
class _Chooser:
    """Inputs that the choice for every role depends on."""

    registry: Registry
    request: BackendRequest
    problem: Problem
    failed: Mapping[str, Refusal]
    options: Mapping[str, Any]
    """Parsed options by backend name."""
    ranking: Ranking

    def choose(self, role: Role) -> RoleChoice:
        requested = self.request.name_for(role)
        asked = None if requested == AUTO else self.registry.get(requested)
        ordered = sorted(
            self.registry.backends.values(), key=lambda backend: (backend is not asked, by_preference(backend))
        )
        candidates = tuple(Candidate(backend, tuple(self._refusals(backend, role))) for backend in ordered)
        usable = [c.backend for c in candidates if not c.refusals and asked in (None, c.backend)]
        chosen, why, schedule = (usable[0] if usable else None), "", None
        if usable and asked is None:
            ranked_as = role if self._paired_role(role) is None else Role.DECODE  # one ranking for both roles
            failing = self.ranking.failures(usable, ranked_as, self.problem)
            if others := [backend for backend in usable if backend.spec.name not in failing]:
                usable, found = others, [(c, failing.get(c.backend.spec.name)) for c in candidates]
                candidates = tuple(c if f is None else replace(c, refusals=(*c.refusals, f)) for c, f in found)
            able = usable
            if self.problem.wants_graphs and self.problem.device != "cpu" and ranked_as in _CAPTURED:
                # A higher level would be a requirement, which all usable ones meet.
                able = self._able(usable, ranked_as, GraphLevel.DECODE) or usable
            ranked = self.ranking.rank(able, ranked_as, self.problem)
            chosen, why = ranked.backends[0], ranked.why
            schedule = None if self.problem.invariant else ranked.schedule
            if schedule is not None:
                chosen = self.registry.get(schedule.candidates[0])
            if len(able) < len(usable):
                slower = ", ".join(backend.spec.name for backend in usable if backend not in able)
                why = f"runs in CUDA graphs, unlike {slower}" + (f"; {why}" if len(able) > 1 else "")
            if chosen.spec.name in failing:
                why += f"; but {failing[chosen.spec.name].message}"
        setting, problem = self.request.setting_for(role), self.problem
        choice = RoleChoice(role, requested, setting, chosen, candidates, why, schedule)
        drafts = problem.speculative_tokens and role is self.request.verify
        if schedule is None or not drafts or not problem.wants_graphs or problem.device == "cpu":
            return choice
        # Drop backends whose verify steps cannot be captured, if the chosen one's can.
        able = self._able(choice.serving, role, GraphLevel.UNIFORM)
        return _restricted(choice, able, "CUDA graphs that verify drafts") if chosen in able else choice

    def _able(self, backends: Sequence[Registered], role: Role, level: GraphLevel) -> list[Registered]:
        captured = replace(self.problem, cuda_graph=level)
        return [b for b in backends if not b.spec.refusals(captured, role, self.options.get(b.spec.name))]

    def _refusals(self, backend: Registered, role: Role) -> Iterator[Refusal]:
        spec = backend.spec
        refusals = spec.refusals(self.problem, role, self.options.get(spec.name))
        for refusal in refusals:
            by_role = refusal.setting == role.setting  # which may have been decided by the setting for all roles
            yield replace(refusal, setting=self.request.setting_for(role)) if by_role else refusal
        if spec.name in self.failed:
            yield self.failed[spec.name]
        other = self._paired_role(role)
        if refusals or other is None:
            return
        requested, levels, why = self.request.name_for(other), sorted_levels(self.problem.invariant), None
        if requested not in (AUTO, spec.name):
            why = f"{requested} is requested for {other}"
        elif requested == AUTO and spec.refusals(self.problem, other, self.options.get(spec.name)):
            why = f"this backend cannot serve {other}"
        if why is not None:
            message = f"invariance {', '.join(levels)} requires one backend for prefill and decode; {why}"
            yield Refusal(RefusalCode.INVARIANCE, message, levels, setting=self.request.setting_for(other))

    def _paired_role(self, role: Role) -> Role | None:
        """Return the role that must have the same backend, because rows have the same bits prefilled and decoded."""
        levels, pair = self.problem.invariant, (Role.PREFILL, Role.DECODE)
        one_backend = "chunks" in levels or ("verify" in levels and self.request.verify is Role.PREFILL)
        if not one_backend or role not in pair or not set(pair) <= set(self.problem.roles()):
            return None
        return pair[role is Role.PREFILL]


def _why_unneeded(role: Role, problem: Problem) -> str:
    if role is Role.DECODE and problem.is_embedding:
        return "an embedding decodes nothing"
    reasons = {
        Role.LINEAR: "the model has no linear-attention layer",
        Role.DRAFT: f"speculation is off (`{Setting.SPECULATIVE_TOKENS}` turns it on)",
    }
    return reasons.get(role, "the model has no full-attention layer")


def _restricted(choice: RoleChoice, able: list[Registered], need: str) -> RoleChoice:
    """Keep only the backends of the schedule that are ``able`` to serve ``need``."""
    assert choice.schedule is not None
    others = " and ".join(backend.spec.name for backend in choice.serving if backend not in able)
    if not others:
        return choice
    schedule = choice.schedule.only(backend.spec.name for backend in able)
    return replace(choice, rank=f"{choice.rank}; without {others}, for {need}", schedule=schedule)


def _parsed(registry: Registry, name: str, settings: Mapping[str, str]) -> Any:
    return parse_options(name, registry.get(name).spec.options, settings)


def _raise_if_options_unused(registry: Registry, request: BackendRequest, choices: Mapping[Role, RoleChoice]) -> None:
    """Raise UsageError for options of a backend that is neither chosen nor requested: they would be ignored."""
    chosen = {backend.spec.name for choice in choices.values() for backend in choice.serving}
    requested = {request.name_for(role) for role in choices}
    for name, settings in request.options.items():
        if not settings or name in chosen | requested:
            continue
        backend, given = registry.get(name), f"{name}.{next(iter(settings))}"
        own = (c for choice in choices.values() for c in choice.candidates if c.backend is backend)
        made_for = next((candidate for candidate in own if not candidate.is_unrelated), None)  # the first such role
        if made_for is not None and (refusals := made_for.refusals):
            remedy = ": " + "; ".join(refusal.message for refusal in refusals)
            also = [refusal.setting for refusal in refusals if refusal.setting is not None]
        else:
            roles = backend.spec.capabilities.roles  # the setting for all of them, or for the first one
            both = {Role.PREFILL, Role.DECODE} <= roles
            also = [Setting.ATTENTION_BACKEND if both else min(roles, key=list(Role).index).setting]
            remedy = f"; request it with `{also[0]}` {name}"
        raise UsageError(
            f"`{given}` is given, but {name} is not chosen for any role (chosen: {', '.join(sorted(chosen)) or 'none'})"
            f"{remedy}",
            settings=[given, *also],
        )
