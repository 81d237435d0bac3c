"""Per-batch dispatch: the fastest of several backends plans and runs each batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from attnplug.auto.schedule import BackendSchedule, ExtendSchedule
from attnplug.contract.backend import AttentionBackend
from attnplug.contract.batch import ForwardBatch, Plan, received_plan
from attnplug.contract.geometry import Geometry, is_ragged
from attnplug.contract.inputs import RaggedCall
from attnplug.declare.model import LayerSpec
from attnplug.declare.problem import ForwardMode, GraphLevel, Role
from attnplug.wrappers.forwarding import ForwardingBackend, role_of_modes, weakest_by_role

_SAMPLED = 16
"""Requests whose lengths are read. Of larger batches, a strided sample of about this many is."""
_EXTENDS = (ForwardMode.EXTEND, ForwardMode.MIXED)
_CHUNKS, _RAGGED = "init_mha_chunk_metadata", "forward_ragged"


class FastestBackend(ForwardingBackend):
    """Wrapper that plans each batch on the child a schedule names. All layers of a batch run on that child.

    ``serving`` maps each role to the schedule of the children that share it, or to the name of its only child. All
    children read and write the same cache, so a request may move between them at every step. A plan of this wrapper
    holds the plan of one child, which identifies the child that runs it. Without a plan, or with another backend's, the
    child that would plan the batch refuses to run it. ``left_out`` maps backends that were removed from a schedule to
    the reason. ``captured_extends`` is the child that serves all extends captured in CUDA graphs, if given: in a short
    extend, kernel launches, which a graph saves, take longer than any kernel.
    """

    def __init__(
        self,
        children: Mapping[str, AttentionBackend],
        serving: Mapping[Role, BackendSchedule | str],
        *,
        verify: Role = Role.DECODE,
        left_out: Mapping[str, str] | None = None,
        captured_extends: str | None = None,
    ) -> None:
        super().__init__(f"fastest({', '.join(children)})", children)
        self.left_out |= left_out or {}
        names = {role: (by,) if isinstance(by, str) else by.candidates for role, by in serving.items()}
        first = next(iter(serving))
        self._prefilling, decoding = names.get(Role.PREFILL, names[first]), names.get(Role.DECODE, names[first])
        if len(names) > 1:
            claims = {label: child.claims for label, child in children.items()}
            combined = weakest_by_role(claims, self._prefilling, decoding)
            self.claims, self.limiting_children = combined.claims, combined.limited_by
        self.claims = replace(self.claims, invariant=self.claims.invariant & {"run"})  # the batch chooses the child
        self.captured = tuple(children) if self.claims.cuda_graph > GraphLevel.DECODE else decoding
        if captured_extends is not None:
            self.captured_extends = captured_extends
            self.claims = replace(self.claims, ragged_graphs=children[captured_extends].claims.ragged_graphs)
            self.captured = tuple(dict.fromkeys((*self.captured, captured_extends)))
        self.by_mode = {mode: serving.get(role, serving[first]) for mode, role in role_of_modes(verify).items()}
        """Schedule, or label of the only child, by mode."""
        self._replayed: dict[int, Plan] = {}
        """Plans by ``id`` of the child's plan, which each holds. Most children return the same plan at every replay."""
        self._label_of = {child.backend_id: (label,) for label, child in children.items()}
        if getattr(self, _CHUNKS) is None and getattr(self, _RAGGED) is not None:
            delattr(self, _CHUNKS)  # ragged calls have no batch; the plan names the child that runs them

    def route(self, batch: ForwardBatch | None, layer: LayerSpec | None) -> tuple[str, ...]:
        if batch is None:
            return self._prefilling[:1]
        own = None if batch.plan is None else batch.plan.attention.part_of(self.backend_id)
        return (self.fastest(batch.geometry),) if own is None else self._label_of[own.parts[0].planner]

    def fastest(self, geometry: Geometry) -> str:
        """Label of the child that plans a batch. For a captured batch of unknown lengths, it is the best one over all
        lengths up to the batch's bound."""
        if geometry.captured and self.captured_extends is not None and geometry.mode in _EXTENDS:
            return self.captured_extends
        by = self.by_mode[geometry.mode]
        if isinstance(by, str):
            return by
        requests, host, typical = geometry.requests or 1, geometry.host, geometry.typical
        if host is not None and isinstance(by, ExtendSchedule):
            times = by.expected_extend(host.query_lens, host.kv_lens)
            return min(times, key=lambda name: (times[name], name))
        if typical is not None:
            mean, longest = typical
        elif host is not None:
            lens = host.kv_lens if requests <= _SAMPLED else host.kv_lens[:: requests // _SAMPLED]
            mean, longest = (sum(lens) // len(lens), max(lens)) if lens else (0, 0)
        elif geometry.captured:
            return by.overall(requests, geometry.rows // requests or 1, geometry.max_seq_len)
        else:
            mean = longest = geometry.max_seq_len
        return by.fastest(requests, mean, geometry.rows // requests or 1, is_ragged(mean, longest))

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan:
        label, name = self.fastest(batch.geometry), "init_forward_metadata"
        return self.plan_of(batch, {label: self.required(label, name)(batch)}, name)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> Plan:
        label, name = self.fastest(forward_batch.geometry), "init_forward_metadata_out_graph"
        made = self.required(label, name)(forward_batch, in_capture)
        plan = self._replayed.get(id(made))
        if plan is None:
            plan = self.plan_of(forward_batch, {label: made}, name)
            if in_capture:
                self._replayed[id(made)] = plan
        return plan

    def init_mha_chunk_metadata(
        self, forward_batch: ForwardBatch, disable_flashinfer_ragged: bool = False
    ) -> Plan | None:
        """Return a plan that names the child, even if that child has nothing to plan (A6, A8)."""
        geometry, parts = forward_batch.geometry, tuple[Plan, ...]()
        label = self.fastest(geometry)
        planned = self.chunk_plan(label, forward_batch, disable_flashinfer_ragged)
        if planned is not None:
            planner, rows = self.children[label].backend_id, forward_batch.num_tokens
            parts = (received_plan(planned, planner, geometry.mode, rows, _CHUNKS, delegated=True),)
        return Plan(self.backend_id, geometry.mode, geometry.rows, geometry.kv_rows, metadata=label, parts=parts)

    def forward_ragged(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: LayerSpec,
        call: RaggedCall,
        plan: Plan | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Run on the child that planned the batch, or without a plan on the first child that prefills."""
        label, own = self._prefilling[0], plan.part_of(self.backend_id) if isinstance(plan, Plan) else None
        if own is not None:
            label, plan = own.metadata, own.parts[0] if own.parts else None
        out: Tensor = self.required(label, _RAGGED)(q, k, v, layer, call, plan, lse)
        return out
