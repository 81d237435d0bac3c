"""Kinds of scratch memory (A2)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from attnplug.declare.errors import PluginError
from attnplug.declare.reading import boolean

_NAME = re.compile(r"[a-z0-9]+([-_.][a-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class WorkspaceKind:
    """Contract of an allocation, e.g. ``WorkspaceKind("acme", zeroed=True)``. Backends share those of equal kinds.

    ``zeroed`` memory is zero on first use, and its users leave it zero (semaphores); other memory may hold anything.
    Kernels that overwrite memory which others expect to be zero need a kind with its own name. A plugin declares its
    kinds with the hook ``attnplug_workspace_kinds``.
    """

    name: str
    zeroed: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise PluginError(f"workspace kind {self.name!r} must be named in lower case, such as 'acme-counters'")
        boolean(f"zeroed of workspace kind {self.name!r}", self.zeroed)


SCRATCH = WorkspaceKind("scratch")
"""Scratch memory shared by all backends, the only kind of core: ``request(name, device, SCRATCH, nbytes)``."""
