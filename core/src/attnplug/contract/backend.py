"""Backend protocol and its optional hooks, which are bound once, by their own signatures (A8).

Nothing uses ``hasattr`` on a backend.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from inspect import Parameter
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from attnplug.contract.batch import BackendId, ForwardBatch, Plan
from attnplug.contract.inputs import (
    CompressorInputs,
    DeltaInputs,
    IndexInputs,
    LinearInputs,
    RaggedCall,
    SelectedRows,
    first_rows,
)
from attnplug.declare.capabilities import Claims
from attnplug.declare.errors import HookError
from attnplug.declare.model import LayerSpec


@dataclass(frozen=True, slots=True)
class ForwardExtras:
    """Optional inputs and outputs of a forward call.

    A backend lists the fields it honours in ``Capabilities.extras`` and must raise if given any other:
    nothing is dropped silently. New fields come in minor versions of the contract.
    """

    lse: Tensor | None = None
    """Output ``[tokens, heads]`` float32: log-sum-exp, natural log, -inf for a row that attends to no key (C4)."""
    sinks: Tensor | None = None
    """``[heads]`` float32, for layers with ``sinks``: logit of an additional key with value zero, not in ``lse``."""
    out: Tensor | None = None
    """Caller-owned output buffer, in the result's shape and q's dtype. The backend writes to it and returns it."""
    q_rope: Tensor | None = None
    """``[tokens, heads, rope]``: rotary part of absorbed MLA queries, for hosts that keep it separate from the latent
    part. q is then ``[tokens, heads, kv_lora_rank]``. Both may have any strides between rows and heads."""
    selected: SelectedRows | None = None
    """Given for layers with an ``indexer``, and for no others: the rows that each token attends to; no other row is
    read. A token without any has output zero and log-sum-exp -inf. For a ``compressed`` layer they are entries, to
    which each token attends in addition to the rows of its window."""
    entries: CompressorInputs | None = None
    """Given for ``compressed`` layers, and for no others: outputs of the compressor for the new tokens. Entries of
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

    def given(self) -> frozenset[str]:
        """Names of the fields that are not ``None``."""
        return frozenset(name for name in self.__slots__ if getattr(self, name) is not None)


@runtime_checkable
class AttentionBackend(Protocol):
    """Attention over a paged cache, planned once per batch and run once per layer.

    Subclass contract. A backend is built from a :class:`BackendContext` alone. It keeps no state of the current batch:
    all of that is in the plan it returned. It takes scratch memory from the context's workspace.

    Exception contract. ``forward_*`` raise :class:`PlanError` for a plan of another backend or mode, or with more rows
    than q has (``batch.plan_for`` does this). Rows behind the planned ones are padding: their output is zero, and
    nothing is written for them.
    """

    backend_id: BackendId
    """Created by the backend in its constructor; identifies its plans."""
    claims: Claims
    """Guarantees to callers."""

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan:
        """Plan a batch from its geometry alone. The caller publishes the plan; the batch is not changed here."""

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
        """Write this layer's new rows to the cache, then attend causally, each request to its own rows.

        MHA: q ``[tokens, heads, head_dim]``, k ``[tokens, kv_heads, head_dim]``, v ``[tokens, kv_heads, v_head_dim]``;
        returns ``[tokens, heads, v_head_dim]``. MLA, absorbed: q ``[tokens, heads, kv_lora_rank + rope]``, k the new
        latent rows ``[tokens, 1, kv_lora_rank + rope]``, v ``None``; returns ``[tokens, heads, kv_lora_rank]``.
        With ``save_kv_cache=False`` nothing is written: the rows must be in the cache, and k and v may be ``None``.
        q, k and v may have any strides between rows and heads. The result has q's dtype and device, and owns its
        memory, which is not the workspace's. Process-wide torch state (generators, default dtype) stays unchanged.
        """

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
        """Same as ``forward_extend``, for batches with one new token per request."""


class LinearBackend(Protocol):
    """Backend of role ``linear``: planned like any other, run by its :class:`LinearHooks`."""

    backend_id: BackendId
    claims: Claims

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan: ...


class ChunkPlanning(Protocol):
    """Optional: planning of one-shot and chunked MLA prefill. Absent if there is nothing to plan."""

    def init_mha_chunk_metadata(
        self, forward_batch: ForwardBatch, disable_flashinfer_ragged: bool = False
    ) -> Plan | None:
        """Plan ``forward_batch.geometry.calls`` once, before the first layer. Every call receives the plan."""


class RaggedAttention(Protocol):
    """Optional: attention over rows passed as arguments; exactly if ``claims.mla_extend`` is not just absorbed."""

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
        """Run one call of an MLA prefill as MHA, without reading or writing the cache.

        q ``[query rows, heads, nope + rope]``, k ``[kv rows, heads, nope + rope]``, v ``[kv rows, heads, v_head_dim]``;
        returns ``[query rows, heads, v_head_dim]`` and fills ``lse`` ``[query rows, heads]`` if given.
        ``plan`` is the result of ``init_mha_chunk_metadata`` for the batch of this call.
        """


