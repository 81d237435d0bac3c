"""Whether what a backend needs is installed, asked of metadata alone; and whether it can be imported, by trying."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import TypeVar

from attnplug.errors import describe_error
from attnplug.refusal import Refusal, RefusalCode

Library = TypeVar("Library")


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution; ``None`` if it is not there."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def requirement_refusal(requirement: str) -> Refusal | None:
    """The refusal for a requirement string such as ``flashinfer-python>=0.6.12``; ``None`` if it is met."""
    from packaging.requirements import Requirement  # here: a start-up without requirements need not pay for it

    wanted = Requirement(requirement)
    if wanted.marker is not None and not wanted.marker.evaluate():
        return None
    found = installed_version(wanted.name)
    if found is not None and wanted.specifier.contains(found, prereleases=True):
        return None
    extras = f"[{','.join(sorted(wanted.extras))}]" if wanted.extras else ""
    allowed = str(wanted.specifier) or "any version"
    state = f"is {found}" if found is not None else "is not installed"
    needs = f"{wanted.name} {wanted.specifier}".strip()
    return Refusal(
        RefusalCode.REQUIREMENT,
        f"it needs {needs}, which {state}",
        value=found,
        allowed=allowed,
        option=f"pip install '{wanted.name}{extras}{wanted.specifier}'",
    )


def import_library(load: Callable[[], Library], module: str, requirement: str) -> Library | Refusal | None:
    """What ``load`` returns, for checks that depend on it; or the refusal for a library that cannot be imported.

    ``None`` where ``module`` is not there at all: that is for the spec's ``requires`` to say. Libraries raise anything
    on import: AssertionError where others are half installed, OSError where CUDA's are missing, even SystemExit.
    """
    try:
        return load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module:
            return None
        text = describe_error(error)
        message = f"{module} cannot be imported: {text}"
        return Refusal(RefusalCode.IMPORT, message, value=text, option=f"pip install '{requirement}'")


def requirement_problem(requirement: object) -> str | None:
    """Why a requirement string cannot be read; ``None`` if it can."""
    from packaging.requirements import InvalidRequirement, Requirement

    if not isinstance(requirement, str):
        return f"requirement {requirement!r} is not a string"
    try:
        Requirement(requirement)
    except InvalidRequirement as error:
        return f"requirement {requirement!r} cannot be read: {error}"
    return None
