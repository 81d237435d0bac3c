"""The attention backend that SGLang sees: one of ours over SGLang's caches."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from attnplug import BackendError, ForwardExtras, ForwardMode, PlanError
from attnplug.host import HookError, ModelAttention
from attnplug_sglang.layers import Layers
from attnplug_sglang.memory import PageTable
from attnplug_sglang.prefill import RaggedPrefill
from attnplug_sglang.steps import CapturedSteps, Group, Step, eager_step, mode_of


class AttnplugBackend(AttentionBackend):  # type: ignore[misc] # SGLang is not typed
    """SGLang's protocol over ``ModelAttention``, one for each KV group.

    SGLang plans by ``init_forward_metadata*`` and then runs layers, so what was planned last is kept here, as in every
    backend of SGLang's. Batches that are in flight at the same time have backends of their own there. ``forward``
    checks the mode and the rows of the plan, and refuses another batch's (B5).
    """

    extend_dummy_seqs_capped_by_req_pool = True

    def __init__(
        self, runner: Any, layers: Layers, groups: list[tuple[ModelAttention, PageTable, tuple[int, ...]]]
    ) -> None:
        super().__init__()
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.kv_index_translator = getattr(runner, "kv_index_translator", None)
        self.device = runner.device
        self.max_context_len = int(runner.req_to_token_pool.req_to_token.shape[1])
        self.forward_metadata: Step | None = None
        self._layers = layers
        self._groups = tuple(Group(attention, table) for attention, table, _ in groups)
        self._group_of = {layer: number for number, (_, _, ids) in enumerate(groups) for layer in ids}
        self._captured: CapturedSteps | None = None
        claims = [group.attention.backend.claims for group in self._groups]
        self.needs_cpu_seq_lens = any(claim.needs_cpu_seq_lens for claim in claims)
        is_mla = any(spec.mla is not None for spec in layers.specs)
        self._ragged = RaggedPrefill(self._groups[0].attention.backend) if is_mla else None

    @property
    def attention(self) -> tuple[ModelAttention, ...]:
        """Our side, one for each KV group."""
        return tuple(group.attention for group in self._groups)

    # Planning

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan a batch that runs eagerly."""
        idle = mode_of(forward_batch) is ForwardMode.IDLE or not forward_batch.batch_size
        self.forward_metadata = None if idle else eager_step(forward_batch, self._groups, self.max_context_len)

    def init_mha_chunk_metadata(self, forward_batch: Any, disable_flashinfer_ragged: bool = False) -> None:
        """Plan the calls of an MLA prefill as MHA, before its first layer (C2)."""
        if self._ragged is not None:
            self._ragged.plan(forward_batch, self._step(forward_batch))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what graphs hold the addresses of. A second call may ask for no more than the first."""
        held = self._captured
        if held is None:
            self._captured = CapturedSteps(self._groups, max_bs, max_num_tokens, self.max_context_len)
        elif max_bs > held.max_requests or max_num_tokens > held.max_rows:
            raise BackendError(
                f"memory for graphs of {held.max_requests} requests and {held.max_rows} rows is in use; it cannot grow "
                f"to {max_bs} and {max_num_tokens}"
            )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Plan a batch that is about to be captured or replayed."""
        if self._captured is None:
            raise PlanError("a graph is captured before init_cuda_graph_state was called")
        plan = self._captured.capture if in_capture else self._captured.replay
        self.forward_metadata = plan(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """The part of planning that is captured. It comes first inside the graph."""
        if self._captured is not None and self.forward_metadata is not None:
            self._captured.refill(self.forward_metadata, forward_batch)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of padded requests. SGLang expects 1 or more; their pages are page 0, which no request has."""
        return max(1, *(_padding(group.attention) for group in self._groups))

    def support_triton(self) -> bool:
        """Whether SGLang may prepare batches by Triton kernels."""
        return torch.device(self.device).type == "cuda"

    # Layers

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **extras: Any,
    ) -> Tensor:
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, extras)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **extras: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if self._ragged is None or not self._layers.runs_as_mha(layer):
            return self._attend(q, k, v, layer, forward_batch, save_kv_cache, extras)
        self._no_more(extras, ())
        step, spec = self._step(forward_batch), self._layers.spec(layer)
        assert k is not None and v is not None
        if save_kv_cache:
            raise BackendError(f"layer {spec.layer_id} runs as MHA, and its keys and values are not what is cached")
        q = q.view(-1, spec.num_heads, spec.head_dim)
        out, lse = self._ragged.attend(q, k, v, spec, forward_batch, step)
        return out.flatten(1) if lse is None else (out, lse)

    def _attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        extras: dict[str, Any],
    ) -> Tensor:
        self._no_more(extras, ("sinks",))
        step, spec = self._step(forward_batch), self._layers.spec(layer)
        number = self._group_of[spec.layer_id]
        if self.token_to_kv_pool.layer_transfer_counter is not None:
            self.token_to_kv_pool.get_key_buffer(spec.layer_id)  # waits until the host cache has loaded this layer
        sinks = extras.get("sinks")
        if (sinks is not None) != spec.sinks:
            raise BackendError(
                f"layer {spec.layer_id} {'gives' if sinks is not None else 'does not give'} sink logits, and its "
                f"backend was chosen for a layer {'with' if spec.sinks else 'without'} them; choose a backend of "
                "SGLang's"
            )
        out = self._groups[number].attention.attend(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k,
            None if spec.mla is not None else v,
            spec,
            step.batches[number],
            save_kv_cache=save_kv_cache and k is not None,
            extras=None if sinks is None else ForwardExtras(sinks=sinks.to(torch.float32)),
        )
        return out.flatten(1)

    def _step(self, forward_batch: Any) -> Step:
        step, mode = self.forward_metadata, mode_of(forward_batch)
        if step is None or step.mode is not mode:
            planned = "nothing is planned" if step is None else f"a batch of mode {step.mode} is planned"
            raise PlanError(f"a batch of mode {mode} runs, but {planned}; SGLang must plan each batch before it runs")
        return step

    @staticmethod
    def _no_more(extras: dict[str, Any], known: tuple[str, ...]) -> None:
        """Refuse what a model gives beyond q, k and v and what we honour: nothing is dropped silently."""
        more = sorted(name for name, value in extras.items() if value is not None and name not in known)
        if more:
            raise BackendError(f"the model gives attention {', '.join(more)}, which attnplug does not take")


def _padding(attention: ModelAttention) -> int:
    try:
        return attention.padding_length()
    except (BackendError, HookError):  # a backend that is never captured has no such length
        return 0
