"""Handling of SIGINT and SIGTERM by commands."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from os import _exit  # os._exit raises while a plugin is loaded
from types import TracebackType

EXIT_CODE = 130


def end_quietly() -> None:
    """Install an exception hook that ends the process on an uncaught interrupt with exit code 130, without traceback.

    For the command, which may be interrupted while ``attnplug.cli`` is imported, before ``main`` can catch it.
    """
    sys.excepthook = _end


def _end(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Exception hook: end the process on an interrupt, and show any other error as usual."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    end_now()


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
