"""Wrappers on one base class, which forwards the whole protocol by their route (A9): a batch by its mode, or a layer by
its kind of attention."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attnplug.contract.backend import (
    AttentionBackend,
    Hook,
    LinearBackend,
    bind_optional_hook,
    hook_signatures,
    methods,
    shown,
)
from attnplug.contract.batch import BackendId, ForwardBatch, Plan, received_plan
from attnplug.declare.capabilities import Claims, CombinedClaims, weakest
from attnplug.declare.errors import BackendError, PlanError
from attnplug.declare.model import LayerSpec, ModelSpec
from attnplug.declare.problem import ForwardMode, GraphLevel, Role

_BATCH, _LAYER = ("batch", "forward_batch"), "layer"


class ForwardingBackend(ABC):
    """Backend that forwards every call to its children, backends by label: ``Mine("mine", {"a": one, "b": other})``.

    Subclass contract. ``route`` returns the children that a call goes to. Every method of the protocol and every
    optional hook is forwarded by it. A call that runs a layer goes to one child, a call about a batch to the children
    that the route names, and any other call to all children. Methods are generated from the protocol when the class is
    created, so hooks that a later version of the contract adds are forwarded too. A subclass defines only what differs,
    with the protocol's own parameters.

    A wrapper has an optional hook if one of its children has it. If several children return a plan, these become the
    parts of one plan of the wrapper; other results must be equal. Claims are the weakest of the children's, except for
    those that ``decided_by`` leaves to one child. ``limiting_children`` has the labels of the children that weakened
    each claim. Children's hooks are bound once, at construction, by their own signatures (A8).
    """

    backend_id: BackendId
    claims: Claims
    limiting_children: Mapping[str, tuple[str, ...]]
    captured_extends: str | None = None
    """Label of the child that runs captured extends, if not all children can be captured."""

    if TYPE_CHECKING:  # it is a backend for type checkers; methods are generated below
        init_forward_metadata = AttentionBackend.init_forward_metadata
        forward_extend = AttentionBackend.forward_extend
        forward_decode = AttentionBackend.forward_decode

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for name, signature in {**methods(AttentionBackend), **hook_signatures()}.items():
            owner = next((base for base in cls.__mro__ if name in vars(base)), None)
            # The empty bodies of a protocol that a wrapper inherits from forward nothing, so they are replaced.
            own = None if getattr(owner, "_is_protocol", False) else getattr(cls, name, None)
            if own is None:
                setattr(cls, name, _forwarder(name, signature))
            elif _shape(inspect.signature(own))[1:] != _shape(signature):
                raise TypeError(
                    f"wrapper {cls.__qualname__} has {name}{shown(inspect.signature(own))}, but the protocol has "
                    f"{name}{shown(signature)}; take the protocol's parameters, or leave it out: it is "
                    "forwarded by the route"
                )

    def __init__(self, name: str, children: Mapping[str, Any], decided_by: Mapping[str, str] | None = None) -> None:
        self.backend_id = BackendId(name)
        self.children = dict(children)
        self.captured: tuple[str, ...] = tuple(children)
        """Labels of the children that take part in graphs at the level that this backend claims."""
        inside = [child for child in children.values() if isinstance(child, ForwardingBackend)]
        self.left_out: dict[str, str] = {name: why for child in inside for name, why in child.left_out.items()}
        """Backends that were to serve a role per batch and do not, by name, with the reason."""
        combined = weakest({label: child.claims for label, child in children.items()}, decided_by)
        self.claims = combined.claims
        self.limiting_children = combined.limited_by
        self._calls: dict[tuple[str, str], Hook | None] = {
            (label, method): getattr(child, method, None)
            for label, child in children.items()
            for method in methods(AttentionBackend)
        }
        for hook in hook_signatures():
            bound = {(label, hook): bind_optional_hook(child, hook) for label, child in children.items()}
            self._calls |= bound
            if not any(bound.values()):
                setattr(self, hook, None)  # absent, as in the children

    @abstractmethod
    def route(self, batch: ForwardBatch | None, layer: LayerSpec | None) -> tuple[str, ...]:
        """Return the labels of the children that a call goes to; exactly one if it runs a layer.

        ``batch`` and ``layer`` are those of the call, ``None`` if it has none. A call with neither, e.g.
        ``init_cuda_graph_state``, goes to all children without calling this.
        """

    def forward_to(
        self,
        labels: tuple[str, ...],
        name: str,
        batch: ForwardBatch | None,
        call: Callable[[Hook], Any],
        plans: bool = False,
    ) -> Any:
        """Forward a call to some children and combine their results.

        ``call`` runs a child's method with the arguments. ``plans`` is True if the protocol requires a plan. Raises
        BackendError if results differ.
        """
        results = {label: call(self.required(label, name)) for label in labels}
        if batch is not None and (plans or any(isinstance(result, Plan) for result in results.values())):
            return self.plan_of(batch, results, name)
        first, *others = results.values()
        if any(other != first for other in others):
            raise BackendError(f"{self.backend_id.name} cannot answer {name}: its children return {results}")
        return first

    def plan_of(self, batch: ForwardBatch, made: Mapping[str, object], hook: str) -> Plan:
        """Make the wrapper's plan of the plans that ``hook`` of some children returned, by label. Each is checked."""
        mode, rows = batch.forward_mode, batch.num_tokens
        parts = tuple(
            received_plan(plan, self.children[label].backend_id, mode, rows, hook) for label, plan in made.items()
        )
        return Plan(self.backend_id, mode, parts[0].query_rows, parts[0].kv_rows, parts=parts)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for label in self.captured:
            self.required(label, "init_cuda_graph_state")(max_bs, max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the maximum: a batch is padded once, and every captured child must be able to plan it."""
        return max(int(self.required(label, "get_cuda_graph_seq_len_fill_value")()) for label in self.captured)

    def chunk_plan(self, label: str, batch: ForwardBatch, disable_flashinfer_ragged: bool) -> Plan | None:
        """Call a child's ``init_mha_chunk_metadata``. Without the hook there is nothing to plan (A6, A8)."""
        hook = self._calls[label, "init_mha_chunk_metadata"]
        return None if hook is None else hook(batch, disable_flashinfer_ragged)

    def required(self, label: str, name: str) -> Hook:
        """Return a child's method or hook as a function of all offered values. Raises BackendError if it has none."""
        found = self._calls.get((label, name))
        if found is None and label not in self.children:
            raise BackendError(
                f"{self.backend_id.name} routes {name} to {label!r}, and has no such child; "
                f"route to a tuple of labels: {', '.join(self.children)}"
            )
        if found is None:
            child = self.children[label].backend_id.name
            raise BackendError(
                f"{self.backend_id.name} needs {name} of its {label} backend {child}, which has none; "
                f"it claims {self.children[label].claims}"
            )
        return found


def planner_claims(backend: AttentionBackend, plan: Plan) -> Claims:
    """Return the claims of a plan's own planners: ``planner_claims(backend, batch.plan.attention)``."""
    if not isinstance(backend, ForwardingBackend):
        return backend.claims
    by_id = {child.backend_id: child for child in backend.children.values()}
    claims = {part.planner.name: planner_claims(by_id[part.planner], part) for part in plan.parts}
    return weakest(claims).claims if len(claims) > 1 else next(iter(claims.values()))


def _forwarder(name: str, signature: inspect.Signature) -> Callable[..., Any]:
    """Generate the wrapper method that forwards ``name``, with the protocol's own parameters.

    Compiled, like a hook's adapter: one frame and no packing of arguments in every layer.
    """
    parameters = signature.parameters
    batch = next((parameter for parameter in _BATCH if parameter in parameters), None)
    layer = _LAYER if _LAYER in parameters else None
    given = ", ".join(f"{p}={p}" if q.kind is q.KEYWORD_ONLY else p for p, q in parameters.items())
    heads, keyword_only = ["self"], False  # of the lambda: self, q, *, save=default_save
    for parameter in parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            heads.append("*")
            keyword_only = True
        heads.append(parameter.name + f"=default_{parameter.name}" * (parameter.default is not parameter.empty))
    source = f"lambda {', '.join(heads)}:"
    if layer is not None:
        source += f" self.required(*self.route({batch}, layer), {name!r})({given})"
    else:
        labels = "tuple(self.children)" if batch is None else f"self.route({batch}, None)"
        plans = signature.return_annotation in ("Plan", Plan)
        source += f" self.forward_to({labels}, {name!r}, {batch}, lambda method: method({given}), {plans})"
    defaults = {f"default_{p}": q.default for p, q in parameters.items() if q.default is not q.empty}
    method: Callable[..., Any] = eval(source, defaults)
    method.__name__, method.__qualname__ = name, f"{ForwardingBackend.__qualname__}.{name}"
    return method


def _shape(signature: inspect.Signature) -> list[tuple[str, Any, Any]]:
    return [(parameter.name, parameter.kind, parameter.default) for parameter in signature.parameters.values()]


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
                f"{self.backend_id.name} was called to plan the chunks of an MLA prefill, but its model has no "
                "full-attention layer"
            )
        return self.chunk_plan(FULL, forward_batch, disable_flashinfer_ragged)

    def commit_states(self, forward_batch: ForwardBatch, accepted: Tensor) -> None:
        self.required(LINEAR, "commit_states")(forward_batch, accepted)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the full child's value: it concerns the KV cache. Linear children read slots, where -1 is padding."""
        label = FULL if FULL in self.children else LINEAR
        return int(self.required(label, "get_cuda_graph_seq_len_fill_value")())
