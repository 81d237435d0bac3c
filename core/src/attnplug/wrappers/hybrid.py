"""Hybrid of a full-attention backend and a linear one; each layer is routed to its own (A7, A8)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnplug.contract.backend import AttentionBackend, LinearBackend
from attnplug.contract.batch import ForwardBatch
from attnplug.contract.hooks import Hook
from attnplug.contract.mode import ForwardMode
from attnplug.contract.plan import Plan
from attnplug.declare.errors import BackendError, PlanError
from attnplug.declare.model import LayerSpec, ModelSpec
from attnplug.wrappers.forwarding import ForwardingBackend

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
