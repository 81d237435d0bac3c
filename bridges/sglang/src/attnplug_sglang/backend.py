"""SGLang's attention backend class over attnplug backends and SGLang's own caches."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from attnplug import BackendError, ForwardExtras, ForwardMode, PlanError
from attnplug.host import HookError, ModelAttention
from attnplug.sparse import SelectedPositions
from attnplug_sglang.kv_pools import PageTable
from attnplug_sglang.layers import Layers
from attnplug_sglang.mla_prefill import RaggedPrefill
from attnplug_sglang.planning import CapturedGroups, GroupedStep, PlannedGroup, eager_step, fill_trees, mode_of
from attnplug_sglang.sparse import IndexerMetadata, SelectPositions

_OF_MLA = ("sinks", "topk_indices", "q_rope", "k_rope")
"""Arguments of absorbed MLA layers beyond q, k and v."""


class AttnplugBackend(AttentionBackend):  # type: ignore[misc] # SGLang is not typed
    """Implements SGLang's protocol with one ``ModelAttention`` per KV group.

    SGLang plans with ``init_forward_metadata*`` and then runs layers, so the last plan is kept here, as in SGLang's own
    backends. Batches in flight at the same time have backend objects of their own. ``forward_*`` check the plan's mode
    and rows and refuse the plan of another batch (B5).
    """

    extend_dummy_seqs_capped_by_req_pool = True

    def __init__(
        self,
        runner: Any,
        layers: Layers,
        groups: list[tuple[ModelAttention, PageTable, tuple[int, ...]]],
        select: SelectPositions | None = None,
        *,
        by_batch: bool = False,
    ) -> None:
        """``select``: selects rows by the scores of SGLang's indexer, for sparse models. ``by_batch``: several backends
        share a role."""
        super().__init__()
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.kv_index_translator = getattr(runner, "kv_index_translator", None)
        self.device = runner.device
        self.max_context_len = int(runner.req_to_token_pool.req_to_token.shape[1])
        self.forward_metadata: GroupedStep | None = None
        self._layers = layers
        self._groups = tuple(PlannedGroup(attention, table, by_batch) for attention, table, _ in groups)
        self._group_of = {layer: number for number, (_, _, ids) in enumerate(groups) for layer in ids}
        self._captured: CapturedGroups | None = None
        self._select = select
        claims = [group.attention.backend.claims for group in self._groups]
        self.needs_cpu_seq_lens = any(claim.needs_cpu_seq_lens for claim in claims)
        mla = layers.specs[0].mla
        self._ragged = RaggedPrefill(self._groups[0].attention.backend) if mla is not None else None
        self.takes_q_rope = (
            mla is not None and mla.qk_rope_head_dim > 0 and all("q_rope" in claim.extras for claim in claims)
        )
        """True if every backend that may run a batch takes queries of MLA layers in two parts."""
        self._stores_rows = tuple(map(_stores_rows, self._groups))

    @property
    def attention(self) -> tuple[ModelAttention, ...]:
        """Attention of each KV group."""
        return tuple(group.attention for group in self._groups)

    # Planning

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan a batch that runs eagerly."""
        idle = mode_of(forward_batch) is ForwardMode.IDLE or not forward_batch.batch_size
        self.forward_metadata = None if idle else eager_step(forward_batch, self._groups, self.max_context_len)

    def init_mha_chunk_metadata(self, forward_batch: Any, disable_flashinfer_ragged: bool = False) -> None:
        """Plan the calls of an MLA prefill that runs as MHA, before its first layer (C2)."""
        if self._ragged is not None:
            self._ragged.plan(forward_batch, self._step(forward_batch))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the static tensors of captured graphs. A second call may not request more than the first."""
        captured = self._captured
        if captured is None:
            self._captured = CapturedGroups(self._groups, max_bs, max_num_tokens, self.max_context_len)
        elif max_bs > captured.max_requests or max_num_tokens > captured.max_rows:
            raise BackendError(
                f"graph memory for {captured.max_requests} requests and {captured.max_rows} rows is in use; it cannot "
                f"grow to {max_bs} and {max_num_tokens}"
            )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Plan a batch that is about to be captured or replayed."""
        if self._captured is None:
            raise PlanError("a graph is captured before init_cuda_graph_state was called")
        plan = self._captured.capture if in_capture else self._captured.replay
        self.forward_metadata = plan(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Run the captured part of planning, first inside the graph."""
        if self._captured is not None and self.forward_metadata is not None:
            self._captured.refill(self.forward_metadata, forward_batch)

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Read the draft trees again. SGLang may plan a replay on another stream before the draft has written them."""
        step = self.forward_metadata
        if cuda_graph_bs is not None and step is not None and step.prefix_lens is not None:
            fill_trees(step, spec_info, step.prefix_lens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of padded requests: at least 1, as SGLang expects. Their page is page 0, which no request uses."""
        return max(1, *(_padding_length(group.attention) for group in self._groups))

    def get_indexer_metadata(self, layer_id: int, forward_batch: Any) -> IndexerMetadata | None:
        """Return what SGLang's indexer reads of the planned batch; ``None`` for dense models. Layers share it."""
        if self._select is None:
            return None
        step = self._step(forward_batch)
        if step.index is None:
            step.index = IndexerMetadata(step.batches[0].geometry, self._select)
        metadata: IndexerMetadata = step.index
        return metadata

    def support_triton(self) -> bool:
        """Return True if SGLang may prepare batches with Triton kernels."""
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
        self._check_extras(extras, ())
        step, spec = self._step(forward_batch), self._layers.spec(layer)
        assert k is not None and v is not None
        if save_kv_cache:
            raise BackendError(f"layer {spec.layer_id} runs as MHA: its k and v cannot be saved to the latent cache")
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
        step, spec = self._step(forward_batch), self._layers.spec(layer)
        self._check_extras(extras, ("sinks", "topk_indices") if spec.mla is None else _OF_MLA)
        number = self._group_of[spec.layer_id]
        if self.token_to_kv_pool.layer_transfer_counter is not None:
            self.token_to_kv_pool.get_key_buffer(spec.layer_id)  # waits for the hierarchical cache to load the layer
        sinks, positions = extras.get("sinks"), extras.get("topk_indices")
        if (sinks is not None) != spec.sinks:
            raise BackendError(
                f"layer {spec.layer_id} {'passes' if sinks is not None else 'does not pass'} sink logits, but its "
                f"backend was selected for a layer {'with' if spec.sinks else 'without'} them; use one of SGLang's "
                "own backends"
            )
        q_rope, k_rope = extras.get("q_rope"), extras.get("k_rope")
        if k_rope is not None:
            k = self._unwritten(k, k_rope, layer, forward_batch, number) if save_kv_cache and k is not None else None
        if q_rope is None:
            q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        else:
            q = q.view(-1, layer.tp_q_head_num, layer.v_head_dim)
            q_rope = q_rope.view(*q.shape[:2], layer.qk_head_dim - layer.v_head_dim)
            if not self.takes_q_rope:
                q, q_rope = torch.cat((q, q_rope), -1), None
        out = self._groups[number].attention.attend(
            q,
            k,
            None if spec.mla is not None else v,
            spec,
            step.batches[number],
            save_kv_cache=save_kv_cache and k is not None,
            extras=_forward_extras(sinks, positions, q_rope),
        )
        return out.flatten(1)

    def _unwritten(self, k: Tensor, k_rope: Tensor, layer: Any, forward_batch: Any, number: int) -> Tensor | None:
        """Have SGLang's pool write new rows in two parts, or concatenate them if the backend must write them.

        Returns the rows that the backend writes; ``None`` if they are in the cache.
        """
        if not self._stores_rows[number]:
            return torch.cat((k, k_rope), -1)
        self.token_to_kv_pool.set_mla_kv_buffer(layer, forward_batch.out_cache_loc, k, k_rope)
        return None

    def _step(self, forward_batch: Any) -> GroupedStep:
        step, mode = self.forward_metadata, mode_of(forward_batch)
        if step is None or step.mode is not mode:
            planned = "nothing is planned" if step is None else f"a batch of mode {step.mode} is planned"
            raise PlanError(f"a batch of mode {mode} runs, but {planned}; SGLang must plan each batch before it runs")
        return step

    @staticmethod
    def _check_extras(extras: dict[str, Any], known: tuple[str, ...]) -> None:
        """Raise for arguments other than q, k, v and ``known``: nothing is dropped silently."""
        unknown = sorted(name for name, value in extras.items() if value is not None and name not in known)
        if unknown:
            raise BackendError(f"the model passes {', '.join(unknown)} to attention, which attnplug does not support")


def _stores_rows(group: PlannedGroup) -> bool:
    """Return True if SGLang's pool writes MLA rows in two parts as the backend would write whole rows.

    It does not saturate fp8, and slots of a window pool are translated by the bridge.
    """
    mla = group.attention.mla
    return mla is not None and None not in mla.by_slot.values() and not group.table.translated


def _forward_extras(sinks: Tensor | None, positions: Tensor | None, q_rope: Tensor | None) -> ForwardExtras | None:
    if sinks is None and positions is None and q_rope is None:
        return None
    return ForwardExtras(
        q_rope=q_rope,
        sinks=None if sinks is None else sinks.to(torch.float32),
        selected=None if positions is None else SelectedPositions(positions),
    )


def _padding_length(attention: ModelAttention) -> int:
    try:
        return attention.padding_length()
    except (BackendError, HookError):  # a backend without graphs has no padding length
        return 0
