"""What every command says about plugins that it had to leave out."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import TextIO

from attnplug.choose.registry import ALLOW_VARIABLE, Registry
from attnplug.declare.errors import PluginWarning, TableWarning

_OURS = (PluginWarning, TableWarning)


def warn_of_plugins(registry: Registry) -> None:
    """One line on standard error for each broken plugin: a missing backend must not look like a misspelled name."""
    for broken in registry.broken:
        print(f"warning: plugin {broken}", file=sys.stderr)
    warn_of_the_rest(registry)


def warn_of_the_rest(registry: Registry) -> None:
    """One line for each plugin that is slow to load, and for each name in the allow-list that allows nothing."""
    for source, seconds in registry.slow.items():
        print(f"warning: plugin {source.entry_point} ({source}) took {seconds:.1f} s to load", file=sys.stderr)
    for name in registry.unmatched:
        print(f"warning: {ALLOW_VARIABLE} names {name!r}, which matches no installed plugin", file=sys.stderr)


@contextlib.contextmanager
def shown_as_lines() -> Iterator[None]:
    """Show warnings of ours like the other warnings of a command, without a place in our source."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def show_line(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, _OURS):
                print(f"warning: {message}", file=sys.stderr)
            else:
                show(message, category, filename, lineno, file, line)

        for ours in _OURS:
            warnings.simplefilter("default", ours)  # each once, whatever -W says of warnings
        warnings.showwarning = show_line
        yield
