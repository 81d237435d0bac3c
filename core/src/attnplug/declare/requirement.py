"""Whether what a backend needs is installed, according to metadata alone; and its import, when it is built."""

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
    """The refusal for a requirement string such as ``flashinfer-python>=0.6.12``; ``None`` if it is met.

    With the ``module`` that it brings, a library that is half installed is refused too: its metadata is there, and the
    module is not. Looks for files and imports nothing, parents of ``module`` included: a kernel library takes seconds,
    and may not import on this machine.
    """
    from packaging.requirements import Requirement  # here: a start-up without requirements need not pay for it

    wanted = Requirement(requirement)
    if wanted.marker is not None and not wanted.marker.evaluate():
        return None
    found = installed_version(wanted.name)
    if found is not None and wanted.specifier.contains(found, prereleases=True):
        if module is None or missing_module(module) is None:
            return None
        return Refusal(
            RefusalCode.IMPORT,
            f"{wanted.name} {found} is installed, but its module {module} is not there",
            value=module,
            advice=f"pip install --force-reinstall '{requirement}'",
        )
    extras = f"[{','.join(sorted(wanted.extras))}]" if wanted.extras else ""
    allowed = str(wanted.specifier) or "any version"
    state = f"is {found}" if found is not None else "is not installed"
    needs = f"{wanted.name} {wanted.specifier}".strip()
    return Refusal(
        RefusalCode.REQUIREMENT,
        f"it needs {needs}, which {state}",
        value=found,
        allowed=allowed,
        advice=f"pip install '{wanted.name}{extras}{wanted.specifier}'",
    )


def import_library(load: Callable[[], Library], requirement: str) -> Library:
    """Import a kernel library by calling ``load``, and return its result; raises an error that names the library.

    For the top of the module that defines a backend's factory: a failing import shows there, before anything is built.
    Libraries raise anything on import: AssertionError if others are half installed, OSError if CUDA's are missing, even
    SystemExit. All of it becomes a :class:`BackendError`.
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
    """Why an entry of a spec's ``requires`` cannot be read; ``None`` if it can."""
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
