"""Handling of SIGINT and SIGTERM: while modules are imported, and while state must change as a whole."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

EXIT_CODE = 130


def end_quietly() -> None:
    """Make an uncaught interrupt end the process with one word and exit code 130, without a traceback.

    For the command: it may be interrupted while ``attnplug.cli`` is being imported, before ``main`` could catch it.
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
    os._exit(EXIT_CODE)  # otherwise the signal would end the interpreter, after a traceback of its own


@contextmanager
def at_once() -> Iterator[None]:
    """Let an interrupt end the process immediately. For imports, after which there is nothing to clean up.

    The C code of large libraries, such as torch's, ignores errors of what it imports, even a KeyboardInterrupt. The
    interrupt would be lost, and the command would go on.
    """
    import signal

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or somebody else's
        yield
        return
    signal.signal(signal.SIGINT, _end_now)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Terminated(SystemExit):
    """Raised by SIGTERM, in contrast to a plugin's own ``SystemExit``."""


@contextmanager
def terminated_in_order() -> Iterator[None]:
    """Let SIGTERM raise :class:`Terminated`: what must not be lost can be written, and what was started be ended."""
    import signal

    def end(*_: object) -> None:
        raise Terminated(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def held() -> Iterator[None]:
    """Hold an interrupt back until the block is left, and SIGTERM where it raises: for what must be changed as a whole.

    A second one comes at once, for a block that does not end. Other threads than the main one get neither.
    """
    # The public module looks every handler up among its enums, which takes five times as long.
    import _signal as signal  # type: ignore[import-not-found]
    import threading

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def keep(number: int, frame: FrameType | None) -> None:
        if number in came:
            handlers[number](number, frame)
        came.append(number)

    handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)
        if callable(handler):  # not ignored, and not the system's own
            handlers[number] = handler
            signal.signal(number, keep)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if came:
            handlers[came[0]](came[0], None)
