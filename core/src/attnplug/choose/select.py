"""Settings → one backend per role, or every reason why not (D3).

Nothing is built here and nothing heavy is imported. A choice is judged from specs and a problem, both plain data, so it
works for hardware that is not there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from attnplug.choose.loading import Registered
from attnplug.choose.ranking import PreferenceRanking, Ranking, by_preference
from attnplug.choose.registry import Registry
from attnplug.declare.claims import PageSizes
from attnplug.declare.errors import AttnplugError, UsageError
from attnplug.declare.options import parse_options
from attnplug.declare.problem import GraphLevel, Problem, Role
from attnplug.declare.refusal import Refusal, RefusalCode
from attnplug.declare.schedule import Schedule
from attnplug.declare.settings import Render, Setting

AUTO = "auto"
_CAPTURED = (Role.DECODE, Role.LINEAR, Role.DRAFT)
"""The roles that take part in a captured decode."""
_SHOWN_BATCHES = {Role.PREFILL: ((1, 512), (1, 4096)), Role.DECODE: ((1, 1), (8, 1), (64, 1))}
"""For which (requests, tokens) an explanation of a schedule says who is the fastest."""
DEFAULT_PAGE_SIZE = 64
BY_PREFERENCE = PreferenceRanking()


@dataclass(frozen=True, slots=True)
class BackendRequest:
    """What a user asked for: a backend for full attention, exceptions by role, and options by backend name."""

    attention: str = AUTO
    roles: Mapping[Role, str] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    verify: Role = Role.DECODE
    """Whose backend checks the tokens that a draft proposed, where prefill and decode have different ones. It is an
    extend of a few tokens, which decode kernels are made for."""

    def __post_init__(self) -> None:
        if self.verify not in (Role.PREFILL, Role.DECODE):
            raise UsageError(
                f"`{Setting.SPECULATIVE_ATTENTION_MODE}` {self.verify} does not verify; use {Role.PREFILL} or "
                f"{Role.DECODE}",
                settings=[Setting.SPECULATIVE_ATTENTION_MODE],
            )

    def name_for(self, role: Role) -> str:
        """The name asked for in a role. ``attention`` is for full attention, not for linear layers."""
        return self.roles.get(role, AUTO if role is Role.LINEAR else self.attention)

    def setting_for(self, role: Role) -> Setting:
        """The setting that decides the role."""
        return role.setting if role in self.roles or role is Role.LINEAR else Setting.ATTENTION_BACKEND


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend as a candidate for one role, with every reason against it."""

    backend: Registered
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True, slots=True)
class RoleChoice:
    """The outcome for one role. ``candidates`` holds all installed backends, the one asked for first.

    ``setting`` decided the role; ``rank`` says why ``auto`` took this one among the usable ones. ``schedule`` is there
    if several backends share the role by batch, each where it is the fastest; the chosen one is its first.
    """

    role: Role
    requested: str
    setting: Setting
    chosen: Registered | None
    candidates: tuple[Candidate, ...]
    rank: str = ""
    schedule: Schedule | None = None

    @property
    def serving(self) -> tuple[Registered, ...]:
        """The backends to build for the role: the chosen one, or all of its schedule, the chosen one first."""
        if self.schedule is None:
            return () if self.chosen is None else (self.chosen,)
        by_name = {candidate.backend.spec.name: candidate.backend for candidate in self.candidates}
        return tuple(by_name[name] for name in self.schedule.candidates)

    @property
    def chosen_name(self) -> str | None:
        return None if self.chosen is None else self.chosen.spec.name

    def why(self, render: Render = str) -> str:
        """Why this one, in one line."""
        if self.chosen is None:
            return "nothing can serve"
        if self.requested != AUTO:
            return f"asked for by {render(self.setting) or self.setting}"
        refused = sum(bool(candidate.refusals) for candidate in self.candidates)
        return f"auto: {self.rank}" + (f"; {refused} refused" if refused else "")


