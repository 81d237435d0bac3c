"""Backend requests and their result, one backend per role or every refusal of every candidate (D3), also as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from attnplug.auto.schedule import BackendSchedule
from attnplug.declare.errors import Refusal, RefusalCode, Render, Setting, UsageError
from attnplug.declare.problem import GraphLevel, Problem, Role, sorted_levels
from attnplug.declare.spec import BackendSpec, Registered

AUTO = "auto"
_UNRELATED = (RefusalCode.ROLE, RefusalCode.KIND)
_FAR: dict[str, int] = dict.fromkeys((*_UNRELATED, RefusalCode.DEVICE, RefusalCode.SM, RefusalCode.ARCHITECTURE), 100)
"""Weights of refusals that only another backend or another device avoids. All others weigh 1."""


@dataclass(frozen=True, slots=True)
class BackendRequest:
    """A user's backend request: default backend, per-role overrides, per-backend options.

    Example: ``BackendRequest("flashinfer_mla", {Role.DECODE: "flashmla"}, {"flashinfer_mla": {"kernel": "fa2"}})``.
    """

    attention: str = AUTO
    roles: Mapping[Role, str] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    verify: Role = Role.DECODE
    """Role whose backend verifies draft tokens if prefill and decode have different ones. A verify is an extend of a
    few tokens, which suits decode kernels."""

    def __post_init__(self) -> None:
        if self.verify not in (Role.PREFILL, Role.DECODE):
            raise UsageError(
                f"`{Setting.SPECULATIVE_ATTENTION_MODE}` {self.verify} cannot verify; use {Role.PREFILL} or "
                f"{Role.DECODE}"
            )

    def name_for(self, role: Role) -> str:
        """Return the backend name requested for a role. ``attention`` does not apply to linear layers."""
        return self.roles.get(role, AUTO if role is Role.LINEAR else self.attention)

    def setting_for(self, role: Role) -> Setting:
        """Return the setting that decides a role."""
        return role.setting if role in self.roles or role is Role.LINEAR else Setting.ATTENTION_BACKEND


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend as a candidate for one role, with every refusal."""

    backend: Registered
    refusals: tuple[Refusal, ...]

    @property
    def is_unrelated(self) -> bool:
        """True if the backend is made for another role or attention kind."""
        return any(refusal.code in _UNRELATED for refusal in self.refusals)

    @property
    def distance(self) -> int:
        """Sum of the refusals' weights. The candidate with the smallest one needs the fewest changes."""
        return sum(_FAR.get(refusal.code, 1) for refusal in self.refusals)


@dataclass(frozen=True, slots=True)
class RoleChoice:
    """Outcome for one role. ``candidates`` holds all installed backends, the requested one first.

    ``setting`` decided the role. ``rank`` is the reason why ``auto`` prefers the chosen backend to other usable ones.
    ``schedule`` is set if several backends share the role by batch; the chosen one is its first candidate.
    """

    role: Role
    requested: str
    setting: Setting
    chosen: Registered | None
    candidates: tuple[Candidate, ...]
    rank: str = ""
    schedule: BackendSchedule | None = None

    @property
    def serving(self) -> tuple[Registered, ...]:
        """Backends to build for the role: the chosen one, followed by the others of its schedule."""
        if self.schedule is None:
            return () if self.chosen is None else (self.chosen,)
        by_name = {candidate.backend.spec.name: candidate.backend for candidate in self.candidates}
        return tuple(by_name[name] for name in self.schedule.candidates)

    @property
    def unrelated(self) -> list[Candidate]:
        """Candidates that an explanation only names: unrelated ones, if ``auto`` chose a backend."""
        chose = self.requested == AUTO and self.chosen is not None
        return [candidate for candidate in self.candidates if chose and candidate.is_unrelated]

    @property
    def chosen_name(self) -> str | None:
        return None if self.chosen is None else self.chosen.spec.name

    def why(self, render: Render = str) -> str:
        """Return the reason for the choice in one line."""
        if self.chosen is None:
            return "nothing can serve"
        if self.requested != AUTO:
            return f"requested by {render(self.setting) or self.setting}"
        refused = sum(bool(candidate.refusals) for candidate in self.candidates)
        return f"auto: {self.rank}" + (f"; {refused} refused" if refused else "")


