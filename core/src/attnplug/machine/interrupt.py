"""Handling of SIGINT and SIGTERM during imports and atomic state changes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

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
    _end_now()


def _end_now(*_: object) -> None:
    if sys.stderr is not None:
        sys.stderr.write("interrupted\n")
        sys.stderr.flush()
    os._exit(EXIT_CODE)  # a normal exit would print the interpreter's own traceback


@contextmanager
def exit_immediately() -> Iterator[None]:
    """Let an interrupt end the process immediately. For imports, which need no clean-up.

    The C code of large libraries such as torch ignores exceptions of what it imports, even a KeyboardInterrupt. The
    interrupt would be lost and the command would continue.
    """
    import signal

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or handled by the application
        yield
        return
    signal.signal(signal.SIGINT, _end_now)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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


@contextmanager
def deferred() -> Iterator[None]:
    """Defer SIGINT, and SIGTERM if it has a handler, until the block ends. For atomic state changes.

    A second signal is delivered immediately, in case the block never ends. Does nothing outside the main thread, which
    receives all signals.
    """
    # The public module converts every handler to an enum, which takes five times as long.
    import _signal as signal  # type: ignore[import-not-found]
    import threading

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []

    def keep(number: int, frame: FrameType | None) -> None:
        if number in pending:
            handlers[number](number, frame)
        pending.append(number)

    handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)
        if callable(handler):  # neither SIG_IGN nor SIG_DFL
            handlers[number] = handler
            signal.signal(number, keep)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if pending:
            handlers[pending[0]](pending[0], None)
