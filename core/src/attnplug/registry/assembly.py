"""Build the selected backends, each once: import factories, validate results, and combine them by role or batch."""

from __future__ import annotations

import inspect
import pkgutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar, get_type_hints

from attnplug.auto.fastest import FastestBackend
from attnplug.auto.ranking import BY_PREFERENCE, Ranking
from attnplug.auto.schedule import BackendSchedule
from attnplug.contract.backend import (
    AttentionBackend,
    GraphPlanning,
    LinearHooks,
    bind_optional_hook,
    hook_signatures,
    methods,
    shown,
)
from attnplug.contract.context import BackendContext, HostContext
from attnplug.declare.capabilities import Capabilities, Claims
from attnplug.declare.errors import (
    BackendError,
    HookError,
    PluginWarning,
    Refusal,
    RefusalCode,
    Setting,
    describe_error,
)
from attnplug.declare.model import AttentionKind, Feature
from attnplug.declare.problem import DType, ExtendPath, GraphLevel, Problem, Role
from attnplug.declare.spec import Registered
from attnplug.machine.runtime import runtime_of
from attnplug.registry.kernel_builds import build_kernels
from attnplug.registry.loading import BuildError, attributed_to
from attnplug.registry.registry import Registry
from attnplug.registry.select import select
from attnplug.registry.selection import AUTO, BackendRequest, Selection
from attnplug.wrappers.forwarding import HybridLinearBackend, SplitBackend

EXTRA_OF = {Feature.SINKS: "sinks", Feature.SPARSE: "selected", Feature.COMPRESSED: "entries"}
"""Extras of ``forward`` that carry a layer's feature."""


def backend_problems(backend: object, *, linear: bool = False) -> Iterator[str]:
    """Yield every way in which an object violates the backend protocol.

    With ``linear``, check against the protocol of linear attention. An empty result means that ``backend`` conforms.
    """
    for name, wanted in get_type_hints(AttentionBackend).items():
        found = getattr(backend, name, None)
        if found is None:
            yield f"it has no {name}"
        elif not isinstance(found, wanted):
            yield f"its {name} is {found!r}, not a {wanted.__name__}"
    needed = methods(AttentionBackend)
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
    """Import a backend's factory. Raises :class:`BuildError` for any failure."""
    spec = registered.spec
    with attributed_to(registered, f"{spec.factory} cannot be imported"):
        factory: Callable[[BackendContext], Any] = pkgutil.resolve_name(spec.factory)
    if not callable(factory):
        raise BuildError(registered, BackendError(f"{spec.factory} is {factory!r}, which is not callable"))
    return factory


def build_backend(registered: Registered, context: BackendContext, problem: Problem | None = None) -> AttentionBackend:
    """Import a backend's factory, build the backend and validate it. Raises BuildError with every problem found.

    Its hooks must be callable, and its claims within its spec and sufficient for ``problem``, if given.
    """
    spec = registered.spec
    mha, mla, can = context.pools.mha, context.pools.mla, spec.capabilities.layouts
    layouts = [] if mha is None else [(layer, layout) for layer in mha.layer_ids for layout in mha.layout(layer)]
    layouts += [] if mla is None else [(layer, mla.layout(layer)) for layer in mla.layer_ids]
    for layer, layout in layouts:  # which hosts may omit from the problem
        either = layout.name == "token_major" and 1 in layout.shape[1:3]  # with one head, or pages of one token
        if layout.name not in can and not (either and "head_major" in can) and context.roles != {Role.LINEAR}:
            found = f"layout {layout.name}, with shape {layout.shape} and strides {layout.strides}"
            unreadable = f"the cache of layer {layer} has {found}; the backend reads only {', '.join(sorted(can))}"
            raise BuildError(registered, BackendError(unreadable, settings=[Setting.LAYOUT]))
    factory = import_factory(registered)
    _compile_kernels([(registered, context.roles, context.options)], context, problem)
    with attributed_to(registered, f"{spec.factory} cannot be built"):  # the checks run the plugin's properties
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
        raise BuildError(registered, BackendError(f"{spec.factory} {fault}:\n{lines}"))
    backend.backend_id.source = str(registered.source)
    return backend


Built = TypeVar("Built")


def build_chosen(
    registry: Registry,
    request: BackendRequest,
    problem: Problem,
    build: Callable[[Selection], Built],
    failed: Mapping[str, Refusal] | None = None,
    ranking: Ranking = BY_PREFERENCE,
    roles: Collection[Role] = tuple(Role),
) -> tuple[Selection, Built]:
    """Select backends and build them. If one that ``auto`` chose cannot be built, warn and select again (D2).

    ``build`` creates everything that depends on the selection, pools too, because another backend may need another page
    size. It raises what :func:`build_selection` raises. A backend that was requested by name or given options is never
    replaced; in strict mode none is. ``failed``: backends that an earlier selection left out, by name, such as that of
    :func:`choose_importable`. ``roles``: those that the host leaves to attnplug. Example::

        build = lambda selection: build_selection(selection, HostContext(pools=make_pools(selection.page_size), ...))
        selection, backend = build_chosen(load_registry(), BackendRequest(), problem, build)
    """
    left_out = dict(failed or {})
    while True:
        selection = select(registry, request, problem, left_out, ranking, roles)
        try:
            return selection, build(selection)
        except BuildError as error:
            name = error.backend.spec.name
            choices = selection.choices.values()
            by_name = any(choice.chosen is error.backend and choice.requested != AUTO for choice in choices)
            if registry.strict or request.options.get(name) or by_name:
                raise
            left_out[name] = Refusal(RefusalCode.FACTORY, str(error), value=name)
            warnings.warn(f"{error}; auto continues without it", PluginWarning, stacklevel=2)


