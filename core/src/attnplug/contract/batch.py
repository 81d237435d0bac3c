"""Batch of one forward step with its plan state (B1, B3, B4), and its plan: a value stamped with its planner, mode and
numbers of rows (B5)."""

from __future__ import annotations

import reprlib
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from attnplug.contract.geometry import Geometry, divide, split_by
from attnplug.declare.errors import PlanError
from attnplug.declare.problem import ForwardMode
from attnplug.declare.version import use_deprecated


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


class PlanRecord(NamedTuple):
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


@dataclass(frozen=True, slots=True, eq=False)
class BatchPlan:
    """All plans of one batch, published by one assignment. Each is checked when it runs (B5)."""

    attention: Plan
    """Plan that the backend's ``init_forward_metadata`` returned."""
    extend: Plan | None = None
    """Plan by which MLA layers run as MHA, made by the backend's caller; ``None`` if they run absorbed."""
    chunks: Plan | None = None
    """Plan that ``init_mha_chunk_metadata`` returned, for backends that have this hook."""
    geometry: Geometry | None = None
    """Planned geometry. For a batch with another one the plan is stale and is refused."""
    halves: tuple[ForwardBatch, ...] = ()
    """Decoding and extending requests of a mixed batch, in this order, if MLA layers run them apart. Both are planned.
    ``attention`` has their plans as parts, or is that of linear layers, which run the whole batch."""
    checked: dict[BackendId, tuple[Geometry, bool, int, Plan]] = field(default_factory=dict, repr=False)
    """Successful checks of :meth:`ForwardBatch.plan_for`: geometry, True for a decode, query rows and plan."""


