"""Warnings of commands about plugins that are left out."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from attnplug.declare.errors import PluginWarning, TableWarning
from attnplug.registry.registry import ALLOW_VARIABLE, Registry

_CATEGORIES = (PluginWarning, TableWarning)


def warn_of_plugins(registry: Registry) -> None:
    """Print one line to standard error per broken, slow or unmatched plugin.

    Otherwise a backend of a broken plugin would look like a misspelled name.
    """
    for broken in registry.broken:
        print(f"warning: plugin {broken}", file=sys.stderr)
    warn_of_slow_and_unmatched(registry)


def warn_of_slow_and_unmatched(registry: Registry) -> None:
    """Print one line per plugin that is slow to load, and per name in the allow-list that matches no plugin."""
    for source, seconds in registry.slow.items():
        print(f"warning: plugin {source.entry_point} ({source}) took {seconds:.1f} s to load", file=sys.stderr)
    for name in registry.unmatched:
        print(f"warning: {ALLOW_VARIABLE} lists {name!r}, which matches no installed plugin", file=sys.stderr)


@contextlib.contextmanager
def shown_as_lines() -> Iterator[None]:
    """Print our own warnings as one line each, without a source location."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def show_line(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
            if issubclass(category, _CATEGORIES):
                print(f"warning: {message}", file=sys.stderr)
            else:
                show(message, category, *rest, **named)

        for category in _CATEGORIES:
            warnings.simplefilter("default", category)  # each once, regardless of -W
        warnings.showwarning = show_line
        yield