@dataclass(frozen=True, slots=True)
class Selection:
    """One backend for each role that the problem needs, ``selection.chosen(Role.DECODE)``, or all refusals.

    ``page_size`` is the requested one, or one that all chosen backends support. ``options`` are parsed, by backend.
    """

    problem: Problem
    choices: Mapping[Role, RoleChoice]
    page_size: int | None
    options: Mapping[str, Any]
    failed: Mapping[str, Refusal] = field(default_factory=dict)
    """Reasons why backends could not be built, by name. These backends were left out."""
    verify: Role = Role.DECODE
    """Role whose backend verifies draft tokens."""

    @property
    def unserved(self) -> tuple[RoleChoice, ...]:
        return tuple(choice for choice in self.choices.values() if choice.chosen is None)

    def chosen(self, role: Role) -> Registered:
        found = self.choices[role].chosen
        assert found is not None, f"role {role} is not served; select() raises then"
        return found

    def serving(self, role: Role) -> tuple[Registered, ...]:
        """Return the backends that share a role, the chosen one first. There are several only if it has a schedule."""
        return self.choices[role].serving

    def uses(self) -> dict[str, tuple[Registered, frozenset[Role]]]:
        """Return the backends to build, by name, each with the roles that it serves."""
        found: dict[str, tuple[Registered, frozenset[Role]]] = {}
        for role in self.choices:
            for backend in self.serving(role):
                found[backend.spec.name] = backend, found.get(backend.spec.name, (backend, frozenset()))[1] | {role}
        return found

    def graph_extenders(self, levels: Mapping[str, GraphLevel]) -> list[str]:
        """Return the backends that can run extends in CUDA graphs, if ``auto`` also chose backends that cannot. None if
        a prefill backend, an MLA extend path or invariance was requested, or if linear layers cannot be captured."""
        problem, prefill = self.problem, self.choices.get(Role.PREFILL)
        linear = self.serving(Role.LINEAR) if Role.LINEAR in self.choices else ()
        captured = all(each.spec.capabilities.cuda_graph is GraphLevel.ALWAYS for each in linear)
        eager = problem.device == "cpu" or problem.extend_path or problem.invariant or not problem.wants_prefill_graphs
        if eager or prefill is None or prefill.requested != AUTO or not captured:
            return []
        able = [name for name, level in levels.items() if level is GraphLevel.ALWAYS]
        prefills = {candidate.backend.spec.name for candidate in prefill.candidates if not candidate.refusals}
        return [] if len(able) == len(levels) else [name for name in able if name in prefills]

    def captured_graphs(self) -> dict[str, Any] | None:
        """Return the CUDA graph level that all serving backends declare, the reasons of those that limit it, and the
        backend of captured prefills. None if the host captures nothing or a role is not served."""
        if not self.problem.wants_graphs or self.unserved:
            return None
        levels: dict[str, tuple[GraphLevel, str]] = {}
        specs = [(role, backend.spec) for role in self.choices for backend in self.serving(role)]
        for role, spec in specs:
            limit = _declared_level(self, spec, role)
            levels[spec.name] = min(limit, levels.get(spec.name, limit))
        extends = {spec.name: _declared_level(self, spec, Role.PREFILL)[0] for _, spec in specs}
        lowest, highest = min(levels.values())[0], max(levels.values())[0]
        is_limited = lowest is not highest or lowest is GraphLevel.NEVER
        limits = {name: why for name, (level, why) in levels.items() if is_limited and level is lowest}
        prefills = next(iter(self.graph_extenders(extends)), None)
        return {"level": lowest.name.lower(), "limited_by": limits, "short_prefills": prefills}


