"""Output of a command: results on standard output, tables, and warnings about plugins that are left out.

With ``--json``, only the result is written to standard output. Everything else, including the output of plugins' and
kernel libraries' native code, goes to standard error, because a program parses the result. Tables are
not by rich: importing it would take a third of the time budget of a command that must start quickly.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import stat
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from attnplug.declare.errors import PluginWarning, TableWarning, UsageError
from attnplug.registry.registry import ALLOW_VARIABLE, Registry

_results: int | TextIO | None = None
"""Destination of results while standard output is reserved: a file descriptor, or a stream that has none."""
_CATEGORIES = (PluginWarning, TableWarning)
_DEFAULT_WIDTH = 160
_MIN_COLUMN_WIDTH, _MAX_UNBROKEN = 12, 40
"""Minimum width of a column, and length of the longest word that is never broken. If columns do not fit, cells are
written below each other."""


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
    """Write one line of a JSON Lines result. A file gets the whole line or nothing; a pipe's reader may get a part.

    Without a buffer, which would keep a failed line and try to write it again later.
    """
    assert _results is not None, "call reserve_for_json first"
    if not isinstance(_results, int):
        print(text, file=_results, flush=True)
        return
    line, before, written = f"{text}\n".encode(errors="replace"), os.fstat(_results), 0
    try:
        while written < len(line):
            written += os.write(_results, line[written:])
    except OSError:  # the disk is full; truncate only if no other process has appended to the file
        if stat.S_ISREG(before.st_mode) and os.fstat(_results).st_size == before.st_size + written:
            os.ftruncate(_results, before.st_size)
            os.lseek(_results, before.st_size, os.SEEK_SET)
        raise


def on_terminal() -> bool:
    """Return True if results go to a terminal, where a progress bar would overwrite them."""
    return os.isatty(_results) if isinstance(_results, int) else (_results or sys.stdout).isatty()


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format aligned columns that wrap within the terminal's width, or one block per row on a narrow terminal."""
    width = shutil.get_terminal_size((_DEFAULT_WIDTH, 24)).columns if sys.stdout.isatty() else _DEFAULT_WIDTH
    widths = _widths([columns, *rows], width - 2 * (len(columns) - 1))
    if widths is None:
        return "\n\n".join(_block(columns, row, width) for row in rows)
    lines = [_line(columns, widths), _line(["─" * each for each in widths], widths)]
    for row in rows:
        wrapped = [_wrap(cell, each) or [""] for cell, each in zip(row, widths, strict=True)]
        for number in range(max(map(len, wrapped))):
            lines.append(_line([cell[number] if number < len(cell) else "" for cell in wrapped], widths))
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _widths(rows: Sequence[Sequence[str]], available: int) -> list[int] | None:
    """Return column widths. The widest columns shrink to fit; None if a word would be broken or a column too narrow."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    words = [map(len, _Wrapper.wordsep_simple_re.split(" ".join(column))) for column in columns]
    least = [max(_MIN_COLUMN_WIDTH, min(max(lengths), _MAX_UNBROKEN)) for lengths in words]
    while sum(widths) > available:
        shrinkable = [index for index, width in enumerate(widths) if width > least[index]]
        if not shrinkable:
            return None
        widths[max(shrinkable, key=widths.__getitem__)] -= 1
    return widths


def _block(columns: Sequence[str], row: Sequence[str], width: int) -> str:
    """Format one row as a block headed by its first cell. Empty cells are left out."""
    heading, *others = zip(columns, row, strict=True)
    lines = _wrap(heading[1], width)
    for column, cell in others:
        if cell:
            lines += _wrap(f"{column}: {cell}", width, indent="  " if width > 4 else "")
    return "\n".join(lines)


class _Wrapper(textwrap.TextWrapper):
    """Wraps at spaces and after slashes. Package names, which have hyphens, stay whole, so that they can be copied."""

    wordsep_simple_re = re.compile(r"(\s+|(?<=/))")


def _wrap(text: str, width: int, indent: str = "") -> list[str]:
    wrapper = _Wrapper(max(width, 1), initial_indent=indent, subsequent_indent=2 * indent, break_on_hyphens=False)
    return wrapper.wrap(text)


def warn_of_plugins(registry: Registry, *, broken: bool = True) -> None:
    """Print one line to standard error per slow plugin, per listed name that matches none, and per ``broken`` one.

    Without a warning, a backend of a broken plugin would look like a misspelled name.
    """
    for fault in registry.broken if broken else ():
        print(f"warning: plugin {fault}", file=sys.stderr)
    for source, seconds in registry.slow.items():
        print(f"warning: plugin {source.entry_point} ({source}) took {seconds:.1f} s to load", file=sys.stderr)
    for name in registry.unmatched:
        print(f"warning: {ALLOW_VARIABLE} lists {name!r}, which matches no installed plugin", file=sys.stderr)


@contextlib.contextmanager
def shown_as_lines() -> Iterator[None]:
    """Print our own warnings as one line each, without a source location."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def show_line(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
            if issubclass(category, _CATEGORIES):
                print(f"warning: {message}", file=sys.stderr)
            else:
                show(message, category, *rest, **named)

        for category in _CATEGORIES:
            warnings.simplefilter("default", category)  # each once, regardless of -W
        warnings.showwarning = show_line
        yield
