"""What a backend is: the protocol and its optional hooks."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol, get_type_hints, runtime_checkable

from torch import Tensor

from attnplug.contract.batch import ForwardBatch
from attnplug.contract.compressed import CompressorInputs
from attnplug.contract.hooks import Hook, bind_hook
from attnplug.contract.linear import DeltaInputs, LinearInputs
from attnplug.contract.plan import BackendId, Plan
from attnplug.contract.ragged import RaggedCall
from attnplug.contract.sparse import IndexInputs, SelectedRows, first_rows
from attnplug.declare.claims import Claims
from attnplug.declare.model import LayerSpec


@dataclass(frozen=True, slots=True)
class ForwardExtras:
    """What a caller may ask of a forward beyond the plain result.

    A backend lists in ``Capabilities.extras`` the fields it honours, and must raise when given another one:
    nothing is dropped silently. New fields come in minor versions of the contract.
    """

    lse: Tensor | None = None
    """``[tokens, heads]`` float32, filled with the log-sum-exp: natural log, -inf where a row sees no key (C4)."""
    sinks: Tensor | None = None
    """``[heads]`` float32, given for layers with ``sinks``: the logit of one more key, whose value is zero. Not in the
    log-sum-exp."""
    out: Tensor | None = None
    """Memory of the host for the result, in the result's shape and q's type; the backend returns it."""
    q_rope: Tensor | None = None
    """``[tokens, heads, rope]``: the rotary part of absorbed MLA queries, for hosts that have it apart from the latent
    part. q is then ``[tokens, heads, kv_lora_rank]``. Both may have any strides between rows and heads."""
    selected: SelectedRows | None = None
    """Given for layers with an ``indexer``, and for no others: the rows that each token attends to, and no other row is
    read. A token without any gives zero, and -inf as its log-sum-exp. For a ``compressed`` layer they are entries, to
    which each token attends beside the rows of its window."""
    entries: CompressorInputs | None = None
    """Given for layers that are ``compressed``, and for no others: what the new tokens bring to entries. Entries of
    windows that they complete are written with the new rows, before attention; with ``save_kv_cache=False`` it may be
    left out. Rows of the window, entries and the sink are in one softmax."""

    def first(self, tokens: int, out: Tensor) -> ForwardExtras:
        """Return the extras of the first ``tokens`` tokens, with ``out`` in place of the caller's."""
        return replace(
            self,
            lse=None if self.lse is None else self.lse[:tokens],
            out=out[:tokens],
            q_rope=None if self.q_rope is None else self.q_rope[:tokens],
            selected=None if self.selected is None else first_rows(self.selected, tokens),
            entries=None if self.entries is None else self.entries.first(tokens),
        )

    def asked(self) -> frozenset[str]:
        return frozenset(name for name in self.__slots__ if getattr(self, name) is not None)


@runtime_checkable
class AttentionBackend(Protocol):
    """Attention over a paged cache, planned once per batch and run once per layer.

    Subclass contract. A backend is built from a :class:`BackendContext` and nothing else, and keeps no state of "the
    current batch": what it knows of a batch is in the plan it returned. It takes memory from the context's workspace.

    Exception contract. ``forward_*`` raise :class:`PlanError` for a plan of another backend or mode, or with more rows
    than q has (``batch.plan_for`` does it); rows past the planned ones are padding: zero output, nothing written.
    """

    backend_id: BackendId
    """Made by the backend in its constructor; stamps its plans."""
    claims: Claims
    """What callers may rely on."""

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan:
        """Plan a batch, from its geometry alone. The caller publishes the plan; nothing here changes the batch."""
        ...

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
        """Write this layer's new rows to the cache and attend, causally, each request to its own rows.

        MHA: q ``[tokens, heads, head_dim]``, k ``[tokens, kv_heads, head_dim]``, v ``[tokens, kv_heads, v_head_dim]``;
        returns ``[tokens, heads, v_head_dim]``. MLA, absorbed: q ``[tokens, heads, kv_lora_rank + rope]``, k the new
        latent rows ``[tokens, 1, kv_lora_rank + rope]``, v ``None``; returns ``[tokens, heads, kv_lora_rank]``.
        With ``save_kv_cache=False`` nothing is written: the rows must be in the cache, and k and v may be ``None``.
        q, k and v may have any strides between rows and heads. The result has q's type and device, and memory of its
        own: not the workspace's. What torch keeps for the whole process (its random numbers, its default type) stays as
        it is.
        """
        ...

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
        """As ``forward_extend``, for batches with one new token per request."""
        ...


class LinearBackend(Protocol):
    """A backend of the role linear: planned like any other, run by its :class:`LinearHooks`."""

    backend_id: BackendId
    claims: Claims

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan: ...


class ChunkPlanning(Protocol):
    """Optional: planning of one-shot and chunked MLA prefill. Absent means that there is nothing to plan."""

    def init_mha_chunk_metadata(
        self, forward_batch: ForwardBatch, disable_flashinfer_ragged: bool = False
    ) -> Plan | None:
        """Plan ``forward_batch.geometry.calls``, once, before the first layer; every call is then given the plan."""
        ...


class RaggedAttention(Protocol):
    """Optional: attention over rows at hand. Needed exactly when ``claims.mla_extend`` holds more than absorbed."""

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
        """One call of an MLA prefill as MHA; touches no cache.

        q ``[query rows, heads, nope + rope]``, k ``[kv rows, heads, nope + rope]``, v ``[kv rows, heads, v_head_dim]``;
        returns ``[query rows, heads, v_head_dim]`` and fills ``lse`` ``[query rows, heads]`` where it is given.
        ``plan`` is what ``init_mha_chunk_metadata`` returned for the batch of this call.
        """
        ...


