"""From a selection to the backend that runs: built once per backend, split where the roles differ."""

from __future__ import annotations

from dataclasses import replace

from attnplug.backend import AttentionBackend, BackendContext, build_backend
from attnplug.problem import Role
from attnplug.select import Selection
from attnplug.wrappers import SplitBackend


def build_selection(selection: Selection, context: BackendContext) -> AttentionBackend:
    """Build what was chosen for prefill and decode, from one context whose name, roles and options are filled in here.

    The context holds pools and coordinators, so these exist before any backend does (A10's order).
    """
    roles = [role for role in (Role.PREFILL, Role.DECODE) if role in selection.choices]
    built: dict[str, AttentionBackend] = {}
    for role in roles:
        registered = selection.chosen(role)
        name = registered.spec.name
        if name not in built:
            mine = frozenset(other for other in roles if selection.chosen(other) is registered)
            own = replace(context, name=name, roles=mine, options=selection.options.get(name))
            built[name] = build_backend(registered, own)
    prefill, decode = (built[selection.chosen(role).spec.name] for role in roles)
    return prefill if prefill is decode else SplitBackend(prefill, decode)
