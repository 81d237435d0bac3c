"""Building one backend: import its factory, give it its context, and judge what comes back."""

from __future__ import annotations

import importlib
import inspect
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
"""The extra by which a layer's feature reaches ``forward``."""


def backend_problems(backend: object, *, linear: bool = False) -> Iterator[str]:
    """Every way in which an object falls short of the protocol, with ``linear`` of the one for linear attention."""
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


def name_problems(backend: AttentionBackend, name: str) -> Iterator[str]:
    """Errors name a backend by its identity, so it must carry the name by which it is asked for."""
    if backend.backend_id.name != name:
        yield f"its backend_id is named {backend.backend_id.name!r}; use the context's name, which is {name!r}"


def claim_problems(backend: AttentionBackend, declared: Capabilities, page_size: int) -> Iterator[str]:
    """Every claim of a built backend that its spec does not declare, or for which it lacks the hooks."""
    claims = backend.claims
    if AttentionKind.MLA not in declared.kinds:  # then nobody asks how it extends
        claims = replace(claims, mla_extend=declared.mla_extend)
    yield from claims.beyond(declared.claims)
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


def unread(context: BackendContext, declared: Capabilities) -> Iterator[str]:
    """Every layer whose cache is laid out as the backend does not declare to read it. A host may not have said so."""
    if context.roles == {Role.LINEAR}:
        return
    mha, mla, can = context.pools.mha, context.pools.mla, declared.layouts
    layouts = [] if mha is None else [(layer, layout) for layer in mha.layer_ids for layout in mha.layout(layer)]
    layouts += [] if mla is None else [(layer, mla.layout(layer)) for layer in mla.layer_ids]
    for layer, layout in layouts:
        if layout.name not in can:
            yield (
                f"the cache of layer {layer} is laid out {layout.name}, with shape {layout.shape} and strides "
                f"{layout.strides}, and it reads only {', '.join(sorted(can))}"
            )


def unmet(claims: Claims, problem: Problem, roles: Collection[Role]) -> Iterator[str]:
    """Every way in which a built backend claims less than the problem it was selected for needs."""
    if problem.captured(roles) > claims.cuda_graph:
        yield (
            f"CUDA graphs were asked for at level {problem.cuda_graph.name}, but what was built claims "
            f"{claims.cuda_graph.name}"
        )
    if claims.needs_cpu_seq_lens and not problem.exact_lengths:
        yield "the host has upper bounds of lengths only, but what was built claims needs_cpu_seq_lens"
    if problem.speculative_topk > 1 and not claims.trees:
        yield f"drafts with {problem.speculative_topk} branches are trees, but what was built claims chains only"
    if problem.model is None or not set(roles) - {Role.LINEAR}:
        return
    layers = problem.model.full_layers
    for feature in sorted({feature for layer in layers for feature in layer.features}):
        extra = EXTRA_OF.get(feature)
        if extra is not None and extra not in claims.extras:
            claimed = ", ".join(sorted(claims.extras)) or "none"
            yield f"the model's {feature} layers need the extra {extra}, but what was built claims the extras {claimed}"
    if Role.PREFILL in roles and problem.model.is_sparse and ExtendPath.ABSORBED not in claims.mla_extend:
        yield "it was chosen to prefill sparse MLA, which runs absorbed, but what was built claims no absorbed extend"
    if Role.PREFILL in roles and not claims.mla_extend and any(layer.mla is not None for layer in layers):
        yield "it was chosen to prefill MLA, but what was built claims no way to do so: its mla_extend is empty"


def import_factory(registered: Registered) -> Callable[[BackendContext], Any]:
    """Import a backend's factory, which nothing did before. Raises :class:`BackendError`, whatever is wrong."""
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
    """Turn whatever a plugin's code raises into an error that names the plugin. Kernel libraries raise anything."""
    where = f"{_who(registered)}: {registered.spec.factory} cannot be {action}"
    try:
        yield
    except PluginError as error:  # about what it declares: says what is wrong, but not in which plugin
        raise BackendError(f"{where}: {error}") from error
    except (AttnplugError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise BackendError(f"{where}: {describe_error(error)}") from error


def _who(registered: Registered) -> str:
    return f"backend {registered.spec.name} ({registered.source})"


def build_backend(registered: Registered, context: BackendContext, problem: Problem | None = None) -> AttentionBackend:
    """Import a backend's factory, build it, and check the result: its hooks can be called, its spec declares its
    claims, and it claims what ``problem`` needs, the one that it was selected for."""
    spec = registered.spec
    for unreadable in unread(context, spec.capabilities):
        raise BackendError(f"{_who(registered)}: {unreadable}", settings=[Setting.LAYOUT])
    factory = import_factory(registered)
    with _blamed_on(registered, "built"):  # looking at it runs properties of its own
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
    lacking = [] if problem is None else list(unmet(backend.claims, problem, context.roles))
    if lacking:
        raise BackendError(
            f"{_who(registered)}: what {spec.factory} returned does not serve what it was selected for:\n"
            + "\n".join(f"  {p}" for p in lacking)
        )
    built: AttentionBackend = backend
    return built