class RowSelection(Protocol):
    """Optional: selects rows ``[tokens, topk]`` of sparse layers; exactly if ``claims.extras`` has ``selected``."""

    def select(self, index: IndexInputs, layer: LayerSpec, batch: ForwardBatch) -> SelectedRows:
        """Write a layer's new index keys to the cache and select, for each token, the ``topk`` rows of its request with
        the largest scores among those that it sees; all of them if it sees no more.

        ``forward_extend`` or ``forward_decode`` of this layer, and of layers that share its selection, receive the
        result as ``extras.selected``. Rows of padding are -1.
        """


class LinearHooks(Protocol):
    """Linear attention, which a backend of role ``linear`` has instead of ``forward_extend`` and ``forward_decode``.

    It reads and writes states at the geometry's ``state_slots``, in the pool it was built with."""

    def forward_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, layer: LayerSpec, batch: ForwardBatch, silu: bool
    ) -> Tensor:
        """Run a causal convolution over each request's rows.

        Rows of earlier steps come from the request's state, which is updated. x ``[tokens, conv_channels]``, weight
        ``[conv_channels, conv_width]`` (the last column multiplies the newest row), bias ``[conv_channels]``; returns
        ``[tokens, conv_channels]``, with SiLU applied if ``silu``. Padding rows give zero. Any row stride of x.
        """

    def forward_linear(self, inputs: LinearInputs, layer: LayerSpec, batch: ForwardBatch) -> Tensor:
        """Run the recurrence over each request's rows and update its state.

        Returns ``[tokens, heads, value_dim]`` in v's dtype; padding rows give zero.
        """

    def commit_states(self, forward_batch: ForwardBatch, accepted: Tensor) -> None:
        """Advance each request's state by the first ``accepted`` ``[requests]`` of its rows, in all layers.

        Called after a target verify of ``forward_batch``, which changes no state. Rejected rows have no effect.
        """


class DeltaDecoding(Protocol):
    """Optional: a whole delta-rule layer in one call, if faster than its parts. Absent if it never is."""

    def forward_delta(self, inputs: DeltaInputs, layer: LayerSpec, batch: ForwardBatch) -> Tensor | None:
        """Run convolution, gates, recurrence and gated norm, and update both states.

        Returns ``[tokens, heads * value_dim]`` in the dtype of ``inputs.rows``, zero for padding rows. Returns ``None``
        and does nothing if the caller is to run the parts: ``forward_conv``, ``forward_linear``, gates.
        """


class GraphPlanning(Protocol):
    """Optional: planning for CUDA graph capture and replay; exactly if ``claims.cuda_graph`` is above NEVER."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the memory that captured kernels read. Its addresses never change afterwards."""

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> Plan:
        """Plan on the host, before a capture or a replay.

        The graph may update lengths, page table and state slots. ``init_forward_metadata_in_graph`` reads them.
        """

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Run the captured part of planning, which comes first in the graph."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of padded requests in a captured batch.

        With 0, nothing is read or written for them. With more, their page table rows refer to pages of their own.
        """


MAY_IGNORE: dict[str, frozenset[str]] = {
    "init_mha_chunk_metadata": frozenset({"disable_flashinfer_ragged"}),
    "init_forward_metadata_out_graph": frozenset({"in_capture"}),
}
"""Hints that a hook may omit from its signature. It must accept all other parameters, because callers rely on them: an
``lse`` that is not filled, or a ``silu`` that is not applied, gives a wrong result."""


@cache
def hook_signatures() -> dict[str, inspect.Signature]:
    """Return all optional hooks with their signatures, without ``self``."""
    protocols = (ChunkPlanning, RaggedAttention, RowSelection, LinearHooks, DeltaDecoding, GraphPlanning)
    return {name: signature for protocol in protocols for name, signature in methods(protocol).items()}


def bind_optional_hook(backend: object, name: str) -> Hook | None:
    """Return a hook as a function of all offered values: ``bind_optional_hook(backend, "init_mha_chunk_metadata")``.

    ``None`` if the backend has none. Raises :class:`HookError` for a hook that cannot be called so, or would drop a
    value that its caller relies on.
    """
    return bind_hook(backend, name, tuple(hook_signatures()[name].parameters), MAY_IGNORE.get(name, ()))


def methods(protocol: type) -> dict[str, inspect.Signature]:
    """Return a protocol's methods with their signatures, without ``self``."""
    found = {}
    for name, member in vars(protocol).items():
        if not name.startswith("_") and inspect.isfunction(member):
            signature = inspect.signature(member)
            found[name] = signature.replace(parameters=list(signature.parameters.values())[1:])
    return found


