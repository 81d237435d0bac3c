"""What every command says about plugins that it had to leave out."""

from __future__ import annotations

import sys

from attnplug.registry import ALLOW_VARIABLE, Registry


def warn_of_plugins(registry: Registry) -> None:
    """One line on standard error for each broken plugin: a missing backend must not look like a wrong name."""
    for broken in registry.broken:
        print(f"warning: plugin {broken}", file=sys.stderr)
    warn_of_names(registry)


def warn_of_names(registry: Registry) -> None:
    """One line for each name in the allow-list that allows nothing."""
    for name in registry.unmatched:
        print(f"warning: {ALLOW_VARIABLE} names {name!r}, which no installed plugin answers to", file=sys.stderr)
