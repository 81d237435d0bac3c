"""Base classes of backends that plan, and of those that attend over cached rows: everything but the kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnplug.author.served_layers import NO_EXTRAS, NewRows, ServedLayers, output_width
from attnplug.contract.backend import ForwardExtras
from attnplug.contract.batch import BackendId, ForwardBatch, Plan, describe_result
from attnplug.contract.context import BackendContext
from attnplug.contract.geometry import Geometry
from attnplug.declare.capabilities import Claims
from attnplug.declare.errors import BackendError, PlanError
from attnplug.declare.model import LayerSpec
from attnplug.declare.problem import LARGEST_TREE, ExtendPath, ForwardMode, GraphLevel

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
    """Largest batch that can be captured, with a page table ``[max_bs, pages]``.

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


class PlannedBackend(ABC):
    """Planning hooks of ``AttentionBackend`` in terms of ``plan``, ``reserve``, ``capture`` and ``refill``.

    Subclass contract: define ``plan``, for eager batches. A backend that claims CUDA graphs also defines ``capture``
    and ``refill``, and ``reserve`` if captured kernels read memory of its own. ``claims`` default to the spec's.
    """

    def __init__(self, context: BackendContext, claims: Claims | None = None) -> None:
        self.context = context
        self.backend_id = BackendId(context.name)
        self.claims = context.declared.claims if claims is None else claims
        self._captures = Captures(self.backend_id)
        for name in {name for base in type(self).__mro__ for name in getattr(base, "__abstractmethods__", ())}:
            if not callable(method := getattr(self, name)):
                raise BackendError(f"{name} of backend {context.name} is {method!r}, which cannot be called")
        own = {"capture": "capture(geometry, memory)", "refill": "refill(plan, geometry)"}
        missing = [shown for name, shown in own.items() if getattr(type(self), name) is getattr(PlannedBackend, name)]
        if missing and self.claims.cuda_graph is not GraphLevel.NEVER:
            raise BackendError(
                f"backend {self.backend_id.name} claims cuda_graph {self.claims.cuda_graph.name}, but defines no "
                f"{' and no '.join(missing)}; define it, or claim GraphLevel.NEVER"
            )

    @abstractmethod
    def plan(self, geometry: Geometry) -> Plan:
        """Plan an eager batch: return ``Plan.of(self.backend_id, geometry, metadata, new_slots)``."""

    def reserve(self, limits: GraphLimits) -> Any:
        """Allocate one lane's memory for captured batches of up to ``limits``. Its addresses must never change."""
        return None

    def capture(self, geometry: Geometry, memory: Any) -> Plan:
        """Plan a shape that is captured for the first time, in a lane's memory. The plan serves every replay."""
        raise NotImplementedError  # a backend that claims graphs is not built without it

    def refill(self, plan: Plan, geometry: Geometry) -> None:
        """Update the plan's tensors from the lengths and pages on the device, inside the graph, at every replay."""
        raise NotImplementedError

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan:
        geometry = batch.geometry.live()
        self.check_geometry(geometry)
        return self.plan(geometry)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        level, limits = self.claims.cuda_graph, self.context.limits
        if level is GraphLevel.NEVER:
            raise BackendError(f"backend {self.backend_id.name}, as built here, cannot run inside CUDA graphs")
        largest = GraphLimits(max_bs, max_num_tokens, -(-limits.max_context // self.context.page_size), level)
        self._captures.reserve(largest, lambda: tuple(self.reserve(largest) for _ in range(limits.lanes)))

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> Plan:
        """Return the plan of a captured shape. It never changes; ``refill`` updates its tensors inside the graph."""
        self.check_geometry(forward_batch.geometry)
        return self._captures.plan(forward_batch.geometry, self.capture if in_capture else None)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        geometry = forward_batch.geometry
        self.refill(self._captures.plan(geometry, None), geometry)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of padded requests: 0, so nothing is read or written for them."""
        return 0

    def check_geometry(self, geometry: Geometry) -> None:
        """Raise PlanError for a batch with another page size, an unknown lane, or unsupported trees."""
        if geometry.page_size != self.context.page_size:
            raise PlanError(
                f"the batch's page size is {geometry.page_size}, but backend {self.backend_id.name} was built for "
                f"{self.context.page_size}"
            )
        self.check_lane(geometry.lane)
        if (tree := geometry.tree) is None:
            return
        name, rows, ragged = self.backend_id.name, geometry.max_new, geometry.new_lens is not None
        trees, shape = f"a batch has trees of {rows} rows per request", (geometry.requests, rows)
        if geometry.mode is not ForwardMode.TARGET_VERIFY or ragged:
            raise PlanError(
                f"a batch in mode {geometry.mode}{' with new_lens' * ragged} has a tree; trees require mode "
                f"{ForwardMode.TARGET_VERIFY} without new_lens: equally many new rows per request"
            )
        if rows > LARGEST_TREE:
            raise PlanError(f"{trees}; give up to {LARGEST_TREE}, one bit each")
        if tree.dtype is not torch.int64 or tree.shape != shape or tree.device != geometry.device:
            raise PlanError(
                f"tree is {tree.dtype} of shape {tuple(tree.shape)} on {tree.device}; give torch.int64 of shape "
                f"{shape} (requests, new rows) on {geometry.device}"
            )
        if not self.claims.trees:
            raise PlanError(
                f"{trees}, and backend {name} takes chains only; verify chains, or choose a backend that claims trees"
            )
        for layer in self.context.model.full_layers:
            if layer.sliding_window is not None:
                raise PlanError(
                    f"{trees}, and layer {layer.layer_id} of backend {name} has a sliding window of "
                    f"{layer.sliding_window} tokens, which counts a row's depth in its tree; verify chains"
                )

    def check_lane(self, lane: int) -> None:
        """Raise PlanError for a lane that this backend does not have."""
        lanes = self.context.limits.lanes
        if not 0 <= lane < lanes:
            raise PlanError(
                f"the batch is in lane {lane}, but backend {self.backend_id.name} has {lanes} lanes; build it with "
                f"Limits(lanes={lane + 1}) or more"
            )


class PlannedAttention(PlannedBackend):
    """``forward_extend`` and ``forward_decode`` in terms of ``attend``.

    Looks up the plan and refuses another backend's, validates the call, writes the new rows to the cache, and returns
    zeros for padding (B5). Subclass contract: define ``plan`` and ``attend``. ::

        class MyBackend(PlannedAttention):
            def plan(self, geometry):
                return Plan.of(self.backend_id, geometry, make_metadata(geometry), geometry.new_slots())

            def attend(self, q, layer, plan, new, extras):
                return my_kernel(q, self.context.pools.mha.keys(layer.layer_id), ..., plan.metadata)
    """

    def __init__(self, context: BackendContext, claims: Claims | None = None) -> None:
        super().__init__(context, claims)
        self.layers = ServedLayers(context, self.claims.extras)

    @abstractmethod
    def attend(self, q: Tensor, layer: LayerSpec, plan: Plan, new: NewRows | None, extras: ForwardExtras) -> Tensor:
        """Run one layer over the planned rows; there is at least one.

        q is ``[plan.query_rows, heads, width]``; ``extras.q_rope`` and ``extras.selected`` have as many rows. ``new``
        is (k, v) with as many rows, already written to the cache; ``None`` if the cache had them before the call.
        Unless it is ``None``, write the entries that ``extras.entries`` complete. Fill ``extras.lse`` if given.
        Returns ``[plan.query_rows, heads, v_width]``, preferably in ``extras.out``; another tensor is copied there.
        """

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        *,
        save_kv_cache: bool = True,
        extras: ForwardExtras | None = None,
    ) -> Tensor:
        plan = batch.plan_for(self.backend_id, q.shape[0], decode=False)
        return self.run_plan(plan, q, k, v, layer, batch, save_kv_cache, extras)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        *,
        save_kv_cache: bool = True,
        extras: ForwardExtras | None = None,
    ) -> Tensor:
        plan = batch.plan_for(self.backend_id, q.shape[0], decode=True)
        return self.run_plan(plan, q, k, v, layer, batch, save_kv_cache, extras)

    def run_plan(
        self,
        plan: Plan,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        save_kv_cache: bool,
        extras: ForwardExtras | None,
    ) -> Tensor:
        """Run one layer of a planned batch; see ``AttentionBackend.forward_extend``."""
        given_rows = self.layers.check(layer, q, None if extras is None else extras.q_rope)
        plain = extras is None and not layer.sinks and layer.indexer is None
        wanted = NO_EXTRAS if plain else self.layers.check_extras(layer, q, extras)
        rows, new = plan.query_rows, None
        if rows and self.takes_rows(plan, save_kv_cache):
            new = self.layers.new_rows(layer, k, v, rows)
            if save_kv_cache:
                if plan.new_slots is None and batch.geometry.calls:
                    raise PlanError(
                        f"the batch was planned to run as MHA, so {self.backend_id.name} has no plan to run it "
                        f"absorbed; plan it again for the path {ExtendPath.ABSORBED}"
                    )
                self.layers.write(layer, plan, new)
        if rows != given_rows or not rows:
            return self._padded(plan, q, layer, new, wanted)
        out = self.attend(q, layer, plan, new, wanted)
        return out if wanted.out is None or wanted.out is out else self._copy_to(wanted.out, out)

    def takes_rows(self, plan: Plan, save_kv_cache: bool) -> bool:
        """Return True if a call needs k and v; most backends need them only to write them."""
        return save_kv_cache

    def _padded(self, plan: Plan, q: Tensor, layer: LayerSpec, new: NewRows | None, wanted: ForwardExtras) -> Tensor:
        rows, lse = plan.query_rows, wanted.lse
        out = q.new_empty(*q.shape[:2], output_width(layer)) if wanted.out is None else wanted.out
        out[rows:] = 0
        if lse is not None:
            lse[rows:] = float("-inf")
        if rows:
            part = wanted.first(rows, out)
            assert part.out is not None
            result = self.attend(q[:rows], layer, plan, new, part)
            if result is not part.out:
                self._copy_to(part.out, result)
        return out

    def _copy_to(self, out: Tensor, result: Tensor) -> Tensor:
        if not isinstance(result, Tensor) or result.shape != out.shape:  # copy_ would broadcast it
            raise BackendError(
                f"attend of {self.backend_id.label} returned {describe_result(result)}; it must return a tensor of "
                f"shape {tuple(out.shape)}"
            )
        return out.copy_(result)