def choose_importable(
    registry: Registry, request: BackendRequest, problem: Problem, ranking: Ranking = BY_PREFERENCE
) -> Selection:
    """Select backends that can be imported (D3): ``choose_importable(registry, request, problem)``. Builds nothing.

    For hosts that load weights before they build backends: a failing import is reported before weights are loaded.
    """

    def import_chosen(selection: Selection) -> None:
        for registered, _ in selection.uses().values():
            import_factory(registered)

    return build_chosen(registry, request, problem, import_chosen, ranking=ranking)[0]


def build_selection(selection: Selection, context: HostContext) -> AttentionBackend:
    """Build and combine the selected backends: ``build_selection(selection, context)``. Raises :class:`BuildError`.

    Kernels that the backends compile just in time are compiled first. The context holds pools and coordinators, so
    these exist before any backend (A10's order). Each backend gets its own view of it: name, roles and options.

    - If prefill and decode have different backends, they become a ``SplitBackend``.
    - If several backends share a role by batch, a ``FastestBackend`` sends each batch to the fastest.
    - A backend for linear layers and the one for the other layers become a ``HybridLinearBackend``.
    - A draft model has one role for prefill and decode.
    """
    uses = [(*use, selection.options.get(name)) for name, use in selection.uses().items()]
    _compile_kernels(uses, context, selection.problem)
    possible = (Role.DRAFT,) if selection.problem.is_draft else (Role.PREFILL, Role.DECODE)
    roles = [role for role in possible if role in selection.choices]
    built: dict[str, AttentionBackend] = {}
    for name, (registered, served) in selection.uses().items():
        if own := served & set(roles):
            built[name] = _build(selection, registered, context, own)
    full = next(iter(built.values()), None)
    extenders = selection.graph_extenders({name: backend.claims.cuda_graph for name, backend in built.items()})
    if extenders or any(selection.choices[role].schedule is not None for role in roles):
        full = _dispatch_by_batch(selection, built, roles, extenders)
    elif len(built) > 1:
        full = SplitBackend(*built.values(), verify=selection.verify)
    if Role.LINEAR not in selection.choices:
        assert full is not None, "a model has full-attention or linear layers"
        return full
    linear = _build(selection, selection.chosen(Role.LINEAR), context, frozenset({Role.LINEAR}))
    return HybridLinearBackend(full, linear, context.model)


def _compile_kernels(
    uses: Collection[tuple[Registered, frozenset[Role], Any]], context: HostContext, problem: Problem | None
) -> None:
    if all(backend.spec.kernel_builds is None for backend, _, _ in uses):
        return
    here, wanted = runtime_of(context.device).processor(context.device), problem or Problem()
    dtype = DType.parse(str(context.dtype), Setting.DTYPE)
    own = Problem(
        context.model, context.device.type, here.sm or None, dtype, context.kv_dtype, mla_extend=wanted.mla_extend
    )
    build_kernels(uses, replace(own, architecture=here.architecture, invariant=wanted.invariant))


def _dispatch_by_batch(
    selection: Selection, built: Mapping[str, AttentionBackend], roles: list[Role], extenders: list[str]
) -> FastestBackend:
    """Combine backends that share a role by batch, without those that lack an ability of the chosen one."""
    serving: dict[Role, BackendSchedule | str] = {}
    left_out: dict[str, str] = {}
    for role in roles:
        chosen, schedule = selection.chosen(role).spec.name, selection.choices[role].schedule
        serving[role] = chosen
        if schedule is None:
            continue
        weaker = {
            name: "; ".join(reasons)
            for name in schedule.candidates
            if (reasons := list(_lacking(built[chosen], built[name].claims, selection, role)))
        }
        left_out |= {name: f"{why}, so it does not share {role} with {chosen}" for name, why in weaker.items()}
        serving[role] = schedule.only(name for name in schedule.candidates if name not in weaker) or chosen
    used = {name for by in serving.values() for name in ((by,) if isinstance(by, str) else by.candidates)}
    children = {name: backend for name, backend in built.items() if name in used}
    extends = next((name for name in extenders if name in used), None)
    return FastestBackend(children, serving, verify=selection.verify, left_out=left_out, captured_extends=extends)


def _lacking(chosen: AttentionBackend, other: Claims, selection: Selection, role: Role) -> Iterator[str]:
    """Yield abilities of a role's chosen backend that the host needs and a backend with claims ``other`` lacks."""
    problem, claims = selection.problem, chosen.claims
    model, drafts = problem.model, problem.speculative_tokens > 0
    assert model is not None, "a selection has roles"
    extends = role is not Role.DECODE and not model.is_sparse and any(layer.mla is not None for layer in model.layers)
    if extends and (paths := claims.mla_extend - other.mla_extend):
        yield f"it cannot extend MLA by {' or '.join(sorted(paths))}"
    captured = role is not Role.PREFILL or (drafts and selection.verify is Role.PREFILL)
    if captured and problem.wants_graphs and problem.device != "cpu":
        wanted = min(claims.cuda_graph, GraphLevel.UNIFORM if drafts else GraphLevel.DECODE)
        if other.cuda_graph < wanted:
            yield f"it claims CUDA graphs at level {other.cuda_graph.name}, not {wanted.name}"
    if drafts and other.needs_cpu_seq_lens and not claims.needs_cpu_seq_lens:
        yield "it plans from lengths on the host, so every round would wait for them"


def _build(
    selection: Selection, registered: Registered, context: HostContext, roles: frozenset[Role]
) -> AttentionBackend:
    spec = registered.spec
    problem, options = selection.problem, selection.options.get(spec.name)
    own = context.for_backend(spec.name, spec.capabilities, roles=roles, options=options, invariant=problem.invariant)
    return build_backend(registered, own, problem)
