"""Backend requests and their result: one backend per role, or every refusal of every candidate."""

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
                f"{Role.DECODE}",
                settings=[Setting.SPECULATIVE_ATTENTION_MODE],
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
        return any(refusal.code in (RefusalCode.ROLE, RefusalCode.KIND) for refusal in self.refusals)


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
    def chosen_name(self) -> str | None:
        return None if self.chosen is None else self.chosen.spec.name

    def why(self, render: Render = str) -> str:
        """Return the reason for the choice in one line."""
        if self.chosen is None:
            return "nothing can serve"
        if self.requested != AUTO:
            return f"asked for by {render(self.setting) or self.setting}"
        refused = sum(bool(candidate.refusals) for candidate in self.candidates)
        return f"auto: {self.rank}" + (f"; {refused} refused" if refused else "")


@dataclass(frozen=True, slots=True)
class Selection:
    """One backend for each role that the problem needs, or the refusals of each candidate.

    ``page_size`` is the requested one, or one that all chosen backends support. ``options`` holds the parsed options by
    backend name.
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

    def schedule(self, role: Role) -> BackendSchedule | None:
        """Return the per-batch schedule of a role, or None if it has only one backend."""
        return self.choices[role].schedule

    def graph_extenders(self, levels: Mapping[str, GraphLevel]) -> list[str]:
        """Return the backends that can run extends in CUDA graphs, if ``auto`` also chose backends that cannot.

        ``levels`` holds the graph level of every serving backend. A prefill backend that was requested by name serves
        all prefills, and so does the chosen one if an MLA extend path was requested; the result is then empty.
        """
        problem, prefill = self.problem, self.choices.get(Role.PREFILL)
        if not problem.wants_prefill_graphs or problem.device != "cuda" or problem.mla_extend is not None:
            return []
        if prefill is None or prefill.requested != AUTO or Role.LINEAR in self.choices:
            return []
        able = [name for name, level in levels.items() if level is GraphLevel.ALWAYS]
        prefills = {candidate.backend.spec.name for candidate in prefill.candidates if not candidate.refusals}
        return [] if len(able) == len(levels) else [name for name in able if name in prefills]
