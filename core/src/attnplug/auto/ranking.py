"""Order in which ``auto`` prefers usable backends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from attnplug.auto.schedule import BackendSchedule
from attnplug.declare.problem import Problem, Role
from attnplug.declare.refusal import Refusal
from attnplug.declare.registered import Registered


@dataclass(frozen=True, slots=True)
class Ranked:
    """Usable backends, the best first, with the reason in a few words.

    ``schedule``, if present, gives the fastest of them per batch. Its first candidate serves everything that is not
    planned batch by batch.
    """

    backends: tuple[Registered, ...]
    why: str
    schedule: BackendSchedule | None = None


class Ranking(Protocol):
    """Protocol for orders of the backends that can serve a role. ``usable`` is never empty."""

    def rank(self, usable: Sequence[Registered], role: Role, problem: Problem) -> Ranked:
        """Order all of ``usable``."""

    def failures(self, usable: Sequence[Registered], role: Role, problem: Problem) -> Mapping[str, Refusal]:
        """Reasons of backends known to fail here, by name. These are ranked only if there are no others."""


class PreferenceRanking:
    """Ranking by ``BackendSpec.preference`` alone, used if nothing was measured."""

    def rank(self, usable: Sequence[Registered], role: Role, problem: Problem) -> Ranked:
        ordered = tuple(sorted(usable, key=by_preference))
        return Ranked(ordered, _why(ordered[0], ordered[1:]))

    def failures(self, usable: Sequence[Registered], role: Role, problem: Problem) -> Mapping[str, Refusal]:
        return {}


BY_PREFERENCE = PreferenceRanking()


def by_preference(backend: Registered) -> tuple[bool, int, str]:
    """Sort key: plugins before embedded backends, then descending preference, then name."""
    return backend.source.embedded, -backend.spec.preference, backend.spec.name


def _why(chosen: Registered, others: Sequence[Registered]) -> str:
    preference = chosen.spec.preference
    equal = [b for b in others if b.spec.preference == preference and b.source.embedded == chosen.source.embedded]
    passed_over = [b for b in others if b not in equal and b.spec.preference >= preference]  # embedded ones
    default = f"the embedded default {_names(passed_over)}"
    beside = f" beside {default}, which comes last" if passed_over else ""
    if not others:
        return "the only usable one"
    if equal:
        last = f"; {default} comes last" if passed_over else ""
        return f"preference {preference}, equal with {_names(equal)}, first by name{last}"
    if len(passed_over) == len(others):
        return f"the only usable one{beside}"
    if passed_over:
        return f"preference {preference}, the highest of {1 + len(others) - len(passed_over)} usable{beside}"
    return f"preference {preference}, the highest of {1 + len(others)} usable, before {_names(others)}"


def _names(backends: Iterable[Registered]) -> str:
    return ", ".join(backend.spec.name for backend in backends)
