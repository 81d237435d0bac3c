"""What a backend is: the protocol, its optional hooks, and the context from which it is built."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, Protocol, get_type_hints, runtime_checkable

import torch
from torch import Tensor

from attnplug.batch import ForwardBatch
from attnplug.capabilities import Capabilities
from attnplug.claims import Claims, ExtendPath
from attnplug.errors import AttnplugError, BackendError, HookError, PluginError, describe_error
from attnplug.hooks import Hook, bind_hook
from attnplug.kv import KVPools
from attnplug.loading import Registered
from attnplug.model import AttentionKind, LayerSpec, ModelSpec
from attnplug.plan import BackendId, Plan
from attnplug.problem import DType, GraphLevel, Role
from attnplug.ragged import RaggedCall
from attnplug.workspace import WorkspaceOwner


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

    def asked(self) -> frozenset[str]:
        return frozenset(name for name in self.__slots__ if getattr(self, name) is not None)


@runtime_checkable
class AttentionBackend(Protocol):
    """Attention over a paged cache, planned once per batch and run once per layer.

    Subclass contract. A backend is built from a :class:`BackendContext` and nothing else, and keeps no state of "the
    current batch": what it knows of a batch is in the plan it returned. It takes memory from the context's workspace.

    Exception contract. ``forward_*`` raise :class:`PlanError` for a plan of another backend or mode, or with more rows
    than q has (``batch.plan_for`` does it); rows behind the planned ones are padding: zero output, nothing written.
    """

    backend_id: BackendId
    """Made by the backend in its constructor; stamps its plans."""
    claims: Claims
    """What callers may rely on."""

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan:
        """Plan a batch. The caller assigns the plan to ``batch.plan``; nothing here changes the batch."""
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
        """Plan the chunks of a batch, once, before its first layer; the caller assigns it to ``batch.chunk_plan``."""
        ...


class RaggedAttention(Protocol):
    """Optional: attention over rows at hand. Needed exactly when ``claims.mla_extend`` holds more than absorbed."""

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
        """One call of an MLA prefill as MHA; touches no cache.

        q ``[query rows, heads, nope + rope]``, k ``[kv rows, heads, nope + rope]``, v ``[kv rows, heads, v_head_dim]``;
        returns ``[query rows, heads, v_head_dim]`` and fills ``lse`` ``[query rows, heads]`` where it is given.
        """
        ...


class LinearHooks(Protocol):
    """Optional: linear attention. What a backend of the role linear has in place of ``forward_extend`` and
    ``forward_decode``; it reads and writes the states at ``batch.state_slots`` of the pool it was built with."""

    def forward_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, layer: LayerSpec, batch: ForwardBatch, silu: bool
    ) -> Tensor:
        """Causal convolution over each request's rows, the last of earlier steps from its state, which it updates.

        x ``[tokens, conv_channels]``, weight ``[conv_channels, conv_width]`` (its last column meets the newest row),
        bias ``[conv_channels]``; returns ``[tokens, conv_channels]``, after SiLU where asked. Padding rows give zero.
        """
        ...

    def forward_linear(self, inputs: Any, layer: LayerSpec, batch: ForwardBatch) -> Tensor:
        """The recurrence over each request's rows (``attnplug.linear.LinearInputs``); updates its state.

        Returns ``[tokens, heads, value_dim]`` in the type of v; padding rows give zero.
        """
        ...

    def commit_states(self, forward_batch: ForwardBatch, accepted: Tensor) -> None:
        """After a target verify, which leaves every state as it was: advance each by its first ``accepted``
        ``[requests]`` rows of that batch, for all layers. What was rejected leaves no trace."""
        ...


class GraphPlanning(Protocol):
    """Optional: planning around a captured CUDA graph. Needed exactly when ``claims.cuda_graph`` is above NEVER."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what captured kernels read; its addresses never change afterwards."""
        ...

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> Plan:
        """Plan on the host, before a capture or a replay."""
        ...

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """The part of planning that is captured, first thing inside the graph."""
        ...

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length that padded requests of a captured batch carry.

        0 where nothing is to be read or written for them; above 0, their rows of the page table name pages that nobody
        else uses.
        """
        ...


MAY_IGNORE: dict[str, frozenset[str]] = {
    "init_mha_chunk_metadata": frozenset({"disable_flashinfer_ragged"}),
    "init_forward_metadata_out_graph": frozenset({"in_capture"}),
}
"""What a hook may leave out of its signature: hints. Everything else that a caller offers must be accepted, because
the caller relies on it: an ``lse`` that nobody fills, or a ``silu`` that nobody applies, is a wrong result."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest step that will be asked for."""

    max_requests: int
    max_tokens: int
    max_context: int


