"""What a backend keeps for the shapes of batch that CUDA graphs capture, and which shapes it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Never

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
    """The largest batch that memory for graphs is made for. ``pages`` is the width of a page table.

    At level ``ALWAYS`` an extend is captured too. At each replay its ``new_lens`` say which rows are whose.
    """

    max_bs: int
    max_num_tokens: int
    pages: int
    level: GraphLevel = GraphLevel.UNIFORM

    def check(self, geometry: Geometry) -> None:
        """Refuse a batch that cannot be captured."""
        mode, requests, rows = geometry.mode, geometry.requests, geometry.rows
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
                raise PlanError(
                    f"a captured batch has {name} without gaps, not with strides {tensor.stride()}: kernels read it "
                    "where it lies"
                )
        if mode in _UNIFORM and (not requests or rows % requests or (mode.is_decode and rows != requests)):
            raise PlanError(
                f"a captured batch has equally many rows of every request, not {rows} rows for {requests} requests"
            )
        if not requests or not rows:
            raise PlanError(f"a captured batch has requests and rows, not {requests} and {rows}")
        if requests > self.max_bs or rows > self.max_num_tokens or geometry.page_table.shape[1] > self.pages:
            self._refuse_size(geometry)

    def _refuse_size(self, geometry: Geometry) -> Never:
        raise PlanError(
            f"a batch of {geometry.requests} requests, {geometry.rows} rows and {geometry.page_table.shape[1]} pages a "
            f"request does not fit the memory for graphs, of {self.max_bs} requests, {self.max_num_tokens} rows and "
            f"{self.pages} pages"
        )


class Captures:
    """The plan of each captured shape of batch, by lane and step. It is made once, and looked up at every replay.

    Graphs of one lane run one after the other and share its memory. Those of different lanes share nothing.
    """

    def __init__(self, backend: BackendId) -> None:
        self._backend = backend
        self._limits: GraphLimits | None = None
        self._memory: tuple[Any, ...] = ()
        self._plans: dict[tuple[int, ForwardMode, int, int, int, bool, bool, int], Plan] = {}

    def reserve(self, limits: GraphLimits, memory: Callable[[], tuple[Any, ...]]) -> None:
        """Make the memory of every lane; once."""
        if self._limits is not None:
            raise BackendError(
                f"backend {self._backend.name} has its memory for CUDA graphs already, and captured graphs hold its "
                "addresses; call init_cuda_graph_state once, with the most that will be captured"
            )
        self._memory, self._limits = memory(), limits

    def plan(self, geometry: Geometry, capture: Callable[[Geometry, Any], Plan] | None) -> Plan:
        """The plan of a batch of this shape; if there is none, ``capture`` makes it in the memory of its lane."""
        if self._limits is None:
            raise BackendError(
                f"backend {self._backend.name} has no memory for CUDA graphs; call init_cuda_graph_state first"
            )
        uniform, width = geometry.new_lens is None, geometry.page_table.shape[1]
        tree, step = geometry.tree is not None, geometry.step
        shape = (geometry.lane, geometry.mode, geometry.requests, geometry.rows, width, uniform, tree, step)
        plan = self._plans.get(shape)
        if plan is None:
            self._limits.check(geometry)
            if capture is None:
                where = f"in lane {shape[0]}" + f" for step {step}" * (step > 0)
                raise PlanError(
                    f"a {shape[1]} batch of {shape[2]} requests, {shape[3]} rows and {shape[4]} pages a request"
                    f"{', with trees,' * tree} was never captured {where}; plan it with in_capture=True and capture it "
                    "first"
                )
            plan = self._plans[shape] = capture(geometry, self._memory[geometry.lane])
        return plan
