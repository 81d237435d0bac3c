"""Handling of SIGINT and SIGTERM during imports and atomic state changes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import _exit  # os._exit raises while a plugin is loaded
from types import FrameType
from typing import Any

from attnplug.machine.interrupt import EXIT_CODE


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


def _end_now(*_: object) -> None:
    """Signal handler: end the process with exit code 130."""
    if sys.stderr is not None:
        sys.stderr.write("interrupted\n")
        sys.stderr.flush()
    _exit(EXIT_CODE)  # a normal exit would print the interpreter's own traceback


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
