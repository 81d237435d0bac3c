"""Checks as data: name, claim, requirement and case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from attnplug.declare.version import parse_contract
from attnplug_conformance.case import Case
from attnplug_conformance.diagnosis import check_output
from attnplug_conformance.failure import CheckFailure
from attnplug_conformance.scene import Output, Scene
from attnplug_conformance.subject import Subject

FIRST_CONTRACT = "1.0"
"""First contract that the kit checks: core refuses backends of 0.9."""


@dataclass(frozen=True)
class Measured:
    """Error and time of one call."""

    rows: int
    longest: int
    error: float
    tolerance: float
    plan_s: float
    run_s: float


@dataclass
class CheckContext:
    """Arguments of a check: the backend, and a case fitted to the backend's claims."""

    subject: Subject
    case: Case
    measured: list[Measured] = field(default_factory=list)
    note: str = ""
    """Message of a check that passes."""

    def scene(self, **changes: Any) -> Scene:
        """Build a scene of the case. A changed case is fitted to the claims again."""
        case = self.case
        if changes:
            case = self.subject.fit(replace(case, **changes))
        return Scene(self.subject, case)

    def check_output(self, scene: Scene, output: Output) -> None:
        """Raise :class:`CheckFailure` unless the output agrees with float64."""
        error = check_output(scene, output)
        longest = max(scene.totals, default=0)
        self.measured.append(Measured(sum(scene.new), longest, error, scene.tolerance, output.plan_s, output.run_s))

    def accurate(self, scene: Scene | None = None, *, lse: bool = False) -> Scene:
        """Run a scene and check its output."""
        scene = scene or self.scene()
        self.check_output(scene, scene.run(lse=lse))
        return scene


@dataclass(frozen=True)
class Check:
    """Requirement on every backend that claims ``claim``.

    ``case`` returns the case for a page size and a longest request; ``None`` if no batch is run. ``run`` raises
    :class:`CheckFailure` with the diagnosis. ``applies`` returns the reason why a backend does not claim it, beyond
    the refusals of the case, or ``None`` if it does. ``since`` is the first contract that requires it.
    """

    name: str
    claim: str
    requirement: str
    case: Callable[[int, int], Case] | None
    run: Callable[[CheckContext], None]
    quick: bool = False
    applies: Callable[[Subject], str | None] = lambda subject: None
    since: str = FIRST_CONTRACT

    def required_by(self, contract: str) -> bool:
        """Return True if a backend of ``contract`` must pass; otherwise the check is advisory."""
        since, given = parse_contract(self.since), parse_contract(contract)
        assert since is not None and given is not None, (self.since, contract)
        return since <= given

    @property
    def kind(self) -> str:
        return self.name.partition(".")[0]


def expect_error(call: Callable[[], object], message: str) -> None:
    """Raise :class:`CheckFailure` unless a call raises. The type of the exception is the author's choice."""
    try:
        call()
    except Exception:
        return
    raise CheckFailure(message)
