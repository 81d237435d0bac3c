"""Versions of installed distributions, read from metadata alone."""

from __future__ import annotations

from typing import Protocol

import importlib_metadata as metadata


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
