"""Command-line options → one backend per role, or every reason why not (D3).

Nothing is built here and nothing heavy imported: a choice is judged from specs and a problem, both plain data, so it
works for hardware that is not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from attnplug.choose.loading import Registered
from attnplug.choose.registry import Registry
from attnplug.declare.claims import PageSizes
from attnplug.declare.errors import AttnplugError, UsageError
from attnplug.declare.options import parse_options
from attnplug.declare.problem import Problem, Role
from attnplug.declare.refusal import Refusal, RefusalCode

AUTO = "auto"
DEFAULT_PAGE_SIZE = 64


@dataclass(frozen=True, slots=True)
class BackendRequest:
    """What a user asked for: a backend for full attention, exceptions by role, and options by backend name."""

    attention: str = AUTO
    roles: Mapping[Role, str] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def name_for(self, role: Role) -> str:
        """The name asked for in a role. ``--attention-backend`` speaks of full attention, not of linear layers."""
        return self.roles.get(role, AUTO if role is Role.LINEAR else self.attention)

    def option_for(self, role: Role) -> str:
        """The option that decides the role."""
        return role.option if role in self.roles or role is Role.LINEAR else "--attention-backend"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend as seen from one role: every reason against it, or none."""

    backend: Registered
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True, slots=True)
class RoleChoice:
    """The outcome for one role. ``candidates`` holds all installed backends, the one asked for first."""

    role: Role
    requested: str
    option: str
    chosen: Registered | None
    candidates: tuple[Candidate, ...]

    @property
    def chosen_name(self) -> str | None:
        return None if self.chosen is None else self.chosen.spec.name

    @property
    def why(self) -> str:
        """One line: why this one."""
        if self.chosen is None:
            return "nothing can serve"
        if self.requested != AUTO:
            return f"asked for by {self.option}"
        usable = [candidate.backend for candidate in self.candidates if not candidate.refusals]
        refused = len(self.candidates) - len(usable)
        return f"auto: {_rank(self.chosen, usable)}" + (f"; {refused} refused" if refused else "")


def _rank(chosen: Registered, usable: Sequence[Registered]) -> str:
    """Why ``auto`` takes this one of the usable ones: what :func:`_order` decided, in words."""
    preference = chosen.spec.preference
    others = [backend for backend in usable if backend is not chosen]
    equal = [b for b in others if b.spec.preference == preference and b.source.embedded == chosen.source.embedded]
    passed_over = [b for b in others if b not in equal and b.spec.preference >= preference]  # embedded, by the order
    default = f"the embedded default {_names(passed_over)}"
    beside = f" beside {default}, which comes last" if passed_over else ""
    if not others:
        return "the only usable one"
    if equal:
        last = f"; {default} comes last" if passed_over else ""
        return f"preference {preference}, equal with {_names(equal)}, first by name{last}"
    if passed_over == others:
        return f"the only usable one{beside}"
    if passed_over:
        return f"preference {preference}, the highest of {len(usable) - len(passed_over)} usable{beside}"
    return f"preference {preference}, the highest of {len(usable)} usable, before {_names(others)}"


def _names(backends: Iterable[Registered]) -> str:
    return ", ".join(backend.spec.name for backend in backends)


@dataclass(frozen=True, slots=True)
class Selection:
    """One backend per role that the problem needs, or the reasons against each."""

    problem: Problem
    choices: Mapping[Role, RoleChoice]
    page_size: int | None
    options: Mapping[str, Any]
    failed: Mapping[str, Refusal] = field(default_factory=dict)
    """Backends that were left out because they could not be built, by name, with the reason."""

    @property
    def unserved(self) -> tuple[RoleChoice, ...]:
        return tuple(choice for choice in self.choices.values() if choice.chosen is None)

    def chosen(self, role: Role) -> Registered:
        found = self.choices[role].chosen
        assert found is not None, f"role {role} is not served; select() raises then"
        return found


class SelectionError(AttnplugError):
    """Some role cannot be served. ``selection`` holds every candidate with every reason."""

    def __init__(self, selection: Selection) -> None:
        super().__init__("\n".join(_refusal(selection)))
        self.selection = selection