class RowSelection(Protocol):
    """Optional: choosing the rows that sparse layers attend to. Needed exactly when ``claims.extras`` has selected."""

    def select(self, index: IndexInputs, layer: LayerSpec, batch: ForwardBatch) -> SelectedRows:
        """Write a layer's new index keys to the cache and choose, for each token, the ``topk`` rows of its request with
        the largest scores among those that it sees; all of them where it sees no more.

        The result is given to ``forward_extend`` or ``forward_decode`` of this layer, and of the layers that share its
        choice, as ``extras.selected``. Rows of padding have -1 throughout.
        """
        ...


class LinearHooks(Protocol):
    """Optional: linear attention. What a backend of the role linear has in place of ``forward_extend`` and
    ``forward_decode``. It reads and writes states at the geometry's ``state_slots``, in the pool it was built with."""

    def forward_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, layer: LayerSpec, batch: ForwardBatch, silu: bool
    ) -> Tensor:
        """Causal convolution over each request's rows. Those of earlier steps come from its state, which is updated.

        x ``[tokens, conv_channels]``, weight ``[conv_channels, conv_width]`` (its last column meets the newest row),
        bias ``[conv_channels]``; returns ``[tokens, conv_channels]``, after SiLU if ``silu``. Padding rows give zero.
        x may have any stride between rows.
        """
        ...

    def forward_linear(self, inputs: LinearInputs, layer: LayerSpec, batch: ForwardBatch) -> Tensor:
        """The recurrence over each request's rows; updates its state.

        Returns ``[tokens, heads, value_dim]`` in the type of v; padding rows give zero.
        """
        ...

    def commit_states(self, forward_batch: ForwardBatch, accepted: Tensor) -> None:
        """Advance each request's state by the first ``accepted`` ``[requests]`` of its rows, in all layers.

        Called after a target verify of ``forward_batch``, which leaves every state as it was. Rejected rows leave no
        trace.
        """
        ...


class DeltaDecoding(Protocol):
    """Optional: a whole layer of the delta rule at once, where that is faster than its parts. Absent means never."""

    def forward_delta(self, inputs: DeltaInputs, layer: LayerSpec, batch: ForwardBatch) -> Tensor | None:
        """Convolution, gates, recurrence and gated norm, with both states updated.

        Returns ``[tokens, heads * value_dim]`` in the type of the rows, zero for padding rows; or ``None``, with
        nothing done, for a batch that the caller runs by its parts: ``forward_conv``, ``forward_linear``, and the gates
        by itself.
        """
        ...


class GraphPlanning(Protocol):
    """Optional: planning around a captured CUDA graph. Needed exactly when ``claims.cuda_graph`` is above NEVER."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what captured kernels read; its addresses never change afterwards."""
        ...

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> Plan:
        """Plan on the host, before a capture or a replay.

        The graph itself may bring lengths, page table and state slots up to date: whatever depends on them is made in
        ``init_forward_metadata_in_graph``.
        """
        ...

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """The part of planning that is captured. It comes first inside the graph."""
        ...

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length that padded requests of a captured batch carry.

        With 0, nothing is read or written for them. With more, their rows of the page table name pages that nobody else
        uses.
        """
        ...


MAY_IGNORE: dict[str, frozenset[str]] = {
    "init_mha_chunk_metadata": frozenset({"disable_flashinfer_ragged"}),
    "init_forward_metadata_out_graph": frozenset({"in_capture"}),
}
"""What a hook may leave out of its signature: hints. It must accept everything else that a caller offers, because the
caller relies on it. An ``lse`` that nobody fills, or a ``silu`` that nobody applies, is a wrong result."""


def protocol_attributes() -> dict[str, type]:
    """Data members of the protocol with their types, read off the protocol."""
    return get_type_hints(AttentionBackend)


def protocol_methods() -> dict[str, inspect.Signature]:
    """Methods of the protocol with their signatures, ``self`` left out."""
    return methods(AttentionBackend)


@cache
def hook_signatures() -> dict[str, inspect.Signature]:
    """Every optional hook with its signature, ``self`` left out."""
    protocols = (ChunkPlanning, RaggedAttention, RowSelection, LinearHooks, DeltaDecoding, GraphPlanning)
    return {name: signature for protocol in protocols for name, signature in methods(protocol).items()}


def optional_hooks() -> dict[str, tuple[str, ...]]:
    """Every optional hook with the names of what its caller offers, in order."""
    return {name: tuple(signature.parameters) for name, signature in hook_signatures().items()}


def bind_optional_hook(backend: object, name: str) -> Hook | None:
    """An optional hook of a backend as a function of everything its caller offers; ``None`` if it has none.

    Raises :class:`HookError` for a hook that cannot be called like this, or that would drop what its caller needs
    honoured.
    """
    return bind_hook(backend, name, tuple(hook_signatures()[name].parameters), MAY_IGNORE.get(name, ()))


def methods(protocol: type) -> dict[str, inspect.Signature]:
    """A protocol's methods with their signatures, ``self`` left out."""
    found = {}
    for name, member in vars(protocol).items():
        if not name.startswith("_") and inspect.isfunction(member):
            signature = inspect.signature(member)
            found[name] = signature.replace(parameters=list(signature.parameters.values())[1:])
    return found
