"""Handling of SIGINT and SIGTERM by commands."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from os import _exit  # os._exit raises while a plugin is loaded

EXIT_CODE = 130


def end_now(*_: object) -> None:
    """End the process with exit code 130. Also a signal handler."""
    if sys.stderr is not None:
        sys.stderr.write("interrupted\n")
        sys.stderr.flush()
    _exit(EXIT_CODE)  # a normal exit would print the interpreter's own traceback


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