_SHOWN_BATCHES = {Role.PREFILL: ((1, 512), (1, 4096)), Role.DECODE: ((1, 1), (8, 1), (64, 1))}
"""Batches, as (requests, tokens), for which an explanation names the fastest backend of a schedule."""


def refusal_lines(selection: Selection, render: Render) -> Iterator[str]:
    """Yield why roles are not served: the refusals of the requested backend, or of every candidate under ``auto``."""
    alike: dict[str, list[RoleChoice]] = {}
    for choice in selection.unserved:
        why = "\n".join(_nearest_lines(choice, render)) if choice.requested == AUTO else choice.requested
        alike.setdefault(why, []).append(choice)
    for why, choices in alike.items():
        roles = " and ".join(choice.role for choice in choices)
        if choices[0].requested == AUTO:
            yield f"{roles}: {why}\n"
            continue
        asked, own = choices[0].candidates[0].backend, choices[0].role.setting
        by = " and ".join(dict.fromkeys(render(choice.setting) or choice.setting for choice in choices))
        yield f"{asked.spec.name} ({asked.source}) was requested by {by} and cannot serve {roles}:"
        reasons: dict[str, list[RoleChoice]] = {}
        for choice in choices:
            for refusal in sorted(choice.candidates[0].refusals, key=lambda each: -_FAR.get(each.code, 1)):
                reasons.setdefault(refusal.format(render), []).append(choice)
        for reason, concerned in reasons.items():
            yield f"  - {reason}" if len(concerned) == len(choices) else f"  - for {concerned[0].role}: {reason}"
        usable = [{c.backend.spec.name: None for c in choice.candidates if not c.refusals} for choice in choices]
        names = ", ".join(name for name in usable[0] if all(name in others for others in usable)) or "none"
        serves = any(each not in choices and each.chosen_name == asked.spec.name for each in selection.choices.values())
        how = f"usable by {render(own) or own} beside {asked.spec.name}" if serves else "usable instead"
        yield f"{how}: {names}; 'attnplug explain' gives every reason against every other backend\n"
    yield from _inputs(selection)


def _nearest_lines(choice: RoleChoice, render: Render) -> Iterator[str]:
    """Yield the refusals of the candidates that come nearest to serving a role, then a line for each of the others."""
    yield _outcome(choice, render)
    for number, candidate in enumerate(sorted(choice.candidates, key=lambda each: each.distance)):
        if number == 0 or (number < 3 and candidate.distance < 100):
            yield from _candidate_lines(candidate, render)
            continue
        reasons = "; ".join(refusal.format(render) for refusal in candidate.refusals)
        yield f"  {candidate.backend.spec.name} ({candidate.backend.source}): {reasons}"


def explanation(selection: Selection, render: Render = str) -> Iterator[str]:
    """Yield the inputs of a selection, then every role with every candidate and every refusal, as lines.

    ``render`` spells settings as the host's users know them.
    """
    yield from _inputs(selection)
    for choice in selection.choices.values():
        yield ""
        yield from _role_lines(choice, selection.problem, render)
    if (graphs := selection.captured_graphs()) is not None:
        names: dict[str, list[str]] = {}
        for name, reason in graphs["limited_by"].items():
            names.setdefault(reason, []).append(name)
        limiting = "; ".join(f"by {' and '.join(limited)} ({reason})" for reason, limited in names.items())
        prefills = f"; short prefills by {graphs['short_prefills']}" if graphs["short_prefills"] else ""
        yield from ("", f"CUDA graphs: {graphs['level'].upper()}{', ' if limiting else ''}{limiting}{prefills}")


