"""Build the selected backends, each once, and combine them if roles or batches use different ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from attnplug.auto.fastest import FastestBackend
from attnplug.auto.ranking import BY_PREFERENCE, Ranking
from attnplug.auto.schedule import BackendSchedule
from attnplug.contract.backend import AttentionBackend
from attnplug.contract.context import HostContext
from attnplug.declare.claims import Claims
from attnplug.declare.errors import AttnplugError, BackendError, PluginWarning
from attnplug.declare.problem import GraphLevel, Problem, Role
from attnplug.declare.refusal import Refusal, RefusalCode
from attnplug.declare.registered import Registered
from attnplug.registry.building import build_backend, import_factory
from attnplug.registry.registry import Registry
from attnplug.registry.select import select
from attnplug.registry.selection import AUTO, BackendRequest, Selection
from attnplug.wrappers.split import HybridLinearBackend, SplitBackend

Built = TypeVar("Built")


class BuildError(BackendError):
    """A selected backend could not be built. ``backend`` is its registration, with the plugin's distribution."""

    def __init__(self, backend: Registered, error: AttnplugError) -> None:
        label, text = f"backend {backend.spec.name} ({backend.source})", error.message
        super().__init__(text if text.startswith(label) else f"{label}: {text}", settings=error.settings)
        self.backend = backend
        self.exit_code = error.exit_code  # that of a UsageError if the backend refuses its options


def build_chosen(
    registry: Registry,
    request: BackendRequest,
    problem: Problem,
    build: Callable[[Selection], Built],
    failed: Mapping[str, Refusal] | None = None,
    ranking: Ranking = BY_PREFERENCE,
) -> tuple[Selection, Built]:
    """Select backends and build them. If one that ``auto`` chose cannot be built, warn and select again (D2).

    ``build`` creates everything that depends on the selection, including the pools, because another backend may need
    another page size. It raises what :func:`build_selection` raises. A backend that was requested by name or given
    options is never replaced; in strict mode none is. ``failed`` holds backends that an earlier selection left out, by
    name, such as that of :func:`choose_importable`. Example::

        def build(selection):
            pools = make_pools(selection.page_size)
            return build_selection(selection, HostContext(pools=pools, ...))

        selection, backend = build_chosen(load_registry(), BackendRequest(), problem, build)
    """
    left_out = dict(failed or {})
    while True:
        selection = select(registry, request, problem, left_out, ranking)
        try:
            return selection, build(selection)
        except BuildError as error:
            name = error.backend.spec.name
            if registry.strict or request.options.get(name) or _requested_by_name(selection, error.backend):
                raise
            left_out[name] = Refusal(RefusalCode.FACTORY, str(error), value=name)
            warnings.warn(f"{error}; auto goes on without it", PluginWarning, stacklevel=2)


def choose_importable(
    registry: Registry, request: BackendRequest, problem: Problem, ranking: Ranking = BY_PREFERENCE
) -> Selection:
    """Select backends whose factories, including their kernel libraries, can be imported (D3). Builds nothing.

    For hosts that load weights before they build backends: a failing import is reported before weights are loaded.
    """
    return build_chosen(registry, request, problem, _import_chosen, ranking=ranking)[0]


def _import_chosen(selection: Selection) -> None:
    for role in selection.choices:
        for registered in selection.serving(role):
            _attributed(import_factory, registered)


def _requested_by_name(selection: Selection, backend: Registered) -> bool:
    return any(choice.chosen is backend and choice.requested != AUTO for choice in selection.choices.values())


def build_selection(selection: Selection, context: HostContext) -> AttentionBackend:
    """Build the selected backends and combine them into one. Raises :class:`BuildError` if one cannot be built.

    The context holds pools and coordinators, so these exist before any backend (A10's order). Each backend gets its own
    view of it, with its name, roles and options.

    - If prefill and decode have different backends, they become a ``SplitBackend``.
    - If several backends share a role by batch, a ``FastestBackend`` sends each batch to the fastest.
    - A backend for linear layers and the one for the other layers become a ``HybridLinearBackend``.
    - A draft model has one role for prefill and decode.
    """
    full = _full_attention(selection, context)
    if Role.LINEAR not in selection.choices:
        assert full is not None, "a model has full-attention or linear layers"
        return full
    registered = selection.chosen(Role.LINEAR)
    linear = _build(selection, registered, context, frozenset({Role.LINEAR}))
    return HybridLinearBackend(full, linear, context.model)


def _full_attention(selection: Selection, context: HostContext) -> AttentionBackend | None:
    roles = [role for role in (Role.PREFILL, Role.DECODE) if role in selection.choices]
    if selection.problem.is_draft:
        roles = [Role.DRAFT]
    if not roles:
        return None
    built: dict[str, AttentionBackend] = {}
    for name, registered in {each.spec.name: each for role in roles for each in selection.serving(role)}.items():
        own_roles = frozenset(role for role in roles if registered in selection.serving(role))
        built[name] = _build(selection, registered, context, own_roles)
    extenders = selection.graph_extenders({name: backend.claims.cuda_graph for name, backend in built.items()})
    if extenders or any(selection.schedule(role) is not None for role in roles):
        return _dispatch_by_batch(selection, built, roles, extenders)
    return SplitBackend(*built.values(), verify=selection.verify) if len(built) > 1 else next(iter(built.values()))


def _dispatch_by_batch(
    selection: Selection, built: Mapping[str, AttentionBackend], roles: list[Role], extenders: list[str]
) -> FastestBackend:
    """Combine backends that share a role by batch, without those that lack an ability of the chosen one."""
    serving: dict[Role, BackendSchedule | str] = {}
    left_out: dict[str, str] = {}
    for role in roles:
        chosen, schedule = selection.chosen(role).spec.name, selection.schedule(role)
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
    if captured and problem.wants_graphs and problem.device == "cuda":
        wanted = min(claims.cuda_graph, GraphLevel.UNIFORM if drafts else GraphLevel.DECODE)
        if other.cuda_graph < wanted:
            yield f"it claims CUDA graphs at level {other.cuda_graph.name}, not {wanted.name}"
    if drafts and other.needs_cpu_seq_lens and not claims.needs_cpu_seq_lens:
        yield "it plans from lengths on the host, so every round would wait for them"


def _build(
    selection: Selection, registered: Registered, context: HostContext, roles: frozenset[Role]
) -> AttentionBackend:
    spec = registered.spec
    own = context.for_backend(spec.name, spec.capabilities, roles=roles, options=selection.options.get(spec.name))
    return _attributed(build_backend, registered, own, selection.problem)


def _attributed(step: Callable[..., Built], registered: Registered, *rest: object) -> Built:
    """Run one build step. Its errors become a BuildError, which names the backend."""
    try:
        return step(registered, *rest)
    except AttnplugError as error:
        raise BuildError(registered, error) from error