def explain(
    registry: Registry, request: BackendRequest, problem: Problem, failed: Mapping[str, Refusal] | None = None
) -> Selection:
    """Judge every role. Only a request that cannot be understood is an error here; a refusal is an answer.

    ``failed`` are backends that could not be built although nothing spoke against them, by name, with the reason.
    """
    choices = {role: _choose(registry, request, role, problem, failed or {}) for role in problem.roles()}
    registry.insist_on_checks((c.backend, c.refusals) for choice in choices.values() for c in choice.candidates)
    for role, name in request.roles.items():
        if role not in choices and name != AUTO:
            registry.get(name)  # a wrong name is an error even where the role is not needed
            raise UsageError(f"{role.option} {name} is given, but {_unneeded(role, problem)}; leave it out")
    if request.attention != AUTO and choices and not {Role.PREFILL, Role.DECODE} & set(choices):
        registry.get(request.attention)
        raise UsageError(
            f"--attention-backend {request.attention} is given, but {_unneeded(Role.PREFILL, problem)}; leave it "
            f"out, or give {Role.LINEAR.option}"
        )
    chosen = [choice.chosen for choice in choices.values() if choice.chosen is not None]
    options = _options(registry, request, choices)
    return Selection(problem, choices, _page_size(problem, chosen), options, failed or {})


def select(
    registry: Registry, request: BackendRequest, problem: Problem, failed: Mapping[str, Refusal] | None = None
) -> Selection:
    """The backends to build, checked before anything is built; raises :class:`SelectionError` with every reason."""
    selection = explain(registry, request, problem, failed)
    if selection.unserved:
        raise SelectionError(selection)
    return selection


def _choose(
    registry: Registry, request: BackendRequest, role: Role, problem: Problem, failed: Mapping[str, Refusal]
) -> RoleChoice:
    requested = request.name_for(role)
    asked = None if requested == AUTO else registry.get(requested)
    candidates = []
    for backend in sorted(registry.backends.values(), key=lambda backend: (backend is not asked, _order(backend))):
        reasons = [_deciding(request, role, refusal) for refusal in backend.spec.refusals(problem, role)]
        if backend.spec.name in failed:
            reasons.append(failed[backend.spec.name])
        candidates.append(Candidate(backend, tuple(reasons)))
    usable = [c.backend for c in candidates if not c.refusals and asked in (None, c.backend)]
    return RoleChoice(role, requested, request.option_for(role), usable[0] if usable else None, tuple(candidates))


def _order(backend: Registered) -> tuple[bool, int, str]:
    """The order in which ``auto`` takes usable backends, as ``BackendSpec.preference`` promises it."""
    return backend.source.embedded, -backend.spec.preference, backend.spec.name


def _deciding(request: BackendRequest, role: Role, refusal: Refusal) -> Refusal:
    """The refusal, naming the option that decided the role: most often not the one for this role alone."""
    return replace(refusal, option=request.option_for(role)) if refusal.option == role.option else refusal


def _unneeded(role: Role, problem: Problem) -> str:
    if role is Role.DECODE and problem.is_embedding:
        return "an embedding decodes nothing"
    if role is Role.LINEAR:
        return "the model has no linear-attention layer"
    if role is Role.DRAFT:
        return "speculation is off (--speculative-tokens turns it on)"
    return "the model has no full-attention layer"


def _page_size(problem: Problem, chosen: list[Registered]) -> int | None:
    """The page size asked for, or one that all chosen backends can read."""
    if problem.page_size is not None or not chosen:
        return problem.page_size
    common = reduce(PageSizes.intersection, (backend.spec.capabilities.page_sizes for backend in chosen))
    if common.kernel_size(DEFAULT_PAGE_SIZE) is not None:
        return DEFAULT_PAGE_SIZE
    assert common.kernel is not None
    return min(common.kernel)


def _options(registry: Registry, request: BackendRequest, choices: Mapping[Role, RoleChoice]) -> dict[str, Any]:
    """Parsed options of every chosen backend. Options for one that is not chosen would be ignored: an error."""
    chosen = {choice.chosen.spec.name for choice in choices.values() if choice.chosen is not None}
    asked = {request.name_for(role) for role in choices}
    for name, settings in request.options.items():
        backend = registry.get(name)
        parse_options(name, backend.spec.options, settings)
        if settings and name not in chosen | asked:
            given = next(iter(settings))
            raise UsageError(
                f"--backend-option {name}.{given} is given, but {name} is not chosen for any role "
                f"(chosen: {', '.join(sorted(chosen)) or 'none'}); ask for it with {_option_of(backend)} {name}"
            )
    return {
        name: parse_options(name, registry.backends[name].spec.options, request.options.get(name, {}))
        for name in sorted(chosen)
    }