Hook = Callable[..., Any]
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def bind_hook(target: object, name: str, offered: Sequence[str], may_ignore: Collection[str] = ()) -> Hook | None:
    """Bind hook ``name`` of ``target`` to a caller that offers the named values, in this order.

    Returns ``None`` if the target has no such hook (absent, or ``None``); otherwise a function that takes one
    positional argument per offered name and calls the hook with those it accepts. Parameters are matched by name.
    The first offered value is the hook's subject: if no parameter has its name, it goes to the first positional
    parameter that nothing else fills, whatever its name. ``**kwargs`` takes the remaining values by name. ``*args``
    alone, or a callable without a signature, takes all values in order.

    ``may_ignore`` names the offered values that the hook may omit from its signature. The caller relies on all others.

    Raises :class:`HookError`, naming backend, hook and parameter, if the hook requires a parameter that is not offered,
    does not accept one that its caller relies on, or is not callable.
    """
    try:
        hook = getattr(target, name)
    except AttributeError:
        # A property that raises also ends here. Treating it as an absent hook would silently skip planning.
        if inspect.getattr_static(target, name, None) is not None:
            raise
        return None
    if hook is None:
        return None
    if not callable(hook):
        raise HookError(f"{_owner(target)}.{name} is {hook!r}, which cannot be called; make it a method or remove it")
    try:
        signature = _signature(hook)
    except ValueError:
        # No signature, as for some C functions: they take all offered values, in order.
        return _adapter(hook, list(offered), offered)
    arguments, ignored = _arguments(signature, offered, f"{_owner(target)}.{name}")
    if unfit := [parameter for parameter in ignored if parameter not in may_ignore]:
        raise HookError(
            f"{_owner(target)}.{name}{shown(signature)} does not accept {', '.join(map(repr, unfit))}, which its "
            f"caller relies on; offered are {', '.join(offered)}. Add the parameter"
        )
    return _adapter(hook, arguments, offered)


def shown(signature: inspect.Signature) -> str:
    """Format a signature as its author wrote it: annotations, strings in most modules, are shown without quotes."""
    return str(signature).replace("'", "")


def _signature(hook: Hook) -> inspect.Signature:
    """Return the signature that a call must satisfy.

    A decorator's wrapper with ``(*args, **kwargs)`` accepts what the wrapped function accepts. A wrapper with its own
    parameters is called by those, whatever ``__wrapped__`` says.
    """
    signature = inspect.signature(hook, follow_wrapped=False)
    wrapped = getattr(hook, "__wrapped__", None)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if wrapped is None or kinds != {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}:
        return signature
    inner = _signature(wrapped)
    if inspect.ismethod(hook) and not inspect.ismethod(wrapped):
        parameters = list(inner.parameters.values())
        positional = parameters and parameters[0].kind in _POSITIONAL
        inner = inner.replace(parameters=parameters[1:] if positional else parameters)
    return inner


def _arguments(signature: inspect.Signature, offered: Sequence[str], hook: str) -> tuple[list[str], list[str]]:
    """Return the arguments of a call to the hook as source (``["a", "c=c"]``), and the offered names it omits."""
    named = [p for p in signature.parameters.values() if p.kind in (*_POSITIONAL, Parameter.KEYWORD_ONLY)]
    sources = {parameter.name: parameter.name for parameter in named if parameter.name in offered}
    first = next((p.name for p in named if p.kind in _POSITIONAL and p.name not in sources), None)
    if first is not None and offered and offered[0] not in sources:
        sources[first] = offered[0]  # the subject, whatever its name
    left = [name for name in offered if name not in sources.values()]
    takes_names = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    positional: list[str] = []
    keywords: list[str] = []
    gap = False  # a parameter keeps its default: later ones can only be passed by name
    for parameter in signature.parameters.values():
        if parameter.kind is Parameter.VAR_KEYWORD:
            keywords += [f"{name}={name}" for name in left]
            left = []
        elif parameter.kind is Parameter.VAR_POSITIONAL:
            taken = [] if gap else [name for name in left if name == offered[0] or not takes_names]
            positional += taken
            left = [name for name in left if name not in taken]
        elif parameter.name in sources and not (gap and parameter.kind is Parameter.POSITIONAL_ONLY):
            by_position = parameter.kind in _POSITIONAL and not gap
            source = sources[parameter.name]
            (positional if by_position else keywords).append(source if by_position else f"{parameter.name}={source}")
        elif parameter.default is Parameter.empty:
            raise HookError(
                f"{hook}{shown(signature)} requires {parameter.name!r}, which is not offered; "
                f"offered are {', '.join(offered) or 'no arguments'}. "
                "Rename the parameter, give it a default, or remove it"
            )
        else:
            left += [sources[parameter.name]] if parameter.name in sources else []
            gap = gap or parameter.kind in _POSITIONAL
    return positional + keywords, left


def _adapter(hook: Hook, arguments: list[str], offered: Sequence[str]) -> Hook:
    if arguments == list(offered):
        return hook  # takes all offered values in order: no adapter, no overhead
    # Compiled, because assembling *args per call costs more: one frame without packing takes under 100 ns.
    source = f"lambda {', '.join(offered)}: hook({', '.join(arguments)})"
    adapter: Hook = eval(source, {"hook": hook})
    return adapter


def _owner(target: object) -> str:
    return target.__qualname__ if isinstance(target, type) else type(target).__qualname__
