"""The hooks that a plugin may implement, and the marker with which it does."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from attnplug.declare.spec import BackendSpec

PROJECT = "attnplug"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def attnplug_backends() -> Iterable[BackendSpec]:  # type: ignore[empty-body] # a hookspec has none
    """Return the specs of the backends that this plugin brings.

    Called once per process, when the plugin is loaded. The module that implements it must import neither torch
    nor a kernel library: ``attnplug backends`` loads every plugin, and the factory named in the spec is imported
    only when a backend is built.
    """
