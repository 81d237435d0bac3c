"""What was asked for and what came of it: one backend per role, or every reason against each candidate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attnplug.auto.schedule import BackendSchedule
from attnplug.declare.errors import UsageError
from attnplug.declare.problem import GraphLevel, Problem, Role
from attnplug.declare.refusal import Refusal, RefusalCode
from attnplug.declare.registered import Registered
from attnplug.declare.settings import Render, Setting

AUTO = "auto"


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

    @property
    def for_something_else(self) -> bool:
        """Whether it is made for another role or kind of attention."""
        return any(refusal.code in (RefusalCode.ROLE, RefusalCode.KIND) for refusal in self.refusals)


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
    schedule: BackendSchedule | None = None

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

    def schedule(self, role: Role) -> BackendSchedule | None:
        """Which of the backends that share a role is the fastest for which batch; ``None`` if there is only one."""
        return self.choices[role].schedule

    def extending_in_graphs(self, levels: Mapping[str, GraphLevel]) -> list[str]:
        """The backends that may take extends in CUDA graphs, if some of those that serve cannot and ``auto`` chose
        them. ``levels`` says of all that serve what they can capture.

        Who was asked for by name prefills alone. So it is where a way of extending MLA was asked for.
        """
        problem, prefill = self.problem, self.choices.get(Role.PREFILL)
        if not problem.wants_prefill_graphs or problem.device != "cuda" or problem.mla_extend is not None:
            return []
        if prefill is None or prefill.requested != AUTO or Role.LINEAR in self.choices:
            return []
        able = [name for name, level in levels.items() if level is GraphLevel.ALWAYS]
        prefills = {candidate.backend.spec.name for candidate in prefill.candidates if not candidate.refusals}
        return [] if len(able) == len(levels) else [name for name in able if name in prefills]
