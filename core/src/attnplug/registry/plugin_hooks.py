"""Hook specifications, and the ``hookimpl`` marker for plugins.

Each hook is called once per plugin, when the plugin is loaded. A plugin implements the ones it needs. The module that
implements them must import neither torch nor a kernel library, because ``attnplug backends`` loads every plugin. An
invalid result is reported with the plugin's distribution, and the whole plugin is left out. Other plugins are not
affected (D2). Example::

    @attnplug.hookimpl
    def attnplug_backends():
        return [BackendSpec(name="my_backend", factory="my_package.backend:MyBackend", ...)]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pluggy

from attnplug.declare.device import DeviceSpec
from attnplug.declare.kv_format import KVFormat
from attnplug.declare.spec import BackendSpec
from attnplug.declare.workspace_kind import WorkspaceKind

PROJECT = "attnplug"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Decorator of a plugin's hooks: ``@hookimpl`` above ``def attnplug_backends()``."""


@hookspec
def attnplug_backends() -> Iterable[BackendSpec]:  # type: ignore[empty-body] # a hookspec has none
    """Return the specs of this plugin's backends.

    The factory named in a spec is imported only when the backend is built. Backend names are unique: if two plugins
    claim one, neither gets it, and the error names both. Core keeps its own names.
    """


@hookspec
def attnplug_kv_formats() -> Iterable[KVFormat]:  # type: ignore[empty-body] # a hookspec has none
    """Return the KV cache formats that this plugin provides. A host's setting ``kv_dtype`` requests one by name.

    ``torch_native`` serves every format by its codec. Backends with kernels claim formats by name. Names are unique, as
    those of backends are.
    """


@hookspec
def attnplug_workspace_kinds() -> Iterable[WorkspaceKind]:  # type: ignore[empty-body] # a hookspec has none
    """Return the kinds of workspace memory that this plugin's kernels need, beyond ``attnplug.SCRATCH``.

    Plugins with equal kinds share memory. One name with different contracts is an error that names both plugins.
    """


@hookspec
def attnplug_devices() -> Iterable[DeviceSpec]:  # type: ignore[empty-body] # a hookspec has none
    """Return the torch device types that this plugin supports. Their names are unique, as those of backends are."""


@hookspec
def attnplug_rankings() -> Iterable[Path]:  # type: ignore[empty-body] # a hookspec has none
    """Return folders with measured tables, by which ``auto`` ranks this plugin's backends or others.

    A folder is read when ``auto`` chooses, not when the plugin is loaded. It holds the files that ``attnplug tune``
    writes, named after the device: ``nvidia-h200.json``. If two plugins ship a table for the same backend, role, layer
    shape and device, neither is used and a warning names both files.
    """


@hookspec
def attnplug_tiny_models() -> Mapping[str, Mapping[str, object]]:  # type: ignore[empty-body] # a hookspec has none
    """Return Hugging Face configs of tiny models by name, as ``config.json`` would hold them.

    ``tiny:NAME`` is then a model with random weights, like core's own. The engine's tokens for it are ASCII characters,
    so ``vocab_size`` must be at least 128. Names are unique, as those of backends are.
    """
