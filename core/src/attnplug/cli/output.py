"""Standard output, kept for the answer.

With ``--json``, everything else that any code writes to standard output, in Python or not, goes to standard error.
Plugins and kernel libraries print when they please, and a program reads what we print.
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

_answers: int | TextIO | None = None
"""Where answers go while standard output is reserved: a descriptor, or a stream that has none."""


@contextlib.contextmanager
def safe_streams() -> Iterator[None]:
    """Make the standard streams safe to print on: closed ones swallow, characters they lack become question marks.

    What :func:`reserve_for_json` changed is put back at the end.
    """
    with contextlib.ExitStack() as undo:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None:
                setattr(sys, name, undo.enter_context(open(os.devnull, "w")))
                undo.callback(setattr, sys, name, None)
            elif isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        stdout = sys.stdout
        try:
            yield
        finally:
            release(stdout)
            stdout.flush()  # here, where an error can still be reported


def release(stdout: TextIO | None = None) -> None:
    """Give standard output back to everyone: what :func:`reserve_for_json` took."""
    global _answers
    if isinstance(_answers, int):
        stdout = stdout or sys.__stdout__
        if stdout is not None:
            os.dup2(_answers, stdout.fileno())
        os.close(_answers)
    elif _answers is not None:
        stdout = stdout or _answers
    _answers = None
    if stdout is not None:
        sys.stdout = stdout


def reserve_for_json() -> None:
    """From here on only :func:`write_json` reaches standard output."""
    global _answers
    try:
        descriptor = os.dup(sys.stdout.fileno())
    except (OSError, ValueError):  # not a file of the operating system: in a test or a notebook
        _answers = sys.stdout
    else:
        sys.stdout.flush()
        _answers = descriptor
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = sys.stderr


def write_json(value: object) -> None:
    """The answer of a command that was asked for JSON."""
    write_line(json.dumps(value, indent=2))


def write_line(text: str) -> None:
    """A part of the answer: one line of JSON lines, written at once. A file gets the whole line or none of it."""
    assert _answers is not None, "reserve_for_json comes first"
    if isinstance(_answers, int):
        _write_whole(_answers, f"{text}\n".encode(errors="replace"))
    else:
        _answers.write(text + "\n")
        _answers.flush()


def _write_whole(descriptor: int, line: bytes) -> None:
    """Write without a buffer, which would keep a line that failed, and fail to write it again later.

    If a full disk took only part of a line, that part is cut off again. The reader of a pipe has it already.
    """
    before, written = os.fstat(descriptor), 0
    try:
        while written < len(line):
            written += os.write(descriptor, line[written:])
    except OSError:
        # The end of the file is ours if the file grew by what we wrote.
        if stat.S_ISREG(before.st_mode) and os.fstat(descriptor).st_size == before.st_size + written:
            os.ftruncate(descriptor, before.st_size)
            os.lseek(descriptor, before.st_size, os.SEEK_SET)
        raise


def on_terminal() -> bool:
    """Whether the answer goes to a terminal, on which nothing else may be drawn meanwhile."""
    return os.isatty(_answers) if isinstance(_answers, int) else (_answers or sys.stdout).isatty()