@dataclass(frozen=True, slots=True)
class Parallel:
    """This process's place among the tensor-parallel ranks."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True, slots=True)
class Serving:
    """How this process serves, where a backend builds or does less for it (A3, A6)."""

    skip_prefill: bool = False
    """A speculative draft's worker: it decodes, and somebody else prefills."""
    disaggregation_mode: Literal["null", "prefill", "decode"] = "null"
    disable_chunked_prefix_cache: bool = False
    is_embedding: bool = False
    """Prompts are embedded and nothing is generated: no token is ever decoded."""
    chunked_prefill_size: int | None = None
    """The most tokens of a prompt in one step; -1 where prompts are never cut, ``None`` where nobody said."""
    disable_radix_cache: bool = False
    """No request begins with rows that another one left in the cache."""


@dataclass(frozen=True, slots=True, eq=False)
class BackendContext:
    """Everything a backend is built from. It cannot be made before its parts, so the order of construction (pools,
    coordinators, backends) needs no discipline. ``page_size`` is the manager's; pools tell their layouts."""

    name: str
    roles: frozenset[Role]
    model: ModelSpec
    device: torch.device
    dtype: torch.dtype
    kv_dtype: DType
    page_size: int
    limits: Limits
    pools: KVPools
    workspace: WorkspaceOwner
    parallel: Parallel = Parallel()
    serving: Serving = Serving()
    coordinator: Any = None
    """What keeps part of the cache elsewhere (HiSparse); captured by a backend's constructor, or None (A10)."""
    options: Any = None


def protocol_attributes() -> dict[str, type]:
    """Data members of the protocol with their types, read off the protocol."""
    return get_type_hints(AttentionBackend)


def protocol_methods() -> dict[str, inspect.Signature]:
    """Methods of the protocol with their signatures, ``self`` left out."""
    return _methods(AttentionBackend)


@cache
def hook_signatures() -> dict[str, inspect.Signature]:
    """Every optional hook with its signature, ``self`` left out."""
    protocols = (ChunkPlanning, RaggedAttention, LinearHooks, GraphPlanning)
    return {name: signature for protocol in protocols for name, signature in _methods(protocol).items()}


def optional_hooks() -> dict[str, tuple[str, ...]]:
    """Every optional hook with the names of what its caller offers, in order."""
    return {name: tuple(signature.parameters) for name, signature in hook_signatures().items()}


def bind_optional_hook(backend: object, name: str) -> Hook | None:
    """An optional hook of a backend as a function of everything its caller offers; ``None`` if it has none.

    Raises :class:`HookError` for a hook that cannot be called so, or that would drop what its caller needs honoured.
    """
    return bind_hook(backend, name, tuple(hook_signatures()[name].parameters), MAY_IGNORE.get(name, ()))


def _methods(protocol: type) -> dict[str, inspect.Signature]:
    found = {}
    for name, member in vars(protocol).items():
        if not name.startswith("_") and inspect.isfunction(member):
            signature = inspect.signature(member)
            found[name] = signature.replace(parameters=list(signature.parameters.values())[1:])
    return found


