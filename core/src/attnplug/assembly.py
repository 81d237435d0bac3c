"""From a selection to the backend that runs: built once per backend, split where the roles differ."""

from __future__ import annotations

from dataclasses import replace

from attnplug.backend import AttentionBackend, BackendContext, build_backend
from attnplug.loading import Registered
from attnplug.problem import Role
from attnplug.select import Selection
from attnplug.wrappers import HybridLinearBackend, SplitBackend


def build_selection(selection: Selection, context: BackendContext) -> AttentionBackend:
    """Build what was chosen for each role, from one context whose name, roles and options are filled in here.

    The context holds pools and coordinators, so these exist before any backend does (A10's order). Prefill and decode
    by different backends are split; a backend for linear layers is joined to what serves the others.
    """
    full = _full_attention(selection, context)
    if Role.LINEAR not in selection.choices:
        assert full is not None, "a model has layers of one sort or the other"
        return full
    registered = selection.chosen(Role.LINEAR)
    linear = build_backend(registered, _own(selection, context, registered, frozenset({Role.LINEAR})))
    return HybridLinearBackend(full, linear, context.model)


def _full_attention(selection: Selection, context: BackendContext) -> AttentionBackend | None:
    roles = [role for role in (Role.PREFILL, Role.DECODE) if role in selection.choices]
    if not roles:
        return None
    built: dict[str, AttentionBackend] = {}
    for role in roles:
        registered = selection.chosen(role)
        name = registered.spec.name
        if name not in built:
            mine = frozenset(other for other in roles if selection.chosen(other) is registered)
            built[name] = build_backend(registered, _own(selection, context, registered, mine))
    return SplitBackend(*built.values()) if len(built) > 1 else next(iter(built.values()))


def _own(
    selection: Selection, context: BackendContext, registered: Registered, roles: frozenset[Role]
) -> BackendContext:
    name = registered.spec.name
    return replace(context, name=name, roles=roles, options=selection.options.get(name))
