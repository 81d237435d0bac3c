"""Existence checks of factories and modules, without importing them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from attnplug.declare.refusal import Refusal, RefusalCode

DOTTED = r"\w+(\.\w+)*"
"""Pattern of a dotted module or attribute name."""


def factory_refusal(factory: str) -> Refusal | None:
    """Return the refusal of a factory that does not exist; ``None`` if it exists or that cannot be known.

    Imports nothing, because a factory's module imports torch and a kernel library (``importlib.util.find_spec`` would
    import parent packages). If the module has been imported already, its attribute is looked up too.
    """
    module, _, attribute = factory.partition(":")
    if (loaded := sys.modules.get(module)) is not None:
        first = attribute.partition(".")[0]
        importing = getattr(getattr(loaded, "__spec__", None), "_initializing", False)  # usually by another thread
        if first in vars(loaded) or "__getattr__" in vars(loaded) or importing:
            return None
        return Refusal(RefusalCode.FACTORY, f"factory {factory} not found: {module} has no {first}", value=first)
    if (missing := missing_module(module)) is None:
        return None
    message = f"factory {factory} cannot be imported: there is no module {missing}"
    return Refusal(RefusalCode.FACTORY, message, value=missing)


def missing_module(module: str) -> str | None:
    """Return the first prefix of a dotted name that no finder knows; ``None`` if there is none or it is unknown."""
    path: Sequence[str] | None = None
    parts = module.split(".")
    try:
        for name in (".".join(parts[:end]) for end in range(1, len(parts) + 1)):
            if (loaded := sys.modules.get(name)) is not None:
                path = list(getattr(loaded, "__path__", ()))
            elif found := next(filter(None, (finder.find_spec(name, path) for finder in sys.meta_path)), None):
                path = list(found.submodule_search_locations or ())
            else:
                return name
    except Exception:  # a foreign finder, or a namespace inside a package that is not imported: only an import can tell
        return None
    return None