def backend_problems(backend: object, *, linear: bool = False) -> Iterator[str]:
    """Every way in which an object falls short of the protocol, or of that for linear attention; nothing if in none."""
    for name, wanted in protocol_attributes().items():
        found = getattr(backend, name, None)
        if found is None:
            yield f"it has no {name}"
        elif not isinstance(found, wanted):
            yield f"its {name} is {found!r}, not a {wanted.__name__}"
    needed = protocol_methods()
    if linear:
        needed = _methods(LinearHooks) | {"init_forward_metadata": needed["init_forward_metadata"]}
    for name, signature in needed.items():
        method = getattr(backend, name, None)
        if not callable(method):
            yield f"it has no method {name}{signature}"
            continue
        positional = [p.name for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
        keywords = {p.name: None for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY}
        given = inspect.signature(method)
        try:
            given.bind(*positional, **keywords)
        except TypeError as error:
            yield f"its {name}{given} cannot be called as {name}{signature}: {error}"
    for name in hook_signatures():
        try:
            bind_optional_hook(backend, name)
        except (HookError, AttributeError) as error:  # the latter of a property that fails
            yield describe_error(error)


def name_problems(backend: AttentionBackend, name: str) -> Iterator[str]:
    """Errors speak of a backend by its identity: it has to carry the name by which it is asked for."""
    if backend.backend_id.name != name:
        yield f"its backend_id is named {backend.backend_id.name!r}; make it of the context's name, which is {name!r}"


def claim_problems(backend: AttentionBackend, declared: Capabilities, page_size: int) -> Iterator[str]:
    """Every claim of a built backend that its spec does not declare, or that it has no hooks for."""
    claims = backend.claims
    if AttentionKind.MLA not in declared.kinds:  # then nobody asks it how it extends
        claims = replace(claims, mla_extend=declared.mla_extend)
    yield from claims.beyond(declared.claims)
    if claims.page_sizes.kernel_size(page_size) is None:
        yield f"it was built for page size {page_size}, but claims only {claims.page_sizes}"
    needed: dict[str, str] = {}
    if claims.cuda_graph > GraphLevel.NEVER:
        needed |= dict.fromkeys(_methods(GraphPlanning), f"cuda_graph {claims.cuda_graph.name}")
    if ragged := claims.mla_extend - {ExtendPath.ABSORBED}:
        needed["forward_ragged"] = f"mla_extend {', '.join(sorted(ragged))}"
    for hook, claim in needed.items():
        if bind_optional_hook(backend, hook) is None:
            yield f"it claims {claim}, but has no {hook}{hook_signatures()[hook]}"


def import_factory(registered: Registered) -> Callable[[BackendContext], Any]:
    """A backend's factory, which is imported here and not before. Raises :class:`BackendError`, whatever is wrong."""
    spec = registered.spec
    module_name, _, attribute = spec.factory.partition(":")
    with _blamed_on(registered, "imported"):
        factory: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            factory = getattr(factory, part)
    if not callable(factory):
        raise BackendError(
            f"{_who(registered)}: {spec.factory} is {factory!r}, which cannot be called to build a backend"
        )
    found: Callable[[BackendContext], Any] = factory
    return found


@contextmanager
def _blamed_on(registered: Registered, action: str) -> Iterator[None]:
    """Whatever a plugin's code raises becomes an error that says whose it is. Kernel libraries raise anything."""
    where = f"{_who(registered)}: {registered.spec.factory} cannot be {action}"
    try:
        yield
    except PluginError as error:  # of what it declares: says what is wrong, but not whose it is
        raise BackendError(f"{where}: {error}") from error
    except (AttnplugError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise BackendError(f"{where}: {describe_error(error)}") from error


def _who(registered: Registered) -> str:
    return f"backend {registered.spec.name} ({registered.source})"


def build_backend(registered: Registered, context: BackendContext) -> AttentionBackend:
    """Import a backend's factory, build it, and insist that it is a backend: one whose hooks can be called, and whose
    claims its spec declares."""
    spec = registered.spec
    factory = import_factory(registered)
    with _blamed_on(registered, "built"):  # properties of its own are run by whoever looks at it
        backend = factory(context)
        problems = list(backend_problems(backend, linear=context.roles == {Role.LINEAR}))
        if not problems:
            problems = [
                *name_problems(backend, context.name),
                *claim_problems(backend, spec.capabilities, context.page_size),
            ]
    if problems:
        raise BackendError(
            f"{_who(registered)}: what {spec.factory} returned is not a backend:\n"
            + "\n".join(f"  {p}" for p in problems)
        )
    built: AttentionBackend = backend
    return built
