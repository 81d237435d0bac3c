"""The hooks that a plugin may implement, and the marker with which it does.

Each hook is called once per plugin, when the plugin is loaded. A plugin implements those that it needs. The module that
implements them must import neither torch nor a kernel library, because ``attnplug backends`` loads every plugin. If
something cannot be used, it is reported with the plugin's distribution, and the rest of that plugin is not used either.
Other plugins are not affected (D2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pluggy

from attnplug.declare.spec import BackendSpec
from attnplug.declare.workspace_kind import WorkspaceKind

PROJECT = "attnplug"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def attnplug_backends() -> Iterable[BackendSpec]:  # type: ignore[empty-body] # a hookspec has none
    """Return the specs of the backends that this plugin brings.

    The factory named in a spec is imported only when a backend is built. A backend's name is unique: two plugins
    that claim one are both refused it, with an error that names both. Core's own names stay core's.
    """


@hookspec
def attnplug_workspace_kinds() -> Iterable[WorkspaceKind]:  # type: ignore[empty-body] # a hookspec has none
    """Return the kinds of workspace memory that this plugin's kernels need, beyond ``attnplug.SCRATCH``.

    Plugins that declare an equal kind share its memory. Two that declare one name with different contracts are an
    error that names both.
    """


@hookspec
def attnplug_rankings() -> Iterable[Path]:  # type: ignore[empty-body] # a hookspec has none
    """Return folders with measured tables, by which ``auto`` ranks this plugin's backends or others.

    A folder is read when ``auto`` chooses, not when the plugin is loaded. It holds the files that ``attnplug tune
    --tables`` writes, named after the device: ``nvidia-h200.json``. If two plugins ship a table for the same backend,
    role, layer shape and device, neither is used and a warning names both files.
    """


@hookspec
def attnplug_tiny_models() -> Mapping[str, Mapping[str, object]]:  # type: ignore[empty-body] # a hookspec has none
    """Return tiny models by name: what a Hugging Face ``config.json`` of that model would hold.

    ``tiny:NAME`` is then a model with random weights, like core's own. The engine's tokens for it are ASCII characters,
    so its ``vocab_size`` is 128 or more. Two plugins that claim one name are both refused it, with an error that names
    both. Core's own names stay core's.
    """