@dataclass(frozen=True, slots=True)
class Selection:
    """One backend per role that the problem needs, or the reasons against each."""

    problem: Problem
    choices: Mapping[Role, RoleChoice]
    page_size: int | None
    options: Mapping[str, Any]
    failed: Mapping[str, Refusal] = field(default_factory=dict)
    """Backends that were left out because they could not be built, by name, with the reason."""
    verify: Role = Role.DECODE
    """Whose backend verifies."""

    @property
    def unserved(self) -> tuple[RoleChoice, ...]:
        return tuple(choice for choice in self.choices.values() if choice.chosen is None)

    def chosen(self, role: Role) -> Registered:
        found = self.choices[role].chosen
        assert found is not None, f"role {role} is not served; select() raises then"
        return found

    def serving(self, role: Role) -> tuple[Registered, ...]:
        """The backends that share a role, the chosen one first; more than one only if the role has a schedule."""
        return self.choices[role].serving

    def schedule(self, role: Role) -> Schedule | None:
        """Which of the backends that share a role is the fastest for which batch; ``None`` if there is only one."""
        return self.choices[role].schedule


class SelectionError(AttnplugError):
    """Some role cannot be served. ``selection`` holds every candidate with every reason."""

    def __init__(self, selection: Selection) -> None:
        super().__init__("\n".join(_refusal(selection, str)))
        self.selection = selection

    def told(self, render: Render) -> str:
        return "\n".join(_refusal(self.selection, render))


def explain(
    registry: Registry,
    request: BackendRequest,
    problem: Problem,
    failed: Mapping[str, Refusal] | None = None,
    ranking: Ranking = BY_PREFERENCE,
) -> Selection:
    """Judge every role. Only a request that cannot be understood is an error here; a refusal is an answer.

    ``failed`` are backends that could not be built although nothing spoke against them: reasons by name.
    """
    given = {name: _parsed(registry, name, settings) for name, settings in request.options.items()}
    for name in (request.attention, *request.roles.values()):
        if name != AUTO:
            registry.get(name)  # a wrong name is an error even where the role is not needed, or no model is known yet
    if problem.model is None:
        return Selection(problem, {}, problem.page_size, given, failed or {}, request.verify)
    judge = _Judge(registry, request, problem, failed or {}, given, ranking)
    by_name = [Role.PREFILL] if problem.prefilled_by_host and Role.PREFILL in request.roles else []
    choices = {role: judge.choose(role) for role in (*by_name, *problem.roles())}
    registry.insist_on_checks((c.backend, c.refusals) for choice in choices.values() for c in choice.candidates)
    for role, name in request.roles.items():
        if role not in choices and name != AUTO:
            message = f"`{role.setting}` {name} is given, but {_unneeded(role, problem)}; leave it out"
            also = [Setting.SPECULATIVE_TOKENS] if role is Role.DRAFT else []
            raise UsageError(message, settings=[role.setting, *also])
    if request.attention != AUTO and set(choices) == {Role.LINEAR}:
        raise UsageError(
            f"`{Setting.ATTENTION_BACKEND}` {request.attention} is given, but {_unneeded(Role.PREFILL, problem)}; "
            f"leave it out, or give `{Role.LINEAR.setting}`",
            settings=[Setting.ATTENTION_BACKEND, Role.LINEAR.setting],
        )
    page_size = _page_size(problem, [choice.chosen for choice in choices.values() if choice.chosen is not None])
    choices = {role: _sharing_pages(choice, page_size) for role, choice in choices.items()}
    _insist_on_options(registry, request, choices)
    names = {backend.spec.name for choice in choices.values() for backend in choice.serving}
    options = {name: given.get(name, _parsed(registry, name, {})) for name in sorted(names)}
    return Selection(problem, choices, page_size, options, failed or {}, request.verify)


def select(
    registry: Registry,
    request: BackendRequest,
    problem: Problem,
    failed: Mapping[str, Refusal] | None = None,
    ranking: Ranking = BY_PREFERENCE,
) -> Selection:
    """The backends to build, judged before anything is built. Raises :class:`SelectionError` with every reason."""
    selection = explain(registry, request, problem, failed, ranking)
    if selection.unserved:
        raise SelectionError(selection)
    return selection


