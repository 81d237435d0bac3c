"""Checks of requirements, modules and factories by metadata alone, and guarded imports of kernel libraries."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import importlib_metadata as metadata

from attnplug.declare.errors import BackendError, Refusal, RefusalCode, describe_error


class HasMetadata(Protocol):
    """Protocol of a distribution; its class depends on the installed importlib-metadata."""

    def read_text(self, filename: str, /) -> str | None: ...


def metadata_lines(distribution: HasMetadata) -> dict[str, str]:
    """Return the header of a distribution's metadata by lower-case key; empty for a damaged installation.

    ``metadata.version`` parses the whole README as mail, which takes longer than the rest of start-up.
    """
    found: dict[str, str] = {}
    try:
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    except Exception:  # whatever reading a damaged installation raises
        return found
    for line in text.partition("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.lower(), value.strip())
    return found


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution; ``None`` if it is not installed or has no version."""
    # Not ``metadata.distribution``: it parses every candidate in order to prefer a valid one.
    versions = (metadata_lines(found).get("version") for found in metadata.distributions(name=name))
    return next(filter(None, versions), None)


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


Library = TypeVar("Library")


def requirement_refusal(requirement: str, module: str | None = None) -> Refusal | None:
    """Return the refusal of ``requirement_refusal("flashinfer-python>=0.6.12")``; ``None`` if it is met.

    With ``module``, a distribution whose metadata is installed without that module is refused too. Looks for files and
    imports nothing, not even parents of ``module``: a kernel library takes seconds to import, and may fail here.
    """
    from packaging.requirements import Requirement  # not at the top: start-up without requirements is faster

    wanted = Requirement(requirement)
    if wanted.marker is not None and not wanted.marker.evaluate():
        return None
    found = installed_version(wanted.name)
    if found is not None and wanted.specifier.contains(found, prereleases=True):
        if module is None or missing_module(module) is None:
            return None
        return Refusal(
            RefusalCode.IMPORT,
            f"{wanted.name} {found} is installed, but its module {module} is missing",
            value=module,
            advice=f"pip install --force-reinstall '{requirement}'",
        )
    extras = f"[{','.join(sorted(wanted.extras))}]" if wanted.extras else ""
    needed = f"{wanted.name} {wanted.specifier}".strip()
    return Refusal(
        RefusalCode.REQUIREMENT,
        f"requires {needed}, which is {found or 'not installed'}",
        value=found,
        allowed=str(wanted.specifier) or "any version",
        advice=f"pip install '{wanted.name}{extras}{wanted.specifier}'",
    )


def import_library(load: Callable[[], Library], requirement: str) -> Library:
    """Import a kernel library: ``fla = import_library(lambda: import_module("fla"), "fla-core>=0.6")``.

    Call it at the top of the module that defines a backend's factory, so that a failing import is reported before
    anything is built. Libraries raise AssertionError if half installed, OSError without CUDA's libraries, even
    SystemExit; all become a :class:`BackendError` that names the library.
    """
    from packaging.requirements import Requirement

    try:
        return load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        name = Requirement(requirement).name
        raise BackendError(
            f"{name} {installed_version(name) or '(not installed)'} cannot be imported: {describe_error(error)}; "
            f"install one that can (pip install '{requirement}'), or use another backend"
        ) from error


def requirement_problem(requirement: object) -> str | None:
    """Return why an entry of ``BackendSpec.requires`` is invalid; ``None`` if it is valid."""
    from packaging.requirements import InvalidRequirement, Requirement

    text, *module = requirement if isinstance(requirement, tuple) and len(requirement) == 2 else (requirement,)
    if not isinstance(text, str):
        return f"requirement {requirement!r} is neither a string nor a pair (requirement, module)"
    if not all(isinstance(name, str) and re.fullmatch(DOTTED, name) for name in module):
        return f"requirement {requirement!r} must name a module, such as 'package.module'"
    try:
        Requirement(text)
    except InvalidRequirement as error:
        return f"requirement {text!r} cannot be read: {error}"
    return None