@dataclass(slots=True, eq=False)
class ForwardBatch:
    """Requests of one step: geometry, model inputs and plan.

    Pools and coordinators are not part of a batch: backends captured theirs when they were built (B6). The caller plans
    a batch once and runs it in every layer::

        batch = ForwardBatch(geometry, input_ids, positions)
        batch.plan = BatchPlan(backend.init_forward_metadata(batch), geometry=geometry)
        for layer in layers:
            ...
            out = backend.forward_decode(q, k, v, layer, batch)
    """

    geometry: Geometry = split_by("shared")
    input_ids: Tensor | None = split_by("token", default=None)
    """``[tokens]``, padding behind the rows of the requests. ``None`` for a host that runs its own model."""
    positions: Tensor | None = split_by("token", default=None)
    """``[tokens]``: position of each new token in its request, for position embeddings."""
    plan: BatchPlan | None = split_by("reset", default=None)
    plan_record: PlanRecord | None = split_by("reset", default=None)
    passed_on: object = split_by("reset", default=None)
    """Result that a layer leaves for later layers of the same forward pass, such as a selection of rows."""

    @property
    def forward_mode(self) -> ForwardMode:
        return self.geometry.mode

    @property
    def batch_size(self) -> int:
        """Number of requests."""
        return self.geometry.requests

    @property
    def num_tokens(self) -> int:
        """Number of input rows, including padding."""
        return self.geometry.rows if self.input_ids is None else self.input_ids.shape[0]

    def mark_forward_metadata_ready(self, replan_equivalent: bool = False) -> None:
        """Record that this batch was planned outside the forward path, for the shapes it has now.

        Pass ``replan_equivalent=True`` if planning again after a change of shape gives an equivalent plan. The forward
        path then plans again after such a change. Otherwise it never plans a marked batch again.
        """
        self.plan_record = PlanRecord(self.batch_size, self.num_tokens, replan_equivalent)

    def needs_forward_metadata_init(self) -> bool:
        """Return True if the forward path has to plan this batch. Nothing else decides that."""
        record = self.plan_record
        if record is None:
            return True
        if not record.replan_equivalent:
            return False
        return (record.batch_size, record.num_tokens) != (self.batch_size, self.num_tokens)

    def plan_for(self, planner: BackendId, rows: int, *, decode: bool | None = None) -> Plan:
        """Return the plan by which ``planner`` may run ``rows`` query rows; see :meth:`check_plan`.

        ``decode`` is True if ``forward_decode`` asks, False if ``forward_extend`` asks, and ``None`` if both may. The
        result is remembered by planner, so a plan is checked once per batch and not in every layer. It is checked
        again after ``plan`` or ``geometry`` was replaced, and for another number of rows.
        """
        plan, geometry = self.plan, self.geometry
        if plan is not None and (checked := plan.checked.get(planner)) is not None:
            for_geometry, decodes, for_rows, remembered = checked
            if for_geometry is geometry and for_rows == rows and (decode is None or decode is decodes):
                return remembered
        mode = geometry.mode
        if decode is not None and decode is not mode.is_decode and mode is not ForwardMode.IDLE:
            called, right = ("decode", "extend") if decode else ("extend", "decode")
            raise PlanError(
                f"forward_{called} of backend {planner.name} was called for a batch in mode {mode}; "
                f"call forward_{right}"
            )
        found = self.check_plan(None if plan is None else plan.attention, planner, rows)
        assert plan is not None
        plan.checked[planner] = geometry, mode.is_decode, rows, found
        return found

    def check_plan(self, plan: Plan | None, planner: BackendId, rows: int) -> Plan:
        """Return the part of ``plan`` by which ``planner`` may run ``rows`` query rows (B5). Nothing else decides that.

        ``plan`` is part of this batch's plan. More rows than planned are allowed: the tail is padding, for which the
        caller returns zeros and writes nothing. Raises PlanError for no plan, another planner, another mode, or fewer
        rows than planned, and if the geometry was replaced after planning.
        """
        if plan is None:
            raise PlanError(f"backend {planner.name} was called for a batch without a plan; plan the batch first")
        found, mode = plan.part_of(planner), self.geometry.mode
        if found is None:
            planners = plan.planner_names()
            same = " (another instance of it)" if planner.name in planners else ""
            raise PlanError(
                f"backend {planner.name} was given a plan made by {' and '.join(planners)}{same}; "
                f"plan the batch with the backend that runs it"
            )
        if found.mode is not mode or plan.mode is not mode:
            wrong = plan.mode if found.mode is mode else found.mode  # of the part, or of the wrapper's plan around it
            raise PlanError(
                f"backend {planner.name} was given a plan for mode {wrong} and a batch in mode {mode}; plan it again"
            )
        if rows < found.query_rows:
            raise PlanError(
                f"backend {planner.name} was given {rows} query rows, but the plan is for {found.query_rows}; "
                "the batch shrank after it was planned: plan it again"
            )
        planned = None if self.plan is None else self.plan.geometry
        if planned is not None and planned is not self.geometry:
            raise PlanError(
                f"backend {planner.name} was given a plan of {planned.rows} rows for {planned.requests} requests, and "
                "the batch's geometry was replaced after it was planned; plan it again"
            )
        return found

    def split(self, first_requests: int, lanes: tuple[int, int] | None = None) -> tuple[ForwardBatch, ForwardBatch]:
        """Divide into the first ``first_requests`` requests and the others, for two-batch overlap.

        Both halves start unplanned, in the given ``lanes`` or in this batch's own. Padding rows go to the second half.
        """
        first, second = self.geometry.split(first_requests, lanes)
        halves = divide(self, first_requests, first.rows)
        return type(self)(**{**halves[0], "geometry": first}), type(self)(**{**halves[1], "geometry": second})


def apply_skip_attn_backend_init(batch: ForwardBatch, skip_attn_backend_init: bool | None) -> None:
    """Map the old flag of public entry points onto the marker; ``None`` means it was not given (B3).

    Warns once per process. ``False`` changes nothing: the marker alone decides.
    """
    if skip_attn_backend_init is None:
        return
    use_deprecated("skip_attn_backend_init", stacklevel=3)
    if skip_attn_backend_init:
        batch.mark_forward_metadata_ready()
