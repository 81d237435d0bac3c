"""Standard output of a command.

With ``--json``, only the result is written to standard output. Everything else, including the output of plugins' and
kernel libraries' native code, goes to standard error, because a program parses the result.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import stat
import sys
from collections.abc import Iterator
from typing import TextIO

from attnplug.declare.errors import UsageError

_results: int | TextIO | None = None
"""Destination of results while standard output is reserved: a file descriptor, or a stream that has none."""


@contextlib.contextmanager
def safe_streams() -> Iterator[None]:
    """Make the standard streams safe to print to, and undo :func:`reserve_for_json` on exit.

    A closed standard error discards output; a closed standard output is a UsageError, because results would be lost.
    Characters that a stream cannot encode become question marks.
    """
    if sys.stdout is None:
        raise UsageError("standard output is closed, so results would be lost; redirect it to a file or to /dev/null")
    with contextlib.ExitStack() as undo:
        if sys.stderr is None:
            sys.stderr = undo.enter_context(open(os.devnull, "w"))
            undo.callback(setattr, sys, "stderr", None)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        stdout = sys.stdout
        try:
            yield
        finally:
            release(stdout)
            stdout.flush()  # while an error can still be reported


def release(stdout: TextIO | None = None) -> None:
    """Undo :func:`reserve_for_json`."""
    global _results
    if isinstance(_results, int):
        stdout = stdout or sys.__stdout__
        if stdout is not None:
            os.dup2(_results, stdout.fileno())
        os.close(_results)
    elif _results is not None:
        stdout = stdout or _results
    _results = None
    if stdout is not None:
        sys.stdout = stdout


def reserve_for_json() -> None:
    """Reserve standard output for :func:`write_json` and :func:`write_line`; redirect all other output to stderr."""
    global _results
    try:
        descriptor = os.dup(sys.stdout.fileno())
    except (OSError, ValueError):  # no file descriptor: in a test or a notebook
        _results = sys.stdout
    else:
        sys.stdout.flush()
        _results = descriptor
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = sys.stderr


def write_json(value: object) -> None:
    """Write the result of a command that was called with ``--json``."""
    write_line(json.dumps(value, indent=2))


def write(value: object, text: str, *, json: bool) -> None:
    """Write the result of a command as JSON or as text."""
    if json:
        write_json(value)
    else:
        print(text)


def write_line(text: str) -> None:
    """Write one line of a JSON Lines result, unbuffered. A file gets the whole line or nothing."""
    assert _results is not None, "call reserve_for_json first"
    if isinstance(_results, int):
        _write_whole(_results, f"{text}\n".encode(errors="replace"))
    else:
        _results.write(text + "\n")
        _results.flush()


def _write_whole(descriptor: int, line: bytes) -> None:
    """Write without a buffer, which would keep a failed line and try to write it again later.

    If the disk is full, a partially written line is truncated. A pipe's reader may have received part of it.
    """
    before, written = os.fstat(descriptor), 0
    try:
        while written < len(line):
            written += os.write(descriptor, line[written:])
    except OSError:
        # Truncate only if no other process has appended to the file.
        if stat.S_ISREG(before.st_mode) and os.fstat(descriptor).st_size == before.st_size + written:
            os.ftruncate(descriptor, before.st_size)
            os.lseek(descriptor, before.st_size, os.SEEK_SET)
        raise


def on_terminal() -> bool:
    """Return True if results go to a terminal, where a progress bar would overwrite them."""
    return os.isatty(_results) if isinstance(_results, int) else (_results or sys.stdout).isatty()
