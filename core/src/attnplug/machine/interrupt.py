"""Handling of SIGINT and SIGTERM by commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

EXIT_CODE = 130


class Terminated(SystemExit):
    """Raised by SIGTERM, not by a plugin's ``SystemExit``."""


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Let SIGTERM raise :class:`Terminated`, so that ``finally`` blocks save results and stop child processes."""
    import signal

    def end(*_: object) -> None:
        raise Terminated(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