@dataclass(frozen=True, slots=True)
class _Judge:
    """What the choice for every role depends on."""

    registry: Registry
    request: BackendRequest
    problem: Problem
    failed: Mapping[str, Refusal]
    options: Mapping[str, Any]
    """Parsed options, by backend, for the backends that were given any."""
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
            able = self._captured(usable, role) or usable
            ranked = self.ranking.rank(able, role, self.problem)
            chosen, why, schedule = ranked.backends[0], ranked.why, ranked.schedule
            if schedule is not None:
                chosen = self.registry.get(schedule.candidates[0])
            if len(able) < len(usable):
                others = ", ".join(backend.spec.name for backend in usable if backend not in able)
                why = f"runs in CUDA graphs, unlike {others}" + (f"; {why}" if len(able) > 1 else "")
        return RoleChoice(role, requested, self.request.setting_for(role), chosen, candidates, why, schedule)

    def _captured(self, usable: list[Registered], role: Role) -> list[Registered]:
        """Those of some usable backends that can be captured, where the host wants that."""
        problem = self.problem
        if not problem.wants_graphs or problem.device != "cuda" or role not in _CAPTURED:
            return usable
        captured = replace(problem, cuda_graph=GraphLevel.DECODE)  # more is demanded of all that are usable
        return [b for b in usable if not b.spec.refusals(captured, role, self.options.get(b.spec.name))]

    def _refusals(self, backend: Registered, role: Role) -> Iterator[Refusal]:
        spec = backend.spec
        for refusal in spec.refusals(self.problem, role, self.options.get(spec.name)):
            yield _deciding(self.request, role, refusal)
        if spec.name in self.failed:
            yield self.failed[spec.name]


def _deciding(request: BackendRequest, role: Role, refusal: Refusal) -> Refusal:
    """The refusal, naming the setting that decided the role, which is often not the one for this role alone."""
    return replace(refusal, setting=request.setting_for(role)) if refusal.setting == role.setting else refusal


def _unneeded(role: Role, problem: Problem) -> str:
    if role is Role.DECODE and problem.is_embedding:
        return "an embedding decodes nothing"
    if role is Role.LINEAR:
        return "the model has no linear-attention layer"
    if role is Role.DRAFT:
        return f"speculation is off (`{Setting.SPECULATIVE_TOKENS}` turns it on)"
    return "the model has no full-attention layer"


def _page_size(problem: Problem, chosen: list[Registered]) -> int | None:
    """The page size asked for, or one that all chosen backends can read."""
    if problem.page_size is not None or not chosen:
        return problem.page_size
    common = reduce(PageSizes.intersection, (backend.spec.capabilities.page_sizes for backend in chosen))
    multiple = 1 if problem.model is None else problem.model.page_multiple
    if common.kernel_size(default := math.lcm(DEFAULT_PAGE_SIZE, multiple)) is not None:
        return default
    assert common.kernel is not None
    return math.lcm(min(common.kernel), multiple)


def _sharing_pages(choice: RoleChoice, page_size: int | None) -> RoleChoice:
    """The choice without those of its schedule that cannot read the pages which the chosen backends have in common."""
    if choice.schedule is None or page_size is None:
        return choice
    able = [b for b in choice.serving if b.spec.capabilities.page_sizes.kernel_size(page_size) is not None]
    if len(able) == len(choice.serving):
        return choice
    others = " and ".join(backend.spec.name for backend in choice.serving if backend not in able)
    rank = f"{choice.rank}; without {others}, for pages of {page_size}"
    return replace(choice, rank=rank, schedule=choice.schedule.only(backend.spec.name for backend in able))


def _parsed(registry: Registry, name: str, settings: Mapping[str, str]) -> Any:
    return parse_options(name, registry.get(name).spec.options, settings)


def _insist_on_options(registry: Registry, request: BackendRequest, choices: Mapping[Role, RoleChoice]) -> None:
    """Options for a backend that is neither chosen nor asked for would be ignored: an error."""
    chosen = {backend.spec.name for choice in choices.values() for backend in choice.serving}
    asked = {request.name_for(role) for role in choices}
    for name, settings in request.options.items():
        if not settings or name in chosen | asked:
            continue
        backend, given = registry.get(name), f"{name}.{next(iter(settings))}"
        if refusals := _own_refusals(backend, choices):
            remedy = ": " + "; ".join(refusal.message for refusal in refusals)
            also = [refusal.setting for refusal in refusals if refusal.setting is not None]
        else:
            also = [_setting_of(backend)]
            remedy = f"; ask for it with `{also[0]}` {name}"
        raise UsageError(
            f"`{given}` is given, but {name} is not chosen for any role (chosen: {', '.join(sorted(chosen)) or 'none'})"
            f"{remedy}",
            settings=[given, *also],
        )


