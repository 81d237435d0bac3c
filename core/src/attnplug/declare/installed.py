"""What is installed, read from metadata alone."""

from __future__ import annotations

from typing import Protocol

import importlib_metadata as metadata


class HasMetadata(Protocol):
    """A distribution, by whatever class the installed importlib-metadata has for it."""

    def read_text(self, filename: str, /) -> str | None: ...


def metadata_lines(distribution: HasMetadata) -> dict[str, str]:
    """The head of a distribution's metadata, by lower-case key; nothing of a damaged one.

    ``metadata.version`` parses the whole README as mail, which would cost more than the rest of a start-up.
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
    """The version of an installed distribution; ``None`` if it is not there, or does not say."""
    # ``metadata.distribution`` parses what it finds, to prefer the valid one of several.
    versions = (metadata_lines(found).get("version") for found in metadata.distributions(name=name))
    return next(filter(None, versions), None)
