"""Build one backend: import its factory, call it with the context, and validate the result."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from attnplug.contract.backend import (
    AttentionBackend,
    GraphPlanning,
    LinearHooks,
    bind_optional_hook,
    hook_signatures,
    methods,
    protocol_attributes,
    protocol_methods,
)
from attnplug.contract.context import BackendContext
from attnplug.contract.hooks import shown
from attnplug.declare.capabilities import Capabilities
from attnplug.declare.claims import Claims
from attnplug.declare.errors import AttnplugError, BackendError, HookError, PluginError, describe_error
from attnplug.declare.model import AttentionKind, Feature
from attnplug.declare.problem import ExtendPath, GraphLevel, Problem, Role
from attnplug.declare.registered import Registered
from attnplug.declare.settings import Setting

EXTRA_OF = {Feature.SINKS: "sinks", Feature.SPARSE: "selected", Feature.COMPRESSED: "entries"}
"""Extras of ``forward`` that carry a layer's feature."""


def backend_problems(backend: object, *, linear: bool = False) -> Iterator[str]:
    """Yield every way in which an object violates the backend protocol.

    With ``linear``, check against the protocol of linear attention. An empty result means that ``backend`` conforms.
    """
    for name, wanted in protocol_attributes().items():
        found = getattr(backend, name, None)
        if found is None:
            yield f"it has no {name}"
        elif not isinstance(found, wanted):
            yield f"its {name} is {found!r}, not a {wanted.__name__}"
    needed = protocol_methods()
    if linear:
        needed = methods(LinearHooks) | {"init_forward_metadata": needed["init_forward_metadata"]}
    for name, signature in needed.items():
        method = getattr(backend, name, None)
        if not callable(method):
            yield f"it has no method {name}{shown(signature)}"
            continue
        positional = [p.name for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
        keywords = {p.name: None for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY}
        given = inspect.signature(method)
        try:
            given.bind(*positional, **keywords)
        except TypeError as error:
            yield f"its {name}{shown(given)} cannot be called as {name}{shown(signature)}: {error}"
    for name in hook_signatures():
        try:
            bind_optional_hook(backend, name)
        except (HookError, AttributeError) as error:  # the latter from a property that fails
            yield describe_error(error)


def claim_problems(backend: AttentionBackend, declared: Capabilities, page_size: int) -> Iterator[str]:
    """Yield every claim of a built backend that exceeds its spec, or whose hooks are missing."""
    claims = backend.claims
    if AttentionKind.MLA not in declared.kinds:  # then mla_extend has no meaning
        claims = replace(claims, mla_extend=declared.mla_extend)
    yield from claims.exceeding(declared)
    if claims.page_sizes.kernel_size(page_size) is None:
        yield f"it was built for page size {page_size}, but claims only {claims.page_sizes}"
    needed: dict[str, str] = {}
    if claims.cuda_graph > GraphLevel.NEVER:
        needed |= dict.fromkeys(methods(GraphPlanning), f"cuda_graph {claims.cuda_graph.name}")
    if ragged := claims.mla_extend - {ExtendPath.ABSORBED}:
        needed["forward_ragged"] = f"mla_extend {', '.join(sorted(ragged))}"
    if "selected" in claims.extras:
        needed["select"] = "the extra selected"
    for hook, claim in needed.items():
        if bind_optional_hook(backend, hook) is None:
            yield f"it claims {claim}, but has no {hook}{shown(hook_signatures()[hook])}"


def unreadable_layouts(context: BackendContext, declared: Capabilities) -> Iterator[str]:
    """Yield every layer whose cache layout the backend does not support. Hosts may omit the layout from the problem."""
    if context.roles == {Role.LINEAR}:
        return
    mha, mla, can = context.pools.mha, context.pools.mla, declared.layouts
    layouts = [] if mha is None else [(layer, layout) for layer in mha.layer_ids for layout in mha.layout(layer)]
    layouts += [] if mla is None else [(layer, mla.layout(layer)) for layer in mla.layer_ids]
    for layer, layout in layouts:
        if layout.name not in can:
            yield (
                f"the cache of layer {layer} has layout {layout.name}, with shape {layout.shape} and strides "
                f"{layout.strides}; the backend reads only {', '.join(sorted(can))}"
            )


def missing_claims(claims: Claims, problem: Problem, roles: Collection[Role]) -> Iterator[str]:
    """Yield everything that the problem needs and the built backend does not claim."""
    yield from map(str, claims.refusals(problem, roles))
    if problem.model is None or not set(roles) - {Role.LINEAR}:
        return
    layers = problem.model.full_layers
    for feature in sorted({feature for layer in layers for feature in layer.features}):
        extra = EXTRA_OF.get(feature)
        if extra is not None and extra not in claims.extras:
            claimed = ", ".join(sorted(claims.extras)) or "none"
            yield f"the model's {feature} layers need the extra {extra}, but the built backend claims {claimed}"
    if Role.PREFILL in roles and problem.model.is_sparse and ExtendPath.ABSORBED not in claims.mla_extend:
        yield "prefill of sparse MLA runs absorbed, but the built backend claims no absorbed extend"
    if Role.PREFILL in roles and not claims.mla_extend and any(layer.mla is not None for layer in layers):
        yield "prefill of MLA needs an extend path, but the mla_extend of the built backend is empty"


def import_factory(registered: Registered) -> Callable[[BackendContext], Any]:
    """Import a backend's factory. Raises :class:`BackendError` for any failure."""
    spec = registered.spec
    with _attributed_to(registered, "imported"):
        factory: Callable[[BackendContext], Any] = pkgutil.resolve_name(spec.factory)
    if not callable(factory):
        raise BackendError(f"{_label(registered)}: {spec.factory} is {factory!r}, which is not callable")
    return factory


@contextmanager
def _attributed_to(registered: Registered, action: str) -> Iterator[None]:
    """Raise any exception of a plugin's code as an error that names the plugin. Kernel libraries raise anything."""
    where = f"{_label(registered)}: {registered.spec.factory} cannot be {action}"
    try:
        yield
    except PluginError as error:  # raised by a declaration, which does not know its plugin
        raise BackendError(f"{where}: {error}") from error
    except (AttnplugError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise BackendError(f"{where}: {describe_error(error)}") from error


def _label(registered: Registered) -> str:
    return f"backend {registered.spec.name} ({registered.source})"


def build_backend(registered: Registered, context: BackendContext, problem: Problem | None = None) -> AttentionBackend:
    """Import a backend's factory, build the backend and validate it. Raises BackendError with every problem found.

    Its hooks must be callable, and its claims within its spec and sufficient for ``problem``, if given.
    """
    spec = registered.spec
    for unreadable in unreadable_layouts(context, spec.capabilities):
        raise BackendError(f"{_label(registered)}: {unreadable}", settings=[Setting.LAYOUT])
    factory = import_factory(registered)
    with _attributed_to(registered, "built"):  # the checks run the plugin's properties
        backend: AttentionBackend = factory(context)
        problems = list(backend_problems(backend, linear=context.roles == {Role.LINEAR}))
        if not problems:
            problems = list(claim_problems(backend, spec.capabilities, context.page_size))
            if (name := backend.backend_id.name) != context.name:  # error messages use the id
                problems.append(f"its backend_id is named {name!r}; use the context's name, which is {context.name!r}")
    fault = "did not return a valid backend"
    if not problems and problem is not None:
        fault = "returned a backend that does not meet the requirements"
        problems = list(missing_claims(backend.claims, problem, context.roles))
    if problems:
        lines = "\n".join(f"  {each}" for each in problems)
        raise BackendError(f"{_label(registered)}: {spec.factory} {fault}:\n{lines}")
    return backend
