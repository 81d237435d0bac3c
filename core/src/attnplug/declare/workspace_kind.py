"""Kinds of scratch memory, as data: who may leave what in it (A2)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from attnplug.declare.errors import PluginError
from attnplug.declare.reading import boolean

_NAME = re.compile(r"[a-z0-9]+([-_.][a-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class WorkspaceKind:
    """The contract of some memory: who may leave what in it.

    Backends that ask for an equal kind share one allocation. ``zeroed`` memory is zero on first use, and its users
    leave it zero (semaphores); plain memory may hold anything. Kernels that overwrite what others expect to be zero ask
    for a kind with a name of their own. A plugin declares its kinds with the hook ``attnplug_workspace_kinds``.
    """

    name: str
    zeroed: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise PluginError(f"workspace kind {self.name!r} must be named in lower case, such as 'acme-counters'")
        boolean(f"zeroed of workspace kind {self.name!r}", self.zeroed)


SCRATCH = WorkspaceKind("scratch")
"""Plain memory that every backend can share. It is the only kind that core itself declares."""
