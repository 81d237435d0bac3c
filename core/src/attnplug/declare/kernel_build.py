"""A kernel that a backend compiles before its first call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KernelBuild:
    """A kernel, or a module of kernels, that a backend compiles just in time. ``BackendSpec.kernel_builds`` lists them.

    - ``name``: unique among the backend's kernels. The same name always stands for the same binary.
    - ``build()``: loads the kernel into the calling process, and compiles it into the library's disk cache if it is not
      there. Idempotent. It is called in a new process first, so it can be pickled and needs no state of this one.
    - ``is_cached()``: True if ``build`` would compile nothing.
    """

    name: str
    build: Callable[[], object]
    is_cached: Callable[[], bool]
