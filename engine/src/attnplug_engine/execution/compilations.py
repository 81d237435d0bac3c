"""Counter of kernels that this process compiles or loads from a disk cache (E1)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnplug.registry.kernel_builds import compiled_kernels


@dataclass(frozen=True, slots=True)
class Compilation:
    """A kernel variant that became part of this process. ``cached``: it was loaded from a disk cache."""

    name: str
    seconds: float
    cached: bool


_by_triton: list[Compilation] = []
_watching = False


class CompilationMark:
    """A point in time. :meth:`since` returns what was compiled or loaded after it.

    Counts variants of Triton kernels, modules of FlashInfer, and what backends list as ``kernel_builds``. It does not
    see compilers that report nothing, such as the CuTe DSL.
    """

    def __init__(self) -> None:
        _watch_triton()
        self._triton, self._built, self._modules = len(_by_triton), len(compiled_kernels), _flashinfer_modules()

    def since(self) -> list[Compilation]:
        built = [Compilation(name, seconds, cached=False) for name, seconds in compiled_kernels[self._built :]]
        modules = [Compilation(name, 0.0, cached=True) for name in _flashinfer_modules() - self._modules]
        return [*built, *modules, *_by_triton[self._triton :]]


def describe(compilations: Sequence[Compilation]) -> str | None:
    """Return a line about the kernels that were compiled; None if all came from disk caches."""
    compiled = [each for each in compilations if not each.cached]
    if not compiled:
        return None
    noun = "kernel" if len(compiled) == 1 else "kernels"
    seconds = sum(each.seconds for each in compiled)
    return f"compiled {len(compiled)} {noun} in {seconds:.1f} s; cached for the next start"


def _flashinfer_modules() -> set[str]:
    """Return the modules that FlashInfer has generated or loaded in this process; empty if it is not imported."""
    registry = getattr(sys.modules.get("flashinfer.jit.core"), "jit_spec_registry", None)
    return set() if registry is None else set(registry.get_all_specs())


def _watch_triton() -> None:
    """Let Triton report compilations from now on. A listener of somebody else is called as before."""
    global _watching
    if _watching:
        return
    try:
        from triton import knobs
    except ImportError:
        return
    previous = knobs.compilation.listener

    def listener(**event: Any) -> None:
        if previous is not None:
            previous(**event)
        name = str(event["metadata"].get("name", event["src"]))
        _by_triton.append(Compilation(name, event["times"].total / 1e6, event["cache_hit"]))

    knobs.compilation.listener = listener
    _watching = True
