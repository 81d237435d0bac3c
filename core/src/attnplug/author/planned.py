"""Base class of backends that plan: identity, claims, lanes and captured graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from attnplug.author.graphs import Captures, GraphLimits
from attnplug.contract.batch import ForwardBatch
from attnplug.contract.context import BackendContext
from attnplug.contract.geometry import Geometry
from attnplug.contract.mode import ForwardMode
from attnplug.contract.plan import BackendId, Plan
from attnplug.declare.claims import Claims
from attnplug.declare.errors import BackendError, PlanError
from attnplug.declare.problem import LARGEST_TREE, GraphLevel


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
        if self.claims.cuda_graph is not GraphLevel.NEVER:
            self._check_graph_methods()

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

    def _check_graph_methods(self) -> None:
        own = {"capture": "capture(geometry, memory)", "refill": "refill(plan, geometry)"}
        missing = [shown for name, shown in own.items() if getattr(type(self), name) is getattr(PlannedBackend, name)]
        if missing:
            raise BackendError(
                f"backend {self.backend_id.name} claims cuda_graph {self.claims.cuda_graph.name}, but defines no "
                f"{' and no '.join(missing)}; define it, or claim GraphLevel.NEVER"
            )

    def check_geometry(self, geometry: Geometry) -> None:
        """Raise PlanError for a batch with another page size, an unknown lane, or unsupported trees."""
        if geometry.page_size != self.context.page_size:
            raise PlanError(
                f"the batch's page size is {geometry.page_size}, but backend {self.backend_id.name} was built for "
                f"{self.context.page_size}"
            )
        self.check_lane(geometry.lane)
        if geometry.tree is not None:
            self._check_tree(geometry, geometry.tree)

    def _check_tree(self, geometry: Geometry, tree: Tensor) -> None:
        """Raise PlanError for a tree that this backend would run as a chain, or misread."""
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
