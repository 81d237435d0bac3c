"""Isolation of the process from code of other packages (D2)."""

from __future__ import annotations

import _locale
import _signal  # type: ignore[import-not-found]  # 'signal' would take 2 ms to import
import contextlib
import io
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NoReturn, TextIO

from attnplug.declare.errors import PluginError, describe_error

_SIGNALS = (_signal.SIGINT, _signal.SIGTERM)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Isolate the process from code of other packages. Exceptions propagate.

    - Output to stdout goes to stderr.
    - ``os._exit`` raises SystemExit. It would end the process without a word about the package that called it.
    - Entries removed from the import system are restored and reported by a PluginError, because otherwise nothing could
      be imported afterwards. Added entries stay, because a plugin's backend may need them later.
    - Closed standard streams, removed environment variables, warning filters, the current directory, the locale,
      handlers of SIGINT and SIGTERM and a lowered recursion limit are restored silently.
    """
    lists: dict[str, list[Any]] = {name: getattr(sys, name) for name in ("path", "meta_path", "path_hooks")}
    entries = {name: list(found) for name, found in lists.items()}
    raised: BaseException | None = None
    try:
        with _same_streams(), _same_settings(), warnings.catch_warnings(), _no_exit():
            yield
    except BaseException as error:
        raised = error
    removed = []
    for name, before in entries.items():
        now = getattr(sys, name, None)
        if not isinstance(now, list) or any(entry not in now for entry in before):
            lists[name][:] = before
            setattr(sys, name, lists[name])
            removed.append(f"sys.{name}")
    if removed and not isinstance(raised, KeyboardInterrupt):
        then = "" if raised is None else f"; then: {describe_error(raised)}"
        raise PluginError(f"it removed entries from {' and '.join(removed)}, which were restored{then}") from raised
    if raised is not None:
        raise raised


class _Unclosable:
    """A standard stream that other packages can use, but not close."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def close(self) -> None: ...

    def detach(self) -> NoReturn:
        raise io.UnsupportedOperation("detach")


@contextlib.contextmanager
def _same_streams() -> Iterator[None]:
    """Redirect stdout to stderr, and reopen the standard streams that are closed inside, also by file descriptor."""
    found = (sys.__stdin__, sys.__stdout__, sys.__stderr__)
    streams = {fd: stream for fd, stream in enumerate(found) if isinstance(stream, io.TextIOWrapper)}
    settings = {fd: (one.encoding, one.errors, None, one.line_buffering) for fd, one in streams.items()}
    copies: dict[int, int] = {}
    for fd in range(3):
        with contextlib.suppress(OSError):  # closed already
            copies[fd] = os.dup(fd)
    errors: Any = _Unclosable(sys.stderr)
    try:
        with contextlib.redirect_stdout(errors), contextlib.redirect_stderr(errors):
            yield
    finally:
        for fd, copy in copies.items():
            with contextlib.suppress(OSError):
                if not _is_same_file(fd, copy):
                    os.dup2(copy, fd)
                os.close(copy)
        for fd, stream in streams.items():
            if _is_closed(stream):
                file = open(fd, "wb" if fd else "rb", closefd=False)  # noqa: SIM115 - open as long as the process runs
                stream.__init__(file, *settings[fd])  # type: ignore[misc]  # in place: others refer to the object


def _is_same_file(fd: int, copy: int) -> bool:
    try:
        return os.path.sameopenfile(fd, copy)
    except OSError:
        return False


def _is_closed(stream: TextIO) -> bool:
    try:
        return stream.closed
    except ValueError:  # its buffer has been detached
        return True


@contextlib.contextmanager
def _same_settings() -> Iterator[None]:
    """Restore the settings of the process that :func:`guarded` lists, except streams and warning filters."""
    variables = _variables().copy()
    limit, locale = sys.getrecursionlimit(), _locale.setlocale(_locale.LC_ALL)
    handlers = {number: _signal.getsignal(number) for number in _SIGNALS}
    try:
        with _same_directory():
            yield
    finally:
        for name in variables.keys() - _variables().keys():
            os.environ[os.fsdecode(name)] = os.fsdecode(variables[name])
        sys.setrecursionlimit(max(limit, sys.getrecursionlimit()))
        if _locale.setlocale(_locale.LC_ALL) != locale:
            _locale.setlocale(_locale.LC_ALL, locale)
        for number, handler in handlers.items():
            if _signal.getsignal(number) is not handler and handler is not None:
                with contextlib.suppress(ValueError):  # not the main thread
                    _signal.signal(number, handler)


def _variables() -> dict[Any, Any]:
    """Return the encoded environment variables. ``dict(os.environ)`` decodes them, which takes 60 µs."""
    return os.environ._data  # type: ignore[attr-defined, no-any-return]


def _same_directory() -> contextlib.AbstractContextManager[None]:
    """Restore the current directory on exit, unless it has been deleted."""
    try:
        return contextlib.chdir(os.getcwd())
    except OSError:
        return contextlib.nullcontext()


@contextlib.contextmanager
def _no_exit() -> Iterator[None]:
    """Let ``os._exit`` raise SystemExit inside. A forked child process exits as it asks to."""
    process: int | None = os.getpid()
    end = os._exit

    def raise_exit(status: int) -> NoReturn:
        if os.getpid() == process:
            raise SystemExit(f"os._exit({status})")
        end(status)

    os._exit = raise_exit
    try:
        yield
    finally:
        process = None  # whoever kept a reference exits from now on
        os._exit = end
