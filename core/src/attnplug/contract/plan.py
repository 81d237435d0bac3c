"""The plan of a batch: a value that says who planned, for which mode and for how many rows (B5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attnplug.contract.geometry import Geometry
from attnplug.contract.mode import ForwardMode
from attnplug.declare.errors import PlanError


class BackendId:
    """The identity of one built backend. Two instances of one backend are two planners: plans do not mix."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<backend {self.name} at {id(self):#x}>"


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """The shapes for which a batch was planned outside the forward path (B1)."""

    batch_size: int
    num_tokens: int
    replan_equivalent: bool


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What a backend prepared for a batch: complete when made, never changed, published in one assignment.

    Lifetime. An eager plan owns what it refers to and stays valid as long as somebody holds it. It may use its lane's
    scratch memory while it runs: plans of one lane run one after the other, on one stream at a time, and plans of
    different lanes may run at the same time on different streams. Whoever plans on one stream and runs on another makes
    the second wait for the first. The plan of a captured batch refers to memory that the backend keeps for its lane. It
    is valid until that lane's next replay is planned.

    ``query_rows`` counts the rows of q that belong to requests; ``kv_rows`` the cache rows they attend to, or ``None``
    where only the device knows. ``new_slots`` ``[query_rows]`` int64 is where new rows are written, -1 for padding.
    ``metadata`` is the planner's own, opaque to everyone else. A wrapper that plans with several backends keeps their
    plans in ``parts``.
    """

    planner: BackendId
    mode: ForwardMode
    query_rows: int
    kv_rows: int | None
    metadata: Any = None
    new_slots: Tensor | None = None
    parts: tuple[Plan, ...] = ()

    @classmethod
    def of(cls, planner: BackendId, geometry: Geometry, metadata: Any = None, new_slots: Tensor | None = None) -> Plan:
        """A backend's plan for a batch of this geometry."""
        return cls(planner, geometry.mode, geometry.rows, geometry.kv_rows, metadata, new_slots)

    def part_of(self, planner: BackendId) -> Plan | None:
        """The plan that ``planner`` made: this one, or one among its parts at any depth."""
        if self.planner is planner:
            return self
        for part in self.parts:
            if part.planner is planner:
                return part
            if part.parts and (found := part.part_of(planner)) is not None:
                return found
        return None

    def row_slots(self) -> Tensor | None:
        """Where the batch's new rows are written: ``new_slots``, or those of the first part that has any."""
        if self.new_slots is not None:
            return self.new_slots
        return next((slots for part in self.parts if (slots := part.row_slots()) is not None), None)

    def makers(self) -> list[str]:
        """The names of the backends that planned; for a wrapper's plan, those of its children."""
        return [name for part in self.parts for name in part.makers()] or [self.planner.name]


def plan_to_run(plan: Plan | None, planner: BackendId, mode: ForwardMode, rows: int) -> Plan:
    """The plan by which ``planner`` may run ``rows`` query rows in ``mode``, or an error (B5); the only judge of plans.

    More rows than planned are allowed: the tail is padding, for which the caller returns zeros and writes nothing.
    """
    if plan is None:
        raise PlanError(f"backend {planner.name} was asked to run a batch that has no plan; plan the batch first")
    found = plan.part_of(planner)
    if found is None:
        makers = plan.makers()
        same = " (another instance of it)" if planner.name in makers else ""
        raise PlanError(
            f"backend {planner.name} was given a plan made by {' and '.join(makers)}{same}; "
            f"plan the batch with the backend that runs it"
        )
    if found.mode is not mode:
        raise PlanError(
            f"backend {planner.name} was given a plan for mode {found.mode} and a batch in mode {mode}; plan it again"
        )
    if rows < found.query_rows:
        raise PlanError(
            f"backend {planner.name} was given {rows} query rows, but the plan is for {found.query_rows}; "
            "the batch shrank after it was planned: plan it again"
        )
    return found


_LONGEST_SHOWN = 60
"""Letters of a value that is not a plan; a longer one, such as a batch's with all its slots, is shown by its type."""


def received_plan(
    plan: object, planner: BackendId, mode: ForwardMode, rows: int, hook: str, *, delegated: bool = False
) -> Plan:
    """What ``hook`` of a backend returned, if it is a plan of its own for a batch of ``rows`` in ``mode``.

    Called once per batch, where the plan is received. An error here names the backend that made the plan, not a caller
    that finds out layers later. A ``delegated`` plan may be that of another backend, which runs on this one's behalf.
    """
    if not isinstance(plan, Plan):
        text = repr(plan)
        found = text if len(text) <= _LONGEST_SHOWN else f"a {type(plan).__name__}"
        problem = f"{found}, not a Plan; it returns its plan, and the caller gives it to the batch"
    elif plan.planner is not planner and not delegated:
        problem = f"a plan stamped by {plan.planner!r}; it stamps its plans with its own backend_id"
    elif plan.mode is not mode:
        problem = f"a plan for mode {plan.mode!r}, and the batch is in mode {mode!r}"
    elif not 0 <= plan.query_rows <= rows:
        problem = f"a plan for {plan.query_rows} query rows, and the batch has {rows}"
    else:
        return plan
    raise PlanError(f"{hook} of backend {planner.name} returned {problem}")
