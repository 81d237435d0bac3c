"""Batch of one forward step, with its plan state (B1, B3, B4)."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from attnplug.contract.geometry import Geometry, divide, split_by
from attnplug.contract.mode import ForwardMode
from attnplug.contract.plan import BackendId, Plan, PlanRecord, plan_to_run
from attnplug.declare.errors import PlanError
from attnplug.declare.version import use_deprecated


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
    """Decoding and extending requests of a mixed batch, in this order, if MLA layers run them apart. Both are planned;
    ``attention`` has their plans as parts."""


@dataclass(slots=True, eq=False)
class _CheckedPlans:
    """Successful checks of one batch plan with one geometry; both are compared by identity."""

    plan: BatchPlan
    geometry: Geometry
    decode: bool
    found: dict[BackendId, tuple[int, Plan]] = field(default_factory=dict)
    """Number of query rows and plan of each planner."""


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
    _checked: _CheckedPlans | None = split_by("reset", default=None, repr=False)
    """Results of :meth:`plan_for`, which runs at every layer."""

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
        """Return the plan by which ``planner`` may run ``rows`` query rows; see :func:`plan_to_run`.

        ``decode`` is True if ``forward_decode`` asks, False if ``forward_extend`` asks, and ``None`` if both may. The
        result is remembered by planner, so a plan is checked once per batch and not in every layer. It is checked
        again after ``plan`` or ``geometry`` was replaced, and for another number of rows.
        """
        checked = self._checked
        if (
            checked is not None
            and checked.plan is self.plan
            and checked.geometry is self.geometry
            and (decode is None or decode is checked.decode)
        ):
            remembered = checked.found.get(planner)
            if remembered is not None and remembered[0] == rows:
                return remembered[1]
        return self._check_and_remember(planner, rows, decode)

    def _check_and_remember(self, planner: BackendId, rows: int, decode: bool | None) -> Plan:
        plan, geometry, mode = self.plan, self.geometry, self.geometry.mode
        if decode is not None and decode is not mode.is_decode and mode is not ForwardMode.IDLE:
            called, right = ("decode", "extend") if decode else ("extend", "decode")
            raise PlanError(
                f"forward_{called} of backend {planner.name} was called for a batch in mode {mode}; "
                f"call forward_{right}"
            )
        found = self.check_plan(None if plan is None else plan.attention, planner, rows)
        assert plan is not None
        checked = self._checked
        if checked is None or checked.plan is not plan or checked.geometry is not geometry:
            checked = self._checked = _CheckedPlans(plan, geometry, mode.is_decode)
        checked.found[planner] = rows, found
        return found

    def check_plan(self, plan: Plan | None, planner: BackendId, rows: int) -> Plan:
        """Return the part of ``plan`` by which ``planner`` may run ``rows`` query rows; see :func:`plan_to_run`.

        ``plan`` is part of this batch's plan. Raises PlanError too if the geometry was replaced after planning.
        """
        found = plan_to_run(plan, planner, self.geometry.mode, rows)
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
