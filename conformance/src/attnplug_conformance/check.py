"""A check as data: its name, the claim it belongs to, what must hold, and the case that it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from attnplug_conformance.case import Case
from attnplug_conformance.diagnosis import Wrong, check_output
from attnplug_conformance.scene import Output, Scene
from attnplug_conformance.subject import Subject


@dataclass(frozen=True)
class Measured:
    """The error and the time of one call."""

    rows: int
    longest: int
    error: float
    tolerance: float
    plan_s: float
    run_s: float


@dataclass
class Stand:
    """Arguments of a check: the backend, and a case fitted to the backend's claims."""

    subject: Subject
    case: Case
    measured: list[Measured] = field(default_factory=list)

    def scene(self, **changes: Any) -> Scene:
        """A scene of the case; with changes, fitted again."""
        case = self.case
        if changes:
            case = self.subject.fit(replace(case, **changes))
        return Scene(self.subject, case)

    def check_output(self, scene: Scene, output: Output) -> None:
        """Raise :class:`Wrong` unless the output is float64's."""
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
    """One thing that must hold of every backend that claims ``claim``.

    ``case`` gives the case for a page size and a longest request; ``None`` where nothing is attended to. ``run`` raises
    :class:`Wrong`, whose words say what the backend did. ``applies`` says why a backend does not claim this, beyond
    what the case needs; ``None`` means that it does.
    """

    name: str
    claim: str
    says: str
    case: Callable[[int, int], Case] | None
    run: Callable[[Stand], None]
    quick: bool = False
    applies: Callable[[Subject], str | None] = lambda subject: None

    @property
    def kind(self) -> str:
        return self.name.partition(".")[0]


def refused_with_an_error(call: Callable[[], object], what: str) -> None:
    """Raise :class:`Wrong` unless a call is refused. Any exception is a refusal: which one is the author's choice."""
    try:
        call()
    except Exception:
        return
    raise Wrong(what)
