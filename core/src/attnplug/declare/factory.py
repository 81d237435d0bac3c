"""Whether a spec's factory, or any module, exists, as far as that is known without importing it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from attnplug.declare.refusal import Refusal, RefusalCode

DOTTED = r"\w+(\.\w+)*"
"""A module's name, or an attribute's."""


def factory_refusal(factory: str) -> Refusal | None:
    """The refusal for a factory that does not exist; ``None`` if it does, or if that cannot be known.

    Nothing is imported: a factory's module imports torch and a kernel library. ``importlib.util.find_spec`` would
    import the parent packages. If the module happens to be imported already, the attribute is looked up too.
    """
    module, _, attribute = factory.partition(":")
    if (loaded := sys.modules.get(module)) is not None:
        first = attribute.partition(".")[0]
        if first in vars(loaded) or "__getattr__" in vars(loaded) or _is_being_imported(loaded):
            return None
        return Refusal(RefusalCode.FACTORY, f"its factory {factory} is not there: {module} has no {first}", value=first)
    if (missing := missing_module(module)) is None:
        return None
    message = f"its factory {factory} cannot be imported: there is no module {missing}"
    return Refusal(RefusalCode.FACTORY, message, value=missing)


def _is_being_imported(module: ModuleType) -> bool:
    """By another thread, as a rule: what it will have is not known yet."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def missing_module(module: str) -> str | None:
    """The first part of a dotted name that no finder knows; ``None`` if all are known, or if that cannot be known."""
    try:
        return _missing(module)
    except Exception:  # a foreign finder, or a namespace inside a package that is not imported: only an import can tell
        return None


def _missing(module: str) -> str | None:
    path: Sequence[str] | None = None
    parts = module.split(".")
    for name in (".".join(parts[:end]) for end in range(1, len(parts) + 1)):
        loaded = sys.modules.get(name)
        if loaded is not None:
            path = list(getattr(loaded, "__path__", ()))
        elif (found := _find(name, path)) is not None:
            path = list(found.submodule_search_locations or ())
        else:
            return name
    return None


def _find(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        found = finder.find_spec(name, path)
        if found is not None:
            return found
    return None