def _declared_level(selection: Selection, spec: BackendSpec, role: Role) -> tuple[GraphLevel, str]:
    """Return the highest graph level that a backend allows in a role, and the reason against the next one, if any."""
    allowed = GraphLevel.NEVER
    for level in list(GraphLevel)[1:]:
        problem = replace(selection.problem, cuda_graph=level)
        if refusals := spec.refusals(problem, role, selection.options.get(spec.name)):
            if problem.captured([role]) <= spec.capabilities.cuda_graph:
                return allowed, refusals[0].message
            return allowed, "no more is declared" if allowed else "none are declared"
        allowed = level
    return allowed, ""


def _role_lines(choice: RoleChoice, problem: Problem, render: Render) -> Iterator[str]:
    """Yield the outcome for one role and every candidate. Unrelated candidates are only named."""
    yield f"{choice.role}: {_outcome(choice, render)}"
    if choice.schedule is not None:
        for requests, tokens in _SHOWN_BATCHES[choice.role]:
            size = f"{requests} × {tokens} new tokens" if tokens > 1 else f"{requests} request{'s' * (requests > 1)}"
            fastest = choice.schedule.describe(requests, tokens)
            if problem.wants_graphs and not problem.graphs_by_length and choice.role is Role.DECODE and problem.model:
                captured = choice.schedule.overall(requests, tokens, problem.model.context_length)  # for all lengths
                fastest = captured if captured == fastest else f"{captured} in a graph; without, {fastest}"
            yield f"  {size}: {fastest}"
    for candidate in choice.candidates:
        if candidate not in choice.unrelated:
            yield from _candidate_lines(candidate, render)
    if choice.unrelated:
        names = ", ".join(candidate.backend.spec.name for candidate in choice.unrelated)
        yield f"  for another role or kind of attention: {names}"


def _outcome(choice: RoleChoice, render: Render) -> str:
    if choice.chosen is not None:
        return f"{' or '.join(b.spec.name for b in choice.serving)} ({choice.why(render)})"
    if choice.requested != AUTO:
        return f"{choice.requested} was requested and cannot serve"
    if any(choice.role in candidate.backend.spec.capabilities.roles for candidate in choice.candidates):
        return "no installed backend can serve"
    return "no backend is installed for this role; 'attnplug backends' reports broken and blocked ones"


def _candidate_lines(candidate: Candidate, render: Render) -> Iterator[str]:
    backend, status = candidate.backend, "refused" if candidate.refusals else "usable"
    levels = sorted_levels(backend.spec.capabilities.invariant)
    yield f"  {backend.spec.name} ({backend.source}): {status}" + ", invariant: " * bool(levels) + ", ".join(levels)
    yield from (f"    - {refusal.format(render)}" for refusal in candidate.refusals)


def _inputs(selection: Selection) -> Iterator[str]:
    problem = selection.problem
    if problem.model is not None:
        yield f"model      {problem.model.describe()}"
    device = problem.device or "any"
    if problem.device_architecture is not None:
        device += f", {problem.device_architecture}"
    yield f"device     {device}"
    index = "" if problem.index_dtype is None else f", index keys {problem.index_dtype}"
    yield f"dtype      {problem.dtype or 'any'}, KV cache {problem.kv_dtype or 'any'}{index}"
    page_size = problem.page_size if problem.page_size is not None else f"{selection.page_size} (chosen)"
    yield f"page size  {page_size if selection.page_size is not None else 'any'}"
    extras = {
        f"{problem.speculative_tokens} speculative tokens": problem.speculative_tokens,
        f"trees of drafts with {problem.speculative_topk} branches": problem.speculative_topk > 1,
        f"{problem.tensor_parallel} tensor-parallel ranks": problem.tensor_parallel > 1,
        "embedding: no decode": problem.is_embedding,
        f"cache layout: {problem.layout}": problem.layout is not None,
        "upper bounds of lengths only": not problem.exact_lengths,
        f"CUDA graphs: {problem.cuda_graph.name}": problem.cuda_graph,
        f"invariance: {', '.join(sorted_levels(problem.invariant))}": problem.invariant,
    }
    if any(extras.values()):
        yield f"also       {', '.join(text for text, applies in extras.items() if applies)}"
