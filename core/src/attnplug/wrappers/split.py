"""One backend for prefill and another for decode, behind the face of one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnplug.contract.backend import AttentionBackend, ForwardExtras
from attnplug.contract.batch import ForwardBatch
from attnplug.contract.hooks import Hook
from attnplug.contract.plan import ForwardMode, Plan
from attnplug.contract.ragged import RaggedCall
from attnplug.declare.model import LayerSpec
from attnplug.declare.problem import Role
from attnplug.wrappers.forwarding import ForwardingBackend


class SplitBackend(ForwardingBackend):
    """Routes a batch by its mode: decode and idle to ``decode``, everything else to ``prefill``.

    Target verify is an extend of a few tokens, which either kind of kernel may serve better: ``verify`` says which
    child takes it. A plan holds that of one child, so a batch whose mode changes after planning is refused by the child
    that did not plan it.
    """

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend, *, verify: Role = Role.PREFILL) -> None:
        if verify not in (Role.PREFILL, Role.DECODE):
            raise ValueError(f"verify goes to {Role.PREFILL} or {Role.DECODE}, not to {verify}")
        super().__init__(
            f"split({prefill.backend_id.name}, {decode.backend_id.name})",
            {Role.PREFILL: prefill, Role.DECODE: decode},
            decided_by={"mla_extend": Role.PREFILL},  # the decode backend takes no part in an extend
        )
        self._route = {mode: Role.DECODE if mode in _DECODE_MODES else Role.PREFILL for mode in ForwardMode}
        self._route[ForwardMode.TARGET_VERIFY] = verify

    def _child(self, batch: ForwardBatch) -> AttentionBackend:
        return self.children[self._route[batch.forward_mode]]

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan:
        label = self._route[batch.forward_mode]
        return self.plan_of(batch, {label: self.children[label].init_forward_metadata(batch)}, "init_forward_metadata")

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
        return self._child(batch).forward_extend(q, k, v, layer, batch, save_kv_cache=save_kv_cache, extras=extras)

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
        return self._child(batch).forward_decode(q, k, v, layer, batch, save_kv_cache=save_kv_cache, extras=extras)

    def init_mha_chunk_metadata(
        self, forward_batch: ForwardBatch, disable_flashinfer_ragged: bool = False
    ) -> Plan | None:
        """Chunks are a matter of prefill; a prefill backend without the hook has nothing to plan."""
        hook = self.child_hook(Role.PREFILL, "init_mha_chunk_metadata")
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
        out: Tensor = self.required_hook(Role.PREFILL, "forward_ragged")(q, k, v, layer, batch, call, lse)
        return out

    def forward_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, layer: LayerSpec, batch: ForwardBatch, silu: bool
    ) -> Tensor:
        out: Tensor = self._linear_hook(batch, "forward_conv")(x, weight, bias, layer, batch, silu)
        return out

    def forward_linear(self, inputs: Any, layer: LayerSpec, batch: ForwardBatch) -> Tensor:
        out: Tensor = self._linear_hook(batch, "forward_linear")(inputs, layer, batch)
        return out

    def commit_states(self, forward_batch: ForwardBatch, accepted: Tensor) -> None:
        self._linear_hook(forward_batch, "commit_states")(forward_batch, accepted)

    def _linear_hook(self, batch: ForwardBatch, hook: str) -> Hook:
        """Of the child that planned the batch, should it be one with linear layers of its own."""
        return self.required_hook(self._route[batch.forward_mode], hook)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for label in self.children:
            self.required_hook(label, "init_cuda_graph_state")(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> Plan:
        label, hook = self._route[forward_batch.forward_mode], "init_forward_metadata_out_graph"
        return self.plan_of(forward_batch, {label: self.required_hook(label, hook)(forward_batch, in_capture)}, hook)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        self.required_hook(self._route[forward_batch.forward_mode], "init_forward_metadata_in_graph")(forward_batch)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The larger of the children's: one batch is padded once, and both must be able to plan it."""
        return max(int(self.required_hook(label, "get_cuda_graph_seq_len_fill_value")()) for label in self.children)


_DECODE_MODES = (ForwardMode.DECODE, ForwardMode.IDLE)