def _option_of(backend: Registered) -> str:
    """The option that gives a backend all of its roles, or the first of them."""
    roles = backend.spec.capabilities.roles
    return "--attention-backend" if {Role.PREFILL, Role.DECODE} <= roles else min(roles, key=list(Role).index).option


def _refusal(selection: Selection) -> Iterator[str]:
    """Why roles are not served. Of a backend that was asked for, its own reasons; of ``auto``, every candidate's."""
    asked: dict[str, list[RoleChoice]] = {}
    for choice in selection.unserved:
        if choice.requested != AUTO:
            asked.setdefault(choice.requested, []).append(choice)
    for choices in asked.values():
        yield from _refused_by_name(choices)
        yield ""
    yield from _inputs(selection)
    for choice in selection.unserved:
        if choice.requested == AUTO:
            yield ""
            yield from _judged(choice)


def _refused_by_name(choices: Sequence[RoleChoice]) -> Iterator[str]:
    """One backend that was asked for in these roles: its reasons, then in one line what could serve instead."""
    asked = choices[0].candidates[0].backend
    roles = " and ".join(choice.role for choice in choices)
    options = " and ".join(dict.fromkeys(choice.option for choice in choices))
    yield f"{asked.spec.name} ({asked.source}) was asked for by {options} and cannot serve {roles}:"
    found: dict[str, list[RoleChoice]] = {}
    for choice in choices:
        for refusal in choice.candidates[0].refusals:
            found.setdefault(str(refusal), []).append(choice)
    for reason, concerned in found.items():
        yield f"  - {reason}" if len(concerned) == len(choices) else f"  - for {concerned[0].role}: {reason}"
    usable = [{c.backend.spec.name: None for c in choice.candidates if not c.refusals} for choice in choices]
    names = ", ".join(name for name in usable[0] if all(name in others for others in usable))
    yield f"usable instead: {names or 'none'}; 'attnplug explain' gives every reason against every other backend"


def render(selection: Selection) -> Iterator[str]:
    """An explanation: the inputs, then every role with every candidate and every reason."""
    yield from _inputs(selection)
    for choice in selection.choices.values():
        yield ""
        yield from _judged(choice)


def _judged(choice: RoleChoice) -> Iterator[str]:
    """One role: what it gets, and every candidate. Where ``auto`` found one, backends that are made for something else
    are only named."""
    if choice.chosen_name is not None:
        yield f"{choice.role}: {choice.chosen_name} ({choice.why})"
    elif choice.requested != AUTO:
        yield f"{choice.role}: {choice.requested} was asked for and cannot serve"
    elif choice.candidates:
        yield f"{choice.role}: no installed backend can serve"
    else:
        yield f"{choice.role}: no backend is installed"
    if choice.chosen is None and choice.role is Role.LINEAR and not _for_linear(choice):
        yield "  none is made for linear attention; attnplug-hybrid-linear brings some that are: pip install it"
    elsewhere: list[Candidate] = []
    if choice.requested == AUTO and choice.chosen is not None:
        elsewhere = list(filter(_for_something_else, choice.candidates))
    for candidate in choice.candidates:
        if candidate in elsewhere:
            continue
        spec = candidate.backend.spec
        if not candidate.refusals:
            yield f"  {spec.name} ({candidate.backend.source}): usable"
            continue
        yield f"  {spec.name} ({candidate.backend.source}): refused"
        for refusal in candidate.refusals:
            yield f"    - {refusal}"
    if elsewhere:
        names = ", ".join(candidate.backend.spec.name for candidate in elsewhere)
        yield f"  for another role or kind of attention: {names} (--json has their reasons)"


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
    yield f"dtype      {problem.dtype or 'any'}, KV cache {problem.kv_dtype or 'any'}"
    page_size = problem.page_size if problem.page_size is not None else f"{selection.page_size} (chosen)"
    yield f"page size  {page_size if selection.page_size is not None else 'any'}"
    extras = []
    if problem.speculative_tokens:
        extras.append(f"{problem.speculative_tokens} speculative tokens")
    if problem.tensor_parallel > 1:
        extras.append(f"{problem.tensor_parallel} tensor-parallel ranks")
    if problem.is_embedding:
        extras.append("embedding: no decode")
    if problem.cuda_graph:
        extras.append(f"CUDA graphs: {problem.cuda_graph.name}")
    if extras:
        yield f"also       {', '.join(extras)}"
