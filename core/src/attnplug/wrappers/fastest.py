"""Several backends that share their roles: each batch is planned by the one that is the fastest for it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from attnplug.contract.backend import AttentionBackend
from attnplug.contract.batch import ForwardBatch
from attnplug.contract.geometry import Geometry
from attnplug.contract.mode import ForwardMode
from attnplug.contract.plan import Plan, received_plan
from attnplug.contract.ragged import RaggedCall
from attnplug.declare.model import LayerSpec
from attnplug.declare.problem import GraphLevel, Role
from attnplug.declare.schedule import EVERY_LENGTH, Schedule, is_ragged
from attnplug.wrappers.forwarding import ForwardingBackend, Turn
from attnplug.wrappers.split import role_of_modes, weakest_by_role

_ENOUGH = 16
"""Requests whose lengths are looked at; of more than these, as many at even distances stand for all."""
_EXTENDS = (ForwardMode.EXTEND, ForwardMode.MIXED)
_CHUNKS, _RAGGED = "init_mha_chunk_metadata", "forward_ragged"


class FastestBackend(ForwardingBackend):
    """Asks a schedule, batch by batch, which child plans; all layers of a batch run on the child that planned it.

    ``serving`` says of each role which children share it, by a schedule that names them, or which one has it alone. All
    children read and write one cache, so a request may go from one to another at every step. A plan holds one child's
    plan, and says by this who runs it. Without one, or with another backend's, the child that would plan the batch
    refuses to run it. ``left_out`` are backends of a schedule that were not taken, by name, with the reason.
    ``captured_extends`` is the child that takes every extend of a CUDA graph, if there is one: of a short extend the
    launches, which a graph saves, take longer than any kernel.
    """

    def __init__(
        self,
        children: Mapping[str, AttentionBackend],
        serving: Mapping[Role, Schedule | str],
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
        self._captured = tuple(children) if self.claims.cuda_graph > GraphLevel.DECODE else decoding
        if captured_extends is not None:
            self.captured_extends = captured_extends
            self._captured = tuple(dict.fromkeys((*self._captured, captured_extends)))
        self._by_mode = {mode: serving.get(role, serving[first]) for mode, role in role_of_modes(verify).items()}
        self._replayed: dict[int, Plan] = {}
        """By the identity of a child's plan, which it holds: most children give a graph's plan again at each replay."""
        self._label_of = {child.backend_id: (label,) for label, child in children.items()}
        if getattr(self, _CHUNKS) is None and getattr(self, _RAGGED) is not None:
            delattr(self, _CHUNKS)  # its plan says which child runs the calls, which have no batch

    def route(self, batch: ForwardBatch | None, layer: LayerSpec | None) -> tuple[str, ...]:
        if batch is None:
            return self._prefilling[:1]
        own = None if batch.plan is None else batch.plan.attention.part_of(self.backend_id)
        return (self.fastest(batch.geometry),) if own is None else self._label_of[own.parts[0].planner]

    def fastest(self, geometry: Geometry) -> str:
        """The child to plan a batch with: where a batch is captured and nobody knows its lengths, the best one over all
        lengths up to its bound."""
        if geometry.captured and self.captured_extends is not None and geometry.mode in _EXTENDS:
            return self.captured_extends
        by = self._by_mode[geometry.mode]
        if isinstance(by, str):
            return by
        requests, host, typical = geometry.requests or 1, geometry.host, geometry.typical
        if typical is not None:
            mean, longest = typical
        elif host is not None:
            lens = host.kv_lens if requests <= _ENOUGH else host.kv_lens[:: requests // _ENOUGH]
            mean, longest = (sum(lens) // len(lens), max(lens)) if lens else (0, 0)
        elif geometry.captured:
            return by.overall(requests, geometry.rows // requests or 1, geometry.max_seq_len)
        else:
            mean = longest = geometry.max_seq_len
        return by.fastest(requests, mean, geometry.rows // requests or 1, is_ragged(mean, longest))

    def turns(self, mode: ForwardMode, requests: int, tokens: int, ragged: bool = False) -> tuple[Turn, ...]:
        by = self._by_mode[mode]
        if isinstance(by, str):
            return (Turn(EVERY_LENGTH, (by,)),)
        return tuple(Turn(upto, (name,)) for upto, name in by.crossings(requests, tokens, ragged))

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
        """A plan that names the child, also if that child has nothing to plan (A6, A8)."""
        geometry, parts = forward_batch.geometry, tuple[Plan, ...]()
        label = self.fastest(geometry)
        planned = None
        if self.has(label, _CHUNKS):
            planned = self.required(label, _CHUNKS)(forward_batch, disable_flashinfer_ragged)
        if planned is not None:
            who, rows = self.children[label].backend_id, forward_batch.num_tokens
            parts = (received_plan(planned, who, geometry.mode, rows, _CHUNKS, delegated=True),)
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
        """By the child that planned the call's batch; by the first that prefills where nobody planned one."""
        label, own = self._prefilling[0], plan.part_of(self.backend_id) if isinstance(plan, Plan) else None
        if own is not None:
            label, plan = own.metadata, own.parts[0] if own.parts else None
        out: Tensor = self.required(label, _RAGGED)(q, k, v, layer, call, plan, lse)
        return out

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for label in self._captured:
            self.required(label, "init_cuda_graph_state")(max_bs, max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The largest of the children's: graphs of all of them are padded alike, and each must be able to plan it."""
        return max(int(self.required(label, "get_cuda_graph_seq_len_fill_value")()) for label in self._captured)