def _own_refusals(backend: Registered, choices: Mapping[Role, RoleChoice]) -> list[Refusal]:
    """Why a backend was not chosen for the first of the roles it is made for; empty if it could have been."""
    for choice in choices.values():
        (candidate,) = (c for c in choice.candidates if c.backend is backend)
        if not _for_something_else(candidate):
            return list(candidate.refusals)
    return []


def _setting_of(backend: Registered) -> Setting:
    """The setting that gives a backend all of its roles, or the first of them."""
    roles = backend.spec.capabilities.roles
    both = {Role.PREFILL, Role.DECODE} <= roles
    return Setting.ATTENTION_BACKEND if both else min(roles, key=list(Role).index).setting


def _refusal(selection: Selection, render: Render) -> Iterator[str]:
    """Why roles are not served: the own reasons of a backend that was asked for, or under ``auto`` every
    candidate's."""
    asked: dict[str, list[RoleChoice]] = {}
    for choice in selection.unserved:
        if choice.requested != AUTO:
            asked.setdefault(choice.requested, []).append(choice)
    for choices in asked.values():
        yield from _refused_by_name(choices, render)
        yield ""
    yield from _inputs(selection)
    for choice in selection.unserved:
        if choice.requested == AUTO:
            yield ""
            yield from _judged(choice, render)


def _refused_by_name(choices: Sequence[RoleChoice], render: Render) -> Iterator[str]:
    """For a backend that was asked for in these roles: its reasons, then in one line what could serve instead."""
    asked = choices[0].candidates[0].backend
    roles = " and ".join(choice.role for choice in choices)
    by = " and ".join(dict.fromkeys(render(choice.setting) or choice.setting for choice in choices))
    yield f"{asked.spec.name} ({asked.source}) was asked for by {by} and cannot serve {roles}:"
    found: dict[str, list[RoleChoice]] = {}
    for choice in choices:
        for refusal in choice.candidates[0].refusals:
            found.setdefault(refusal.told(render), []).append(choice)
    for reason, concerned in found.items():
        yield f"  - {reason}" if len(concerned) == len(choices) else f"  - for {concerned[0].role}: {reason}"
    usable = [{c.backend.spec.name: None for c in choice.candidates if not c.refusals} for choice in choices]
    names = ", ".join(name for name in usable[0] if all(name in others for others in usable))
    yield f"usable instead: {names or 'none'}; 'attnplug explain' gives every reason against every other backend"


def explanation(selection: Selection, render: Render = str) -> Iterator[str]:
    """Lines: the inputs, then every role with every candidate and every reason."""
    yield from _inputs(selection)
    for choice in selection.choices.values():
        yield ""
        yield from _judged(choice, render)
    if selection.problem.wants_graphs and not selection.unserved:
        yield ""
        yield f"CUDA graphs: {captured(selection)}"


def captured(selection: Selection) -> str:
    """What a host can capture with the chosen backends, by their declarations; which allow no more, and why."""
    levels: dict[str, tuple[GraphLevel, str]] = {}
    for role in selection.choices:
        name, limit = selection.chosen(role).spec.name, _captured(selection, role)
        levels[name] = min(limit, levels.get(name, limit))
    lowest, highest = min(levels.values())[0], max(levels.values())[0]
    if lowest is highest and lowest is not GraphLevel.NEVER:
        return lowest.name
    reasons: dict[str, list[str]] = {}
    for name, (level, why) in levels.items():
        if level is lowest:
            reasons.setdefault(why, []).append(name)
    limiting = "; ".join(f"by {' and '.join(names)} ({why})" for why, names in reasons.items())
    return f"{lowest.name}, {limiting}"


