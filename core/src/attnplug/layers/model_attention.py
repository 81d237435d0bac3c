"""Facade of a model's attention over its backend, pools and MLA policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

from torch import Tensor

from attnplug.author.served_layers import bind_forward
from attnplug.contract.backend import AttentionBackend, ForwardExtras, Hook, bind_optional_hook, hook_signatures
from attnplug.contract.batch import (
    BatchPlan,
    ForwardBatch,
    Plan,
    apply_skip_attn_backend_init,
    describe_result,
    received_plan,
)
from attnplug.contract.inputs import DeltaInputs, LinearInputs, SelectedRows
from attnplug.declare.errors import BackendError, PlanError
from attnplug.declare.model import LayerSpec
from attnplug.declare.problem import ExtendPath, ForwardMode, GraphLevel
from attnplug.kv.pools import KVPools
from attnplug.mla.attention import MLAAttention, MLAWeights
from attnplug.mla.extend_policy import ExtendPolicy


class ModelAttention:
    """Attention of one model: plans a batch once, then runs layer by layer. ``policy`` chooses the MLA extend path. ::

    attention = ModelAttention(backend, pools)
    attention.plan(batch)
    with attention.running():
        model(batch)  # its layers call active_attention().attend(q, k, v, layer, batch)
    """

    def __init__(self, backend: AttentionBackend, pools: KVPools, policy: ExtendPolicy | None = None) -> None:
        self.backend = backend
        self.hooks: Mapping[str, Hook | None] = {name: bind_optional_hook(backend, name) for name in hook_signatures()}
        """Optional hooks of the backend, each bound once; ``None`` if it has none."""
        self.mla: MLAAttention | None = None
        """MLA layers of the model; ``None`` if it has none."""
        if pools.mla is not None:
            # MLA run as MHA reads latent rows only. Layers with further caches read them in place, absorbed.
            self.mla = MLAAttention(backend, pools.mla, policy or ExtendPolicy(), absorbed=bool(pools.caches))
        for key in pools.caches:
            if key.hook is not None:
                self._needed(key.hook, f"layers with {key.name}", "choose one that supports them")
        self._extend = bind_forward(self, "_extend", backend, "forward_extend")
        self._decode = bind_forward(self, "_decode", backend, "forward_decode")
        self._conv = self._linear = self._delta = self._commit = None
        if pools.linear is not None:
            for hook in ("forward_conv", "forward_linear"):
                self._needed(hook, "linear-attention layers", "choose a backend for the role linear")
            self._conv, self._linear, self._delta = (
                bind_forward(self, f"_{name}", backend, f"forward_{name}") for name in ("conv", "linear", "delta")
            )
            self._commit = self.hooks["commit_states"]

    def _needed(self, name: str, layers: str, remedy: str) -> None:
        if self.hooks[name] is None:
            raise BackendError(
                f"the model has {layers}, but backend {self.backend.backend_id.name} has no {name}; {remedy}"
            )

    # Planning

    def plan(
        self, batch: ForwardBatch, path: ExtendPath | None = None, *, skip_attn_backend_init: bool | None = None
    ) -> BatchPlan | None:
        """Plan a batch unless it is marked as planned; return its current plan (B1).

        ``path`` overrides the policy's extend path of MLA layers. ``skip_attn_backend_init`` is the old flag, for
        callers that do not use the marker yet (B3).
        """
        apply_skip_attn_backend_init(batch, skip_attn_backend_init)
        if not batch.needs_forward_metadata_init():
            return batch.plan
        host = batch.geometry.host if path is None and batch.forward_mode is ForwardMode.MIXED else None
        first = self.decodes_apart(host.query_lens, host.kv_lens) if self.mla and host else 0
        if self.mla and first and self._linear is None:
            batch.plan = self.mla.plan_apart(batch, first, self.plan)
            return batch.plan
        extend = None if self.mla is None else self.mla.plan(batch.geometry, path)
        calls = () if extend is None else tuple(part.call for part in extend.metadata)
        if calls or batch.geometry.calls:
            batch.geometry = replace(batch.geometry, calls=calls)  # the backend plans what it will run
        chunks = None if extend is None or self.mla is None else self.mla.plan_chunks(batch)
        batch.plan = whole = BatchPlan(_attention_plan(self.backend, batch), extend, chunks, batch.geometry)
        if self.mla and first:  # linear layers run the whole batch
            batch.plan = replace(self.mla.plan_apart(batch, first, self.plan), attention=whole.attention)
        return batch.plan

    def decodes_apart(self, query_lens: Sequence[int], kv_lens: Sequence[int]) -> int:
        """Return how many requests at the front of a mixed batch run apart; see ``ExtendPolicy.decodes_apart``."""
        if self.mla is None or self.mla.absorbed:
            return 0
        return self.mla.policy.decodes_apart(query_lens, kv_lens, self.backend.claims.mla_extend)

    # CUDA graphs

    @property
    def graph_level(self) -> GraphLevel:
        """Batches that can be captured."""
        return self.backend.claims.cuda_graph

    def reserve(self, requests: int, rows: int) -> None:
        """Reserve the backend's memory for captured batches of up to ``requests`` and ``rows``. Call it once."""
        self._graph_hook("init_cuda_graph_state")(requests, rows)

    def padding_length(self) -> int:
        """Return the length of padded requests in a captured batch; 0 for most backends."""
        name = "get_cuda_graph_seq_len_fill_value"
        length = self._graph_hook(name)()
        if not isinstance(length, int) or length < 0:
            raise BackendError(
                f"{name} of {self.backend.backend_id.label} returned {describe_result(length)}, no length"
            )
        return length

    def capture(self, batch: ForwardBatch, *, in_capture: bool = False, as_mha: bool = False) -> BatchPlan:
        """Plan a batch before a graph captures (``in_capture=True``) or replays it, and mark it as planned (B2).

        ``as_mha``, with ``in_capture`` and if ``mla.captures_mha``: MLA layers run as MHA. Such a graph is replayed for
        batches without prefixes only.
        """
        hook, planner = "init_forward_metadata_out_graph", self.backend.backend_id
        extend, chunks = (None, None) if batch.plan is None else (batch.plan.extend, batch.plan.chunks)
        if as_mha:
            assert in_capture and self.mla is not None
            extend = self.mla.capture(batch.geometry)
            batch.geometry = replace(batch.geometry, calls=tuple(part.call for part in extend.metadata))
        plan = self._graph_hook(hook)(batch, in_capture)
        received = received_plan(plan, planner, batch.forward_mode, batch.num_tokens, hook)
        batch.plan = BatchPlan(received, extend, chunks, batch.geometry)
        batch.mark_forward_metadata_ready()
        return batch.plan

    def refill(self, batch: ForwardBatch) -> None:
        """Update the plan on the device. Captured: call it first inside the graph."""
        if batch.plan is not None and batch.plan.extend is not None and self.mla is not None:
            self.mla.refill(batch.plan.extend, batch.geometry)
            batch.plan = replace(batch.plan, chunks=self.mla.plan_chunks(batch))
            if self._linear is None:  # nothing runs by the backend's own plan
                return
        self._graph_hook("init_forward_metadata_in_graph")(batch)

    def _graph_hook(self, name: str) -> Hook:
        hook = self.hooks[name]
        if hook is None:
            raise BackendError(
                f"backend {self.backend.backend_id.name} claims cuda_graph {self.graph_level.name} and has no {name}, "
                "which CUDA graphs require; choose a backend that claims them"
            )
        return hook

    @contextmanager
    def running(self) -> Iterator[ModelAttention]:
        """Make this the ``active_attention()`` of the current thread or task. Contexts nest (B6)."""
        token = _active.set(self)
        try:
            yield self
        finally:
            _active.reset(token)

    # Layers

    def attend(
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
        """Run an MHA layer; see ``AttentionBackend.forward_extend``."""
        run = self._decode if batch.forward_mode.is_decode else self._extend
        out: Tensor = run(q, k, v, layer, batch, save_kv_cache=save_kv_cache, extras=extras)
        return out

    def attend_mla(
        self,
        q: Tensor,
        rows: Tensor | None,
        layer: LayerSpec,
        weights: MLAWeights,
        batch: ForwardBatch,
        *,
        selected: SelectedRows | None = None,
    ) -> Tensor:
        """Run an MLA layer: write the new rows to the cache and return ``[tokens, heads, v_head_dim]``.

        q is ``[tokens, heads, nope + rope]`` with its rope part rotated, rows ``[tokens, kv_lora_rank + rope]`` are the
        new cache rows (normed latent, rotated key). A host that stored them itself (``MLAPool.by_slot``) passes
        ``None`` and absorbed queries (``MLAWeights.absorb``). ``selected``: see ``RowSelection.select``.
        """
        if self.mla is None:
            raise BackendError(f"layer {layer.layer_id} is MLA, but the model was built without an MLA pool")
        return self.mla.attend(q, rows, layer, weights, batch, selected)

    def convolve(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        *,
        silu: bool = True,
    ) -> Tensor:
        """Run the short convolution of a linear layer; see ``LinearHooks.forward_conv``."""
        if self._conv is None:
            raise self._no_states(layer)
        out: Tensor = self._conv(x, weight, bias, layer, batch, silu)
        return out

    def attend_linear(self, inputs: LinearInputs, layer: LayerSpec, batch: ForwardBatch) -> Tensor:
        """Run the recurrence of a linear layer: write its state and return ``[tokens, heads, value_dim]``."""
        if self._linear is None:
            raise self._no_states(layer)
        out: Tensor = self._linear(inputs, layer, batch)
        return out

    def attend_delta(self, inputs: DeltaInputs, layer: LayerSpec, batch: ForwardBatch) -> Tensor | None:
        """Run a whole delta-rule layer: write its states and return ``[tokens, heads * value_dim]``.

        ``None``, with nothing done, if the backend has only the parts: ``convolve`` and ``attend_linear``.
        """
        if self._delta is None:
            return None
        out: Tensor | None = self._delta(inputs, layer, batch)
        return out

    def commit_states(self, batch: ForwardBatch, accepted: Tensor) -> None:
        """Advance each request's linear states by its first ``accepted`` ``[requests]`` rows after a target verify; see
        ``LinearHooks.commit_states``. Does nothing for models without linear layers."""
        if self._linear is None:
            return
        if self._commit is None:
            raise BackendError(
                f"backend {self.backend.backend_id.name} has no commit_states, which a verify of linear-attention "
                "layers requires; choose another backend for the role linear, or turn speculation off"
            )
        self._commit(batch, accepted)

    @staticmethod
    def _no_states(layer: LayerSpec) -> BackendError:
        return BackendError(f"layer {layer.layer_id} is linear, but the model was built without a pool of states")


_active: ContextVar[ModelAttention] = ContextVar("attnplug_model_attention")


def active_attention() -> ModelAttention:
    """Return the attention of the innermost ``running()``."""
    try:
        return _active.get()
    except LookupError:
        raise BackendError("no attention is active; run the model inside 'with attention.running():'") from None


def plan_forward(
    backend: AttentionBackend, batch: ForwardBatch, *, skip_attn_backend_init: bool | None = None
) -> BatchPlan | None:
    """Plan for callers of a backend's forward methods: ``plan_forward(backend, batch)``. MLA runs absorbed."""
    apply_skip_attn_backend_init(batch, skip_attn_backend_init)
    if batch.needs_forward_metadata_init():
        batch.plan = BatchPlan(_attention_plan(backend, batch), geometry=batch.geometry)
    return batch.plan


def _attention_plan(backend: AttentionBackend, batch: ForwardBatch) -> Plan:
    if batch.num_tokens < batch.geometry.rows:
        raise PlanError(
            f"the batch has {batch.num_tokens} input ids for the {batch.geometry.rows} rows of its geometry"
        )
    plan, hook = backend.init_forward_metadata(batch), "init_forward_metadata"
    return received_plan(plan, backend.backend_id, batch.forward_mode, batch.num_tokens, hook)
