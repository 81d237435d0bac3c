"""The base of a backend that plans: its identity, its claims, its lanes and its captured graphs."""

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
    """Plans batches by their geometry, eager and for CUDA graphs.

    Subclass contract. ``plan`` makes the plan of an eager batch. A backend that claims CUDA graphs defines ``capture``
    and ``refill`` too, and ``reserve`` if captured kernels read memory of its own. Claims are those of the spec unless
    the constructor is given narrower ones.
    """

    def __init__(self, context: BackendContext, claims: Claims | None = None) -> None:
        self.context = context
        self.backend_id = BackendId(context.name)
        self.claims = context.declared.claims if claims is None else claims
        self._captures = Captures(self.backend_id)
        self._check_graph_methods()

    @abstractmethod
    def plan(self, geometry: Geometry) -> Plan:
        """The plan of an eager batch: ``Plan.of(self.backend_id, geometry, metadata, new_slots)``."""

    def reserve(self, limits: GraphLimits) -> Any:
        """Memory of one lane for captured batches of up to ``limits``. Its addresses never change afterwards."""
        return None

    def capture(self, geometry: Geometry, memory: Any) -> Plan:
        """The plan of a shape that was not captured before, in a lane's memory. It serves every replay."""
        raise NotImplementedError  # a backend that claims graphs is not built without it

    def refill(self, plan: Plan, geometry: Geometry) -> None:
        """Make what changes from replay to replay, inside the graph, from the lengths and pages on the device."""
        raise NotImplementedError

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan:
        self.check_geometry(batch.geometry)
        return self.plan(batch.geometry)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        level, limits = self.claims.cuda_graph, self.context.limits
        if level is GraphLevel.NEVER:
            raise BackendError(f"backend {self.backend_id.name} runs outside of CUDA graphs only, as it is built here")
        most = GraphLimits(max_bs, max_num_tokens, -(-limits.max_context // self.context.page_size), level)
        self._captures.reserve(most, lambda: tuple(self.reserve(most) for _ in range(limits.lanes)))

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> Plan:
        """The plan of a captured shape, always the same: what changes from replay to replay is made in the graph."""
        self.check_geometry(forward_batch.geometry)
        return self._captures.plan(forward_batch.geometry, self.capture if in_capture else None)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        geometry = forward_batch.geometry
        self.refill(self._captures.plan(geometry, None), geometry)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Padded requests have no rows: nothing is read or written for them."""
        return 0

    def _check_graph_methods(self) -> None:
        level = self.claims.cuda_graph
        own = {"capture": "capture(geometry, memory)", "refill": "refill(plan, geometry)"}
        missing = [shown for name, shown in own.items() if getattr(type(self), name) is getattr(PlannedBackend, name)]
        if level is not GraphLevel.NEVER and missing:
            raise BackendError(
                f"backend {self.backend_id.name} claims cuda_graph {level.name}, but defines no "
                f"{' and no '.join(missing)}; define it, or claim GraphLevel.NEVER"
            )

    def check_geometry(self, geometry: Geometry) -> None:
        """Refuse a batch for which this backend was not built: of other pages, in a lane that it does not have, or with
        trees that it does not serve."""
        if geometry.page_size != self.context.page_size:
            raise PlanError(
                f"a batch has a table of pages of {geometry.page_size} tokens, and backend {self.backend_id.name} was "
                f"built for pages of {self.context.page_size}"
            )
        self.check_lane(geometry.lane)
        if geometry.tree is not None:
            self._check_tree(geometry, geometry.tree)

    def _check_tree(self, geometry: Geometry, tree: Tensor) -> None:
        """Refuse a tree that this backend would run as a chain, or read wrongly."""
        name, rows, ragged = self.backend_id.name, geometry.max_new, geometry.new_lens is not None
        if geometry.mode is not ForwardMode.TARGET_VERIFY or ragged:
            raise PlanError(
                f"a batch in mode {geometry.mode}{' with new_lens' * ragged} has a tree; trees are for mode "
                f"{ForwardMode.TARGET_VERIFY} without new_lens: equally many new rows of every request"
            )
        if rows > LARGEST_TREE:
            raise PlanError(f"a batch has trees of {rows} rows a request; give up to {LARGEST_TREE}, a bit for each")
        shape = (geometry.requests, rows)
        if tree.dtype is not torch.int64 or tree.shape != shape or tree.device != geometry.device:
            raise PlanError(
                f"tree is {tree.dtype} of shape {tuple(tree.shape)} on {tree.device}; give torch.int64 of shape "
                f"{shape} (requests, new rows) on {geometry.device}"
            )
        if not self.claims.trees:
            raise PlanError(
                f"a batch has trees of {rows} rows a request, and backend {name} takes chains only; verify chains, or "
                "choose a backend that claims trees"
            )
        for layer in self.context.model.full_layers:
            if layer.sliding_window is not None:
                raise PlanError(
                    f"a batch has trees of {rows} rows a request, and layer {layer.layer_id} of backend {name} has a "
                    f"sliding window of {layer.sliding_window} tokens; verify chains: a window counts a row's depth, "
                    "which a tree does not say"
                )

    def check_lane(self, lane: int) -> None:
        """Refuse a lane that this backend does not have."""
        lanes = self.context.limits.lanes
        if not 0 <= lane < lanes:
            raise PlanError(
                f"a batch is in lane {lane}, and backend {self.backend_id.name} was built for {lanes}; build it with "
                f"Limits(lanes={lane + 1}) or more"
            )
