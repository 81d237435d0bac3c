"""Whether the distributions that a backend needs are installed, asked of their metadata without importing them."""

from __future__ import annotations

from importlib import metadata

from attnplug.refusal import Refusal, RefusalCode


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
