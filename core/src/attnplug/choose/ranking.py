"""Which of several usable backends ``auto`` takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from attnplug.choose.loading import Registered
from attnplug.declare.problem import Problem, Role
from attnplug.declare.refusal import Refusal
from attnplug.declare.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Ranked:
    """Usable backends, the best first, and in a few words why it is the best.

    ``schedule``, where there is one, says which of them is the fastest for which batch. Its first candidate is then the
    one to take for all that is not planned batch by batch.
    """

    backends: tuple[Registered, ...]
    why: str
    schedule: Schedule | None = None


class Ranking(Protocol):
    """Orders the backends that can serve a role. It is given usable ones only, at least one."""

    def rank(self, usable: Sequence[Registered], role: Role, problem: Problem) -> Ranked:
        """All of them, in order."""
        ...

    def failures(self, usable: Sequence[Registered], role: Role, problem: Problem) -> Mapping[str, Refusal]:
        """Those that are known to fail at this, by name. They are ranked only if there are no others."""
        ...


class PreferenceRanking:
    """By ``BackendSpec.preference``, whatever the role and the problem: the ranking if nothing was measured."""

    def rank(self, usable: Sequence[Registered], role: Role, problem: Problem) -> Ranked:
        ordered = tuple(sorted(usable, key=by_preference))
        return Ranked(ordered, _why(ordered[0], ordered[1:]))

    def failures(self, usable: Sequence[Registered], role: Role, problem: Problem) -> Mapping[str, Refusal]:
        return {}


BY_PREFERENCE = PreferenceRanking()


def by_preference(backend: Registered) -> tuple[bool, int, str]:
    """The order that ``BackendSpec.preference`` promises."""
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
