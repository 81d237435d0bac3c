"""Plans of captured batch shapes, and the limits of shapes that can be captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attnplug.contract.geometry import Geometry
from attnplug.contract.mode import ForwardMode
from attnplug.contract.plan import BackendId, Plan
from attnplug.declare.errors import BackendError, PlanError
from attnplug.declare.problem import GraphLevel

_DECODE = (ForwardMode.DECODE,)
_UNIFORM = (*_DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)
_MODES = {
    GraphLevel.NEVER: (),
    GraphLevel.DECODE: _DECODE,
    GraphLevel.UNIFORM: _UNIFORM,
    GraphLevel.ALWAYS: (*_UNIFORM, ForwardMode.EXTEND, ForwardMode.MIXED),
}


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """Largest batch that can be captured. ``pages`` is the width of the page table.

    At level ``ALWAYS`` extends are captured too; at each replay ``new_lens`` assigns their rows to requests.
    """

    max_bs: int
    max_num_tokens: int
    pages: int
    level: GraphLevel = GraphLevel.UNIFORM

    def check(self, geometry: Geometry) -> None:
        """Raise PlanError for a batch that cannot be captured."""
        mode, requests, rows, pages = geometry.mode, geometry.requests, geometry.rows, geometry.page_table.shape[1]
        if mode not in _MODES[self.level]:
            raise PlanError(f"a batch in mode {mode} cannot be captured, only {', '.join(_MODES[self.level])}")
        read = {"seq_lens": geometry.seq_lens, "page_table": geometry.page_table}
        if mode not in _UNIFORM:
            if geometry.new_lens is None:
                raise PlanError(f"a captured {mode} needs new_lens, the new tokens of each request")
            read["new_lens"] = geometry.new_lens
        if geometry.tree is not None:
            read["tree"] = geometry.tree
        for name, tensor in read.items():
            if tensor.stride(-1) != 1:
                raise PlanError(f"a captured batch needs contiguous rows of {name}, not strides {tensor.stride()}")
        if mode in _UNIFORM and (not requests or rows % requests or (mode.is_decode and rows != requests)):
            raise PlanError(
                f"a captured batch needs equally many rows per request, not {rows} rows for {requests} requests"
            )
        if not requests or not rows:
            raise PlanError(f"a captured batch needs requests and rows, not {requests} and {rows}")
        if requests > self.max_bs or rows > self.max_num_tokens or pages > self.pages:
            raise PlanError(
                f"a batch of {requests} requests, {rows} rows and {pages} pages per request exceeds the memory for "
                f"graphs, reserved for {self.max_bs} requests, {self.max_num_tokens} rows and {self.pages} pages"
            )


class Captures:
    """Plans of captured batch shapes, by lane and step. A plan is made at capture and looked up at every replay.

    Graphs of one lane run in sequence and share its memory. Graphs of different lanes share nothing.
    """

    def __init__(self, backend: BackendId) -> None:
        self._backend = backend
        self._limits: GraphLimits | None = None
        self._memory: tuple[Any, ...] = ()
        self._plans: dict[tuple[int, ForwardMode, int, int, int, bool, bool, int], Plan] = {}

    def reserve(self, limits: GraphLimits, memory: Callable[[], tuple[Any, ...]]) -> None:
        """Allocate the memory of every lane. Raises BackendError if called twice."""
        if self._limits is not None:
            raise BackendError(
                f"backend {self._backend.name} has already reserved memory for CUDA graphs, and captured graphs hold "
                "its addresses; call init_cuda_graph_state once, with the largest sizes to capture"
            )
        self._memory, self._limits = memory(), limits

    def plan(self, geometry: Geometry, capture: Callable[[Geometry, Any], Plan] | None) -> Plan:
        """Return the plan of this batch shape; if there is none, ``capture`` makes it in the memory of its lane."""
        if self._limits is None:
            raise BackendError(
                f"backend {self._backend.name} has reserved no memory for CUDA graphs; call init_cuda_graph_state first"
            )
        uniform, width = geometry.new_lens is None, geometry.page_table.shape[1]
        tree, step = geometry.tree is not None, geometry.step
        shape = (geometry.lane, geometry.mode, geometry.requests, geometry.rows, width, uniform, tree, step)
        plan = self._plans.get(shape)
        if plan is None:
            self._limits.check(geometry)
            if capture is None:
                where = f"in lane {geometry.lane}" + f" for step {step}" * (step > 0)
                raise PlanError(
                    f"a {geometry.mode} batch of {geometry.requests} requests, {geometry.rows} rows and {width} pages "
                    f"per request{', with trees,' * tree} was never captured {where}; plan it with in_capture=True and "
                    "capture it first"
                )
            plan = self._plans[shape] = capture(geometry, self._memory[geometry.lane])
        return plan
