"""Command-line options → one backend per role, or every reason why not (D3).

Nothing is built here and nothing heavy imported: a choice is judged from specs and a problem, both plain data, so it
works for hardware that is not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from attnplug.claims import PageSizes
from attnplug.errors import AttnplugError, UsageError
from attnplug.loading import Registered
from attnplug.options import parse_options
from attnplug.problem import Problem, Role
from attnplug.refusal import Refusal, RefusalCode
from attnplug.registry import Registry

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
        usable = [candidate.backend.spec for candidate in self.candidates if not candidate.refusals]
        refused = len(self.candidates) - len(usable)
        others = ", ".join(spec.name for spec in usable if spec.name != self.chosen.spec.name)
        return (
            f"auto: highest preference ({self.chosen.spec.preference}) of {len(usable)} usable"
            + (f", before {others}" if others else "")
            + (f"; {refused} refused" if refused else "")
        )


@dataclass(frozen=True, slots=True)
class Selection:
    """One backend per role that the problem needs, or the reasons against each."""

    problem: Problem
    choices: Mapping[Role, RoleChoice]
    page_size: int | None
    options: Mapping[str, Any]

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
        super().__init__("\n".join(render(selection, only_unserved=True)))
        self.selection = selection


def explain(registry: Registry, request: BackendRequest, problem: Problem) -> Selection:
    """Judge every role. Only a request that cannot be understood is an error here; a refusal is an answer."""
    choices = {role: _choose(registry, request, role, problem) for role in problem.roles()}
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
    return Selection(problem, choices, _page_size(problem, chosen), _options(registry, request, choices))


def select(registry: Registry, request: BackendRequest, problem: Problem) -> Selection:
    """The backends to build, checked before anything is built; raises :class:`SelectionError` with every reason."""
    selection = explain(registry, request, problem)
    if selection.unserved:
        raise SelectionError(selection)
    return selection


def _choose(registry: Registry, request: BackendRequest, role: Role, problem: Problem) -> RoleChoice:
    requested = request.name_for(role)
    asked = None if requested == AUTO else registry.get(requested)
    candidates = [
        Candidate(backend, tuple(backend.spec.refusals(problem, role)))
        for backend in sorted(
            registry.backends.values(), key=lambda b: (b is not asked, -b.spec.preference, b.spec.name)
        )
    ]
    usable = [c.backend for c in candidates if not c.refusals and asked in (None, c.backend)]
    return RoleChoice(role, requested, request.option_for(role), usable[0] if usable else None, tuple(candidates))


def _unneeded(role: Role, problem: Problem) -> str:
    if role is Role.DECODE and problem.is_embedding:
        return "an embedding decodes nothing"
    if role is Role.LINEAR:
        return "the model has no linear-attention layer"
    if role is Role.DRAFT:
        return "speculation is off (--speculative-tokens 0)"
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
                f"(chosen: {', '.join(sorted(chosen)) or 'none'}); ask for it with --attention-backend {name}"
            )
    return {
        name: parse_options(name, registry.backends[name].spec.options, request.options.get(name, {}))
        for name in sorted(chosen)
    }


def render(selection: Selection, *, only_unserved: bool = False) -> Iterator[str]:
    """The one text for explanations and errors: the inputs, then every candidate with every reason.

    Where ``auto`` found one, backends that are made for something else are only named.
    """
    yield from _inputs(selection)
    for choice in selection.unserved if only_unserved else selection.choices.values():
        yield ""
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
