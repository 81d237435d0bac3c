"""Wrappers that route by role: a batch by its mode, or a layer by its kind of attention."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from attnplug.contract.backend import AttentionBackend, Hook, LinearBackend
from attnplug.contract.batch import ForwardBatch, Plan
from attnplug.contract.geometry import ForwardMode
from attnplug.declare.claims import Claims, CombinedClaims, weakest
from attnplug.declare.errors import BackendError, PlanError
from attnplug.declare.model import LayerSpec, ModelSpec
from attnplug.declare.problem import GraphLevel, Role
from attnplug.wrappers.forwarding import ForwardingBackend

_DECODE_MODES = (ForwardMode.DECODE, ForwardMode.IDLE)


def role_of_modes(verify: Role) -> dict[ForwardMode, Role]:
    """Map modes to roles: decode and idle to decode, target verify to ``verify``, all others to prefill."""
    if verify not in (Role.PREFILL, Role.DECODE):
        raise ValueError(f"verify goes to {Role.PREFILL} or {Role.DECODE}, not to {verify}")
    found = {mode: Role.DECODE if mode in _DECODE_MODES else Role.PREFILL for mode in ForwardMode}
    return {**found, ForwardMode.TARGET_VERIFY: verify}


def weakest_by_role(claims: Mapping[str, Claims], prefill: Collection[str], decode: Collection[str]) -> CombinedClaims:
    """Combine the weakest claims of children, by label, that prefill or decode.

    A child that only decodes does not limit extends. A child that only prefills does not limit captured decodes.
    """
    decode_level = min(min(claims[label].cuda_graph for label in decode), GraphLevel.DECODE)
    paths = frozenset.intersection(*(claims[label].mla_extend for label in prefill))
    return weakest(
        {
            label: replace(
                own,
                cuda_graph=own.cuda_graph if label in decode else max(own.cuda_graph, decode_level),
                mla_extend=own.mla_extend if label in prefill else paths,
            )
            for label, own in claims.items()
        }
    )


class SplitBackend(ForwardingBackend):
    """Routes a batch by its mode: decode and idle to ``decode``, everything else to ``prefill``.

    Target verify is an extend of a few tokens, and either kind of kernel may be faster for it; ``verify`` is the role
    that runs it. A plan holds one child's plan, so a batch that changes its mode after planning is refused by the child
    that did not plan it. Only children that take part in a graph limit it: for a decode, the decode child alone.
    """

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend, *, verify: Role = Role.DECODE) -> None:
        name = f"split({prefill.backend_id.name}, {decode.backend_id.name})"
        super().__init__(name, {Role.PREFILL: prefill, Role.DECODE: decode})
        claims = {label: child.claims for label, child in self.children.items()}
        combined = weakest_by_role(claims, {Role.PREFILL}, {Role.DECODE})
        # The children's kernels differ: a decoded row has other bits than the same row prefilled.
        kept = combined.claims.invariant - {"chunks"} - ({"verify"} if verify is Role.PREFILL else set())
        self.claims, self.limiting_children = replace(combined.claims, invariant=kept), combined.limited_by
        self.captured = tuple(self.children) if self.claims.cuda_graph > GraphLevel.DECODE else (Role.DECODE,)
        self.child_of: dict[ForwardMode, tuple[str]] = {mode: (role,) for mode, role in role_of_modes(verify).items()}
        """Labels of the children that plan and run batches of each mode."""

    def route(self, batch: ForwardBatch | None, layer: LayerSpec | None) -> tuple[str, ...]:
        # Without a batch, a layer is run by ``forward_ragged``, which belongs to prefill.
        return (Role.PREFILL,) if batch is None else self.child_of[batch.forward_mode]

    def init_mha_chunk_metadata(
        self, forward_batch: ForwardBatch, disable_flashinfer_ragged: bool = False
    ) -> Plan | None:
        return self.chunk_plan(Role.PREFILL, forward_batch, disable_flashinfer_ragged)


FULL, LINEAR = "full", "linear"
_RUNS = {
    **dict.fromkeys(("forward_extend", "forward_decode", "forward_ragged", "select"), FULL),
    **dict.fromkeys(("forward_conv", "forward_linear", "forward_delta"), LINEAR),
}


class HybridLinearBackend(ForwardingBackend):
    """Routes layers by id, with a table made once.

    Both children plan a batch, except a draft's extend: it touches no state and is planned by the full child alone. The
    wrapper's prefill hooks (chunk planning, whatever its signature, and ragged attention) are the full child's.
    ``full`` is ``None`` for a model that has only linear layers.
    """

    def __init__(self, full: AttentionBackend | None, linear: LinearBackend, model: ModelSpec) -> None:
        children: dict[str, Any] = {FULL: full, LINEAR: linear} if full is not None else {LINEAR: linear}
        names = ", ".join(child.backend_id.name for child in children.values())
        # Extend paths and extras concern softmax attention only.
        decided_by = {"mla_extend": FULL, "extras": FULL} if full is not None else None
        super().__init__(f"hybrid({names})", children, decided_by)
        self._child_of = {layer.layer_id: (LINEAR if layer.kind.is_linear else FULL,) for layer in model.layers}
        if full is None and (FULL,) in self._child_of.values():
            layer_id = next(layer_id for layer_id, label in self._child_of.items() if label == (FULL,))
            raise BackendError(
                f"layer {layer_id} of {model.name} is a full-attention layer, but {self.backend_id.name} has no "
                "backend for it"
            )

    def route(self, batch: ForwardBatch | None, layer: LayerSpec | None) -> tuple[str, ...]:
        if layer is not None:
            try:
                return self._child_of[layer.layer_id]
            except KeyError:
                raise BackendError(
                    f"layer {layer.layer_id} is not one of the model that {self.backend_id.name} was built for, whose "
                    f"layers are {sorted(self._child_of)}"
                ) from None
        if batch is not None and batch.forward_mode is ForwardMode.DRAFT_EXTEND:
            if FULL not in self.children:
                raise PlanError(f"{self.backend_id.name} has linear layers only, and a draft's extend touches no state")
            return (FULL,)
        return tuple(self.children)

    def required(self, label: str, name: str) -> Hook:
        if (kind := _RUNS.get(name, label)) != label:
            raise BackendError(f"a {label} layer was run by {name}, which is for {kind} ones")
        return super().required(label, name)

    def init_mha_chunk_metadata(
        self, forward_batch: ForwardBatch, disable_flashinfer_ragged: bool = False
    ) -> Plan | None:
        if FULL not in self.children:
            raise PlanError(
                f"{self.backend_id.name} was asked to plan the chunks of an MLA prefill, and its model has no "
                "full-attention layer"
            )
        return self.chunk_plan(FULL, forward_batch, disable_flashinfer_ragged)

    def commit_states(self, forward_batch: ForwardBatch, accepted: Tensor) -> None:
        self.required(LINEAR, "commit_states")(forward_batch, accepted)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the full child's value: it concerns the KV cache. Linear children read slots, where -1 is padding."""
        label = FULL if FULL in self.children else LINEAR
        return int(self.required(label, "get_cuda_graph_seq_len_fill_value")())
