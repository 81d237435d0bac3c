"""The batch of one forward step, and its own plan state (B1, B3, B4)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from torch import Tensor

from attnplug.contract.geometry import Geometry
from attnplug.contract.mode import ForwardMode
from attnplug.contract.plan import BackendId, Plan, PlanRecord, plan_to_run
from attnplug.contract.sparse import LayerChoice
from attnplug.contract.splitting import divide, pad, split_by
from attnplug.declare.errors import PlanError


@dataclass(frozen=True, slots=True, eq=False)
class BatchPlan:
    """All that was planned for one batch, published in one assignment. Every part is judged when it is run (B5)."""

    attention: Plan
    """The backend's, from ``init_forward_metadata``."""
    extend: Plan | None = None
    """How MLA layers run as MHA, planned by the backend's caller; ``None`` where they run absorbed."""
    chunks: Plan | None = None
    """What ``init_mha_chunk_metadata`` planned, for backends that have it."""
    geometry: Geometry | None = None
    """What was planned. Run with a batch that has another geometry, the plan is stale and is refused."""


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
    """The requests of one step: their geometry, what the model reads, and their plan.

    Pools and coordinators are not here: a backend captured its own when it was built (B6).
    """

    geometry: Geometry = split_by("shared")
    input_ids: Tensor | None = split_by("token", default=None)
    """``[tokens]``, with padding rows after those of the requests; a host that runs its own model has none here."""
    positions: Tensor | None = split_by("token", default=None)
    """``[tokens]``: position of each new token in its request, for the model's embeddings."""
    plan: BatchPlan | None = split_by("reset", default=None)
    plan_record: PlanRecord | None = split_by("reset", default=None)
    choice: LayerChoice | None = split_by("reset", default=None)
    """What the last layer with an index chose in the forward that runs, for layers that share it."""
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
        """Rows of input, padding included."""
        return self.geometry.rows if self.input_ids is None else self.input_ids.shape[0]

    def mark_forward_metadata_ready(self, replan_equivalent: bool = False) -> None:
        """Record that this batch was planned outside the forward path, for the shapes it has now.

        ``replan_equivalent`` says that planning again after a change of shape gives an equivalent plan. The forward
        path may then do so; otherwise it never plans a marked batch again.
        """
        self.plan_record = PlanRecord(self.batch_size, self.num_tokens, replan_equivalent)

    def needs_forward_metadata_init(self) -> bool:
        """Whether the forward path has to plan this batch. Nothing else decides that."""
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
        """A part of this batch's plan, by which ``planner`` may run ``rows`` query rows; see :func:`plan_to_run`."""
        found = plan_to_run(plan, planner, self.geometry.mode, rows)
        planned = None if self.plan is None else self.plan.geometry
        if planned is not None and planned is not self.geometry:
            raise PlanError(
                f"backend {planner.name} was given a plan of {planned.rows} rows for {planned.requests} requests, and "
                "the batch's geometry was replaced after it was planned; plan it again"
            )
        return found

    def split(
        self, first_requests: int, lanes: tuple[int, int] | None = None, *, cut: int = 0
    ) -> tuple[ForwardBatch, ForwardBatch]:
        """Divide into two batches, the first with this many requests, for two-batch overlap.

        Both start unplanned, in the lanes that ``lanes`` names or in this batch's own. ``cut`` divides the next request
        too, as :meth:`Geometry.split` says. Rows of padding stay at the end: they are the second half's.
        """
        first, second = self.geometry.split(first_requests, lanes, cut=cut)
        halves = divide(self, first_requests, first.rows, cut=cut > 0)
        return type(self)(**{**halves[0], "geometry": first}), type(self)(**{**halves[1], "geometry": second})

    def pad(self, requests: int, tokens: int) -> None:
        """Bring the batch to a common size, as data-parallel ranks do: padded requests and rows of input at the end.

        A plan that was made before, and its mark, stay. They hold where only rows were added. With requests added, a
        batch that was marked ``replan_equivalent`` is planned again by the forward path, and any other plan is stale
        and is refused when it is run.
        """
        geometry = self.geometry.padded(requests)
        if tokens < max(geometry.rows, self.num_tokens):
            raise PlanError(
                f"a batch of {self.num_tokens} rows, {geometry.rows} with {requests} requests, cannot be padded to "
                f"{tokens} rows"
            )
        for name, value in pad(self, requests - self.batch_size, tokens - self.num_tokens).items():
            setattr(self, name, value)
        self.geometry = geometry


_warned = False


def apply_skip_attn_backend_init(batch: ForwardBatch, skip_attn_backend_init: bool | None) -> None:
    """Map the old flag of public entry points onto the marker; ``None`` means it was not given (B3).

    Warns once per process. ``False`` changes nothing: the marker alone decides.
    """
    global _warned
    if skip_attn_backend_init is None:
        return
    if not _warned:
        _warned = True
        warnings.warn(
            "skip_attn_backend_init is deprecated and goes away in contract 1.0; "
            "call batch.mark_forward_metadata_ready() where you plan the batch",
            DeprecationWarning,
            stacklevel=3,
        )
    if skip_attn_backend_init:
        batch.mark_forward_metadata_ready()
