"""Requirements of backends: installation checks by metadata alone, and guarded imports of kernel libraries."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from attnplug.declare.errors import BackendError, describe_error
from attnplug.declare.factory import DOTTED, missing_module
from attnplug.declare.installed import installed_version
from attnplug.declare.refusal import Refusal, RefusalCode

Library = TypeVar("Library")


def requirement_refusal(requirement: str, module: str | None = None) -> Refusal | None:
    """Return the refusal of a requirement such as ``flashinfer-python>=0.6.12``; ``None`` if it is met.

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
    """Import a kernel library by calling ``load``, and return its result.

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
