"""A full-attention backend and a linear one behind the face of one; each layer goes to its own (A7, A8)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnplug.contract.backend import AttentionBackend, ForwardExtras, LinearBackend
from attnplug.contract.batch import ForwardBatch
from attnplug.contract.plan import ForwardMode, Plan
from attnplug.contract.ragged import RaggedCall
from attnplug.declare.errors import BackendError, PlanError
from attnplug.declare.model import LayerSpec, ModelSpec
from attnplug.wrappers.forwarding import ForwardingBackend

FULL, LINEAR = "full", "linear"


class HybridLinearBackend(ForwardingBackend):
    """Routes layers by their ids, from a table made once.

    A batch is planned by both children; only a draft's extend, which touches no state, by the full one alone. What the
    full child says of prefill (its chunk hook, whatever its signature, its ragged attention) is the wrapper's own
    answer. ``full`` is ``None`` for a model all of whose layers are linear.
    """

    def __init__(self, full: AttentionBackend | None, linear: LinearBackend, model: ModelSpec) -> None:
        children: dict[str, Any] = {FULL: full, LINEAR: linear} if full is not None else {LINEAR: linear}
        names = ", ".join(child.backend_id.name for child in children.values())
        # How an extend runs, and what a softmax honours beside it, is the full backend's affair alone.
        decided_by = {"mla_extend": FULL, "extras": FULL} if full is not None else None
        super().__init__(f"hybrid({names})", children, decided_by)
        self._full, self._linear = full, linear
        self._route = {layer.layer_id: LINEAR if layer.kind.is_linear else FULL for layer in model.layers}
        if full is None and FULL in self._route.values():
            layer_id = next(layer_id for layer_id, label in self._route.items() if label == FULL)
            raise BackendError(
                f"layer {layer_id} of {model.name} is a full-attention layer, but {self.backend_id.name} has no "
                "backend for it"
            )

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan:
        made = {label: self.children[label].init_forward_metadata(batch) for label in self._planning(batch)}
        return self.plan_of(batch, made, "init_forward_metadata")

    def _planning(self, batch: ForwardBatch) -> list[str]:
        """The children that a batch is planned by, eager and in graphs."""
        if batch.forward_mode is ForwardMode.DRAFT_EXTEND:
            if self._full is None:
                raise PlanError(f"{self.backend_id.name} has linear layers only, and a draft's extend touches no state")
            return [FULL]
        return list(self.children)

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
        full = self._full_for(layer)
        return full.forward_extend(q, k, v, layer, batch, save_kv_cache=save_kv_cache, extras=extras)

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
        full = self._full_for(layer)
        return full.forward_decode(q, k, v, layer, batch, save_kv_cache=save_kv_cache, extras=extras)

    def _full_for(self, layer: LayerSpec) -> AttentionBackend:
        if self._route.get(layer.layer_id) != FULL or self._full is None:
            raise self._misrouted(layer, FULL)
        return self._full

    def _misrouted(self, layer: LayerSpec, asked: str) -> BackendError:
        known = self._route.get(layer.layer_id)
        if known is None:
            return BackendError(
                f"layer {layer.layer_id} is not one of the model that {self.backend_id.name} was built for, whose "
                f"layers are {sorted(self._route)}"
            )
        return BackendError(f"layer {layer.layer_id} is a {known} layer, but was run as a {asked} one")

    def init_mha_chunk_metadata(
        self, forward_batch: ForwardBatch, disable_flashinfer_ragged: bool = False
    ) -> Plan | None:
        """The full child's answer, by its own signature; a child without the hook has nothing to plan (A8)."""
        if self._full is None:
            raise PlanError(
                f"{self.backend_id.name} was asked to plan the chunks of an MLA prefill, and its model has no "
                "full-attention layer"
            )
        hook = self.child_hook(FULL, "init_mha_chunk_metadata")
        if hook is None:
            return None
        plan: Plan | None = hook(forward_batch, disable_flashinfer_ragged)
        return plan

    def forward_ragged(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: LayerSpec,
        batch: ForwardBatch,
        call: RaggedCall,
        lse: Tensor | None = None,
    ) -> Tensor:
        out: Tensor = self.required_hook(FULL, "forward_ragged")(q, k, v, layer, batch, call, lse)
        return out

    def forward_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, layer: LayerSpec, batch: ForwardBatch, silu: bool
    ) -> Tensor:
        if self._route.get(layer.layer_id) != LINEAR:
            raise self._misrouted(layer, LINEAR)
        out: Tensor = self.required_hook(LINEAR, "forward_conv")(x, weight, bias, layer, batch, silu)
        return out

    def forward_linear(self, inputs: Any, layer: LayerSpec, batch: ForwardBatch) -> Tensor:
        if self._route.get(layer.layer_id) != LINEAR:
            raise self._misrouted(layer, LINEAR)
        out: Tensor = self.required_hook(LINEAR, "forward_linear")(inputs, layer, batch)
        return out

    def commit_states(self, forward_batch: ForwardBatch, accepted: Tensor) -> None:
        self.required_hook(LINEAR, "commit_states")(forward_batch, accepted)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for label in self.children:
            self.required_hook(label, "init_cuda_graph_state")(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> Plan:
        hook = "init_forward_metadata_out_graph"
        hooks = {label: self.required_hook(label, hook) for label in self._planning(forward_batch)}
        made = {label: plan(forward_batch, in_capture) for label, plan in hooks.items()}
        return self.plan_of(forward_batch, made, hook)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        for label in self._planning(forward_batch):
            self.required_hook(label, "init_forward_metadata_in_graph")(forward_batch)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The full child's, whose cache it is about: a linear child looks at slots, and -1 marks what is padded."""
        label = FULL if self._full is not None else LINEAR
        return int(self.required_hook(label, "get_cuda_graph_seq_len_fill_value")())
