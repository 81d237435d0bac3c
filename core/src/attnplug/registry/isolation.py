"""Isolation of the process from code of other packages, and errors that name the package at fault (D2)."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # 'signal' would take 2 ms to import
import contextlib
import io
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NoReturn

from attnplug.declare.errors import AttnplugError, BackendError, PluginError, describe_error
from attnplug.declare.spec import Registered


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Isolate the process from code of other packages. Exceptions propagate.

    - Output to stdout goes to stderr.
    - ``os._exit`` raises SystemExit. It would end the process without a word about the package that called it.
    - Entries removed from the import system are restored and reported by a PluginError, because otherwise nothing could
      be imported afterwards. Added entries stay, because a plugin's backend may need them later.
    - Closed standard streams, removed environment variables, warning filters, the current directory and handlers of
      SIGINT and SIGTERM are restored silently.
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
    """A stream that other packages can use, but not close."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def close(self) -> None: ...


@contextlib.contextmanager
def _same_streams() -> Iterator[None]:
    """Redirect stdout to stderr. Reopen standard streams and their file descriptors if they are closed inside."""
    found = enumerate((sys.__stdin__, sys.__stdout__, sys.__stderr__))
    streams = {fd: stream for fd, stream in found if isinstance(stream, io.TextIOWrapper)}
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
            with contextlib.suppress(OSError):  # the copy has been closed, too
                os.dup2(copy, fd)
                os.close(copy)
        for fd, stream in streams.items():
            try:
                stream.writable()
            except ValueError:  # closed or detached; initialized in place, because others refer to the object
                file = open(fd, "wb" if fd else "rb", closefd=False)  # noqa: SIM115 - open as long as the process runs
                stream.__init__(file, *settings[fd])  # type: ignore[misc]


@contextlib.contextmanager
def _same_settings() -> Iterator[None]:
    """Restore removed variables, the current directory and signal handlers."""
    variables = os.environ._data.copy()  # type: ignore[attr-defined]  # encoded; decoding them all would take 60 µs
    handlers = {number: _signal.getsignal(number) for number in (_signal.SIGINT, _signal.SIGTERM)}
    with contextlib.ExitStack() as undo:
        with contextlib.suppress(OSError):  # deleted
            undo.callback(os.chdir, os.getcwd())
        try:
            yield
        finally:
            for name in variables.keys() - os.environ._data.keys():  # type: ignore[attr-defined]
                os.environ[os.fsdecode(name)] = os.fsdecode(variables[name])
            for number, handler in handlers.items():
                if handler is not None and _signal.getsignal(number) is not handler:
                    with contextlib.suppress(ValueError):  # not the main thread
                        _signal.signal(number, handler)


@contextlib.contextmanager
def _no_exit() -> Iterator[None]:
    """Let ``os._exit`` raise SystemExit inside. A forked child process exits as it asks to."""
    end, processes = os._exit, {os.getpid()}

    def raise_exit(status: int) -> NoReturn:
        if os.getpid() in processes:
            raise SystemExit(f"os._exit({status})")
        end(status)

    os._exit = raise_exit
    try:
        yield
    finally:
        processes.clear()  # a package that kept the function can exit later
        os._exit = end


class BuildError(BackendError):
    """A selected backend could not be built. ``backend`` is its registration, with the plugin's distribution."""

    def __init__(self, backend: Registered, error: AttnplugError) -> None:
        super().__init__(f"backend {backend.spec.name} ({backend.source}): {error.message}", settings=error.settings)
        self.backend = backend
        self.exit_code = error.exit_code  # that of a UsageError if the backend refuses its options


@contextlib.contextmanager
def attributed_to(backend: Registered, failure: str) -> Iterator[None]:
    """Raise any exception of a plugin's code as a BuildError. Kernel libraries do anything."""
    try:
        with guarded():
            yield
    except (BuildError, KeyboardInterrupt):
        raise
    except BaseException as error:
        if not isinstance(error, AttnplugError) or isinstance(error, PluginError):  # which do not know the backend
            raise BuildError(backend, BackendError(f"{failure}: {describe_error(error)}")) from error
        raise BuildError(backend, error) from error
