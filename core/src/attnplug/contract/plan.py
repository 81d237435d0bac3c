"""Plan of a batch: a value stamped with its planner, mode and numbers of rows (B5)."""

from __future__ import annotations

import reprlib
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attnplug.contract.geometry import Geometry
from attnplug.contract.mode import ForwardMode
from attnplug.declare.errors import PlanError


class BackendId:
    """Identity of one built backend. Two instances of a backend are two planners, and never share plans."""

    __slots__ = ("name", "source")

    def __init__(self, name: str) -> None:
        self.name = name
        self.source = ""
        """Distribution and version of the plugin. Set when the backend is built."""

    @property
    def label(self) -> str:
        """Name and source, for messages."""
        return f"backend {self.name} ({self.source})" if self.source else f"backend {self.name}"

    def __repr__(self) -> str:
        return f"<backend {self.name} at {id(self):#x}>"


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """Shapes for which a batch was planned outside the forward path (B1)."""

    batch_size: int
    num_tokens: int
    replan_equivalent: bool


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A backend's preparation of a batch: complete when made, immutable, published by one assignment.

    Lifetime. An eager plan owns what it refers to and stays valid while it is referenced. It may use its lane's scratch
    memory while it runs, so plans of one lane run one after the other, on one stream at a time. Plans of different
    lanes may run at the same time on different streams. A caller that plans on one stream and runs on another makes the
    second wait for the first. The plan of a captured batch refers to memory that the backend keeps for its lane. It is
    valid until that lane's next replay is planned.

    ``query_rows`` counts the rows of q that belong to requests. ``kv_rows`` counts the cache rows they attend to;
    ``None`` if only the device knows. ``new_slots`` ``[query_rows]`` int64 is the slot mapping of the new rows, -1 for
    padding. ``metadata`` is private to the planner. ``parts`` are the plans of a wrapper's children.

    A backend returns one from ``init_forward_metadata``, stamped with its ``backend_id``:

    >>> import torch
    >>> geometry = Geometry.of_lengths(ForwardMode.DECODE, torch.zeros(2, 1, dtype=torch.int32), [1, 1], [3, 5], 8)
    >>> plan = Plan.of(BackendId("mine"), geometry, metadata=geometry.cache_slots([0, 1]))
    >>> plan.planner.name, plan.query_rows, plan.kv_rows
    ('mine', 2, 8)
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
        """Make a plan for a batch of this geometry."""
        return cls(planner, geometry.mode, geometry.rows, geometry.kv_rows, metadata, new_slots)

    def part_of(self, planner: BackendId) -> Plan | None:
        """Return the plan that ``planner`` made: this one, or one of its parts at any depth."""
        if self.planner is planner:
            return self
        for part in self.parts:
            if part.planner is planner:
                return part
            if part.parts and (found := part.part_of(planner)) is not None:
                return found
        return None

    def row_slots(self) -> Tensor | None:
        """Slot mapping of the batch's new rows: ``new_slots``, or those of the first part that has any."""
        if self.new_slots is not None:
            return self.new_slots
        return next((slots for part in self.parts if (slots := part.row_slots()) is not None), None)

    def planners(self) -> list[BackendId]:
        """Backends that planned; for a wrapper's plan, its children."""
        return [planner for part in self.parts for planner in part.planners()] or [self.planner]

    def planner_names(self) -> list[str]:
        """Names of the :meth:`planners`."""
        return [planner.name for planner in self.planners()]


def plan_to_run(plan: Plan | None, planner: BackendId, mode: ForwardMode, rows: int) -> Plan:
    """Return the plan by which ``planner`` may run ``rows`` query rows in ``mode`` (B5).

    Nothing else decides that. More rows than planned are allowed: the tail is padding, for which the caller returns
    zeros and writes nothing. Raises PlanError for no plan, another planner, another mode, or fewer rows than planned.
    """
    if plan is None:
        raise PlanError(f"backend {planner.name} was asked to run a batch that has no plan; plan the batch first")
    found = plan.part_of(planner)
    if found is None:
        planners = plan.planner_names()
        same = " (another instance of it)" if planner.name in planners else ""
        raise PlanError(
            f"backend {planner.name} was given a plan made by {' and '.join(planners)}{same}; "
            f"plan the batch with the backend that runs it"
        )
    if found.mode is not mode or plan.mode is not mode:
        planned = plan.mode if found.mode is mode else found.mode  # of the part, or of the wrapper's plan around it
        raise PlanError(
            f"backend {planner.name} was given a plan for mode {planned} and a batch in mode {mode}; plan it again"
        )
    if rows < found.query_rows:
        raise PlanError(
            f"backend {planner.name} was given {rows} query rows, but the plan is for {found.query_rows}; "
            "the batch shrank after it was planned: plan it again"
        )
    return found


def describe_result(value: object) -> str:
    """Describe what a plugin's method returned. Tensors are described, not printed: printing one may take seconds."""
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)} on {value.device}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(type(each).__name__ for each in value[:4])})"
    if isinstance(value, Coroutine):
        value.close()  # or Python warns that nothing awaited it
        return "a coroutine (it is defined with async)"
    return "None" if value is None else f"{reprlib.repr(value)} ({type(value).__name__})"


def received_plan(
    plan: object, planner: BackendId, mode: ForwardMode, rows: int, hook: str, *, delegated: bool = False
) -> Plan:
    """Return ``plan``, which ``hook`` returned, if the backend made it for a batch of ``rows`` in ``mode``.

    Called once per batch, where the plan is received, so that the PlanError names the backend that made the plan and
    not a caller that notices layers later. A ``delegated`` plan may be that of another backend.
    """
    if not isinstance(plan, Plan):
        problem = f"{describe_result(plan)}, not a Plan; it returns its plan, and the caller gives it to the batch"
    elif plan.planner is not planner and not delegated:
        problem = f"a plan stamped by {plan.planner!r}; it stamps its plans with its own backend_id"
    elif plan.mode is not mode:
        problem = f"a plan for mode {plan.mode!r}, and the batch is in mode {mode!r}"
    elif not 0 <= plan.query_rows <= rows:
        problem = f"a plan for {plan.query_rows} query rows, and the batch has {rows}"
    else:
        return plan
    raise PlanError(f"{hook} of {planner.label} returned {problem}")
