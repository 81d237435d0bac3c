"""Standard output, kept for the answer.

With ``--json`` everything else that any code writes to standard output, Python or not, goes to standard error: plugins
and kernel libraries print when they please, and a program reads what we print.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from typing import TextIO

_answers: TextIO | None = None


@contextlib.contextmanager
def safe_streams() -> Iterator[None]:
    """Standard streams that can be printed on: closed ones swallow, characters they lack become question marks.

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
            stdout.flush()  # here, where what it raises can still be told to a person


def release(stdout: TextIO | None = None) -> None:
    """Give standard output back to everyone: what :func:`reserve_for_json` took."""
    global _answers
    if _answers is not None:
        stdout = stdout or sys.__stdout__ or _answers
        if _answers is not stdout:
            os.dup2(_answers.fileno(), stdout.fileno())
            _answers.close()
        _answers = None
    if stdout is not None:
        sys.stdout = stdout


def reserve_for_json() -> None:
    """From here on only :func:`write_json` reaches standard output."""
    global _answers
    try:
        descriptor = os.dup(sys.stdout.fileno())
    except (OSError, ValueError):  # not a file of the system's: a test's or a notebook's
        _answers = sys.stdout
    else:
        sys.stdout.flush()
        _answers = os.fdopen(descriptor, "w", encoding="utf-8")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = sys.stderr


def write_json(value: object) -> None:
    """The answer of a command that was asked for JSON."""
    write_line(json.dumps(value, indent=2))


def write_line(text: str) -> None:
    """A part of the answer: one line of JSON lines."""
    assert _answers is not None, "reserve_for_json comes first"
    _answers.write(text + "\n")
    _answers.flush()


def on_terminal() -> bool:
    """Whether the answer is written to a terminal, where nothing else may be drawn meanwhile."""
    return (_answers or sys.stdout).isatty()