def _captured(selection: Selection, role: Role) -> tuple[GraphLevel, str]:
    """The most that a role's backend allows, and why not more; no reason where it allows all."""
    spec, allowed = selection.chosen(role).spec, GraphLevel.NEVER
    for level in list(GraphLevel)[1:]:
        problem = replace(selection.problem, cuda_graph=level)
        if refusals := spec.refusals(problem, role, selection.options.get(spec.name)):
            if problem.captured([role]) <= spec.capabilities.cuda_graph:
                return allowed, refusals[0].message
            return allowed, "no more is declared" if allowed else "none are declared"
        allowed = level
    return allowed, ""


def _judged(choice: RoleChoice, render: Render) -> Iterator[str]:
    """One role: what it gets, and every candidate. If ``auto`` found one, backends that are made for something else are
    only named."""
    if choice.chosen_name is not None:
        yield f"{choice.role}: {' or '.join(b.spec.name for b in choice.serving)} ({choice.why(render)})"
    elif choice.requested != AUTO:
        yield f"{choice.role}: {choice.requested} was asked for and cannot serve"
    elif choice.candidates:
        yield f"{choice.role}: no installed backend can serve"
    else:
        yield f"{choice.role}: no backend is installed"
    if choice.schedule is not None:
        for requests, tokens in _SHOWN_BATCHES[choice.role]:
            size = f"{requests} × {tokens} new tokens" if tokens > 1 else f"{requests} request{'s' * (requests > 1)}"
            yield f"  {size}: {choice.schedule.told(requests, tokens)}"
    if choice.chosen is None and choice.role is Role.LINEAR and not _for_linear(choice):
        yield "  none is made for linear attention; 'attnplug plugins' lists packages that bring some"
    elsewhere = passed_over(choice)
    for candidate in choice.candidates:
        if candidate in elsewhere:
            continue
        spec = candidate.backend.spec
        if not candidate.refusals:
            yield f"  {spec.name} ({candidate.backend.source}): usable"
            continue
        yield f"  {spec.name} ({candidate.backend.source}): refused"
        for refusal in candidate.refusals:
            yield f"    - {refusal.told(render)}"
    if elsewhere:
        names = ", ".join(candidate.backend.spec.name for candidate in elsewhere)
        yield f"  for another role or kind of attention: {names}"


def passed_over(choice: RoleChoice) -> list[Candidate]:
    """Candidates that an explanation only names: if ``auto`` found one, those made for something else."""
    if choice.requested != AUTO or choice.chosen is None:
        return []
    return list(filter(_for_something_else, choice.candidates))


def _for_something_else(candidate: Candidate) -> bool:
    return any(refusal.code in (RefusalCode.ROLE, RefusalCode.KIND) for refusal in candidate.refusals)


def _for_linear(choice: RoleChoice) -> bool:
    return any(Role.LINEAR in candidate.backend.spec.capabilities.roles for candidate in choice.candidates)


def _inputs(selection: Selection) -> Iterator[str]:
    problem = selection.problem
    if problem.model is not None:
        yield f"model      {problem.model.describe()}"
    device = problem.device or "any"
    if problem.device == "cuda" and problem.sm is not None:
        device += f", SM {problem.sm}"
    yield f"device     {device}"
    index = "" if problem.index_dtype is None else f", index keys {problem.index_dtype}"
    yield f"dtype      {problem.dtype or 'any'}, KV cache {problem.kv_dtype or 'any'}{index}"
    page_size = problem.page_size if problem.page_size is not None else f"{selection.page_size} (chosen)"
    yield f"page size  {page_size if selection.page_size is not None else 'any'}"
    extras = []
    if problem.speculative_tokens:
        extras.append(f"{problem.speculative_tokens} speculative tokens")
    if problem.speculative_topk > 1:
        extras.append(f"trees of drafts with {problem.speculative_topk} branches")
    if problem.tensor_parallel > 1:
        extras.append(f"{problem.tensor_parallel} tensor-parallel ranks")
    if problem.is_embedding:
        extras.append("embedding: no decode")
    if problem.layout is not None:
        extras.append(f"cache layout: {problem.layout}")
    if not problem.exact_lengths:
        extras.append("upper bounds of lengths only")
    if problem.cuda_graph:
        extras.append(f"CUDA graphs: {problem.cuda_graph.name}")
    if extras:
        yield f"also       {', '.join(extras)}"
