"""Tensor-parallel rank processes, started by torchrun or by the command itself."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from attnplug import UsageError
from attnplug.host import AttnplugError, load_registry
from attnplug.machine import interrupt

if TYPE_CHECKING:
    from attnplug_engine.parallel.collectives import TensorParallel

_PARENT = "ATTNPLUG_PARENT_PIPE"
"""Environment variable of a rank: descriptor of a pipe without writers that closes when the parent process ends."""
_COPY = "ATTNPLUG_PROMPTS_COPY"
"""Environment variable of a rank: file with a copy of what the parent process has read from a pipe."""

_LOST = 69
"""Exit code of a rank that ended because another one exited; it has nothing to report."""
_PATIENCE = 10.0
"""Seconds that the other ranks have to end after a failure: the first rank usually reports it best."""
_PAUSE = 0.05
_MAX_MESSAGE_BYTES = 4000


def started_as_rank() -> bool:
    """Return True if this process is already one of several ranks."""
    if "RANK" in os.environ and "WORLD_SIZE" not in os.environ:
        raise UsageError(f"RANK={os.environ['RANK']!r} is set without WORLD_SIZE; {_TORCHRUN}")
    return "RANK" in os.environ


def join_ranks(size: int, asked: str | None) -> TensorParallel:
    """Join ``size`` ranks on the requested device.

    From here on this process ends with its parent.
    """
    from attnplug.machine.runtime import open_device, runtime_of
    from attnplug_engine.parallel.collectives import SINGLE, ProcessGroupParallel  # the parent imports no torch

    watched = _end_with_parent()
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return SINGLE
    rank, world = _number("RANK"), _number("WORLD_SIZE")
    if world != size:
        raise UsageError(f"--tensor-parallel {size} was requested, but {world} ranks were started; make them equal")
    if rank >= world:
        raise UsageError(f"RANK={rank} is not one of WORLD_SIZE={world} ranks, which count from 0; {_TORCHRUN}")
    if size == 1:
        return SINGLE
    where = os.environ.get("MASTER_ADDR")
    if not where:
        raise UsageError(f"RANK={rank} is set without MASTER_ADDR, the host where ranks meet; {_TORCHRUN}")
    port = _number("MASTER_PORT", most=65535)
    device, _ = open_device(asked, load_registry().device)
    if (module := runtime_of(device).module) is not None:
        _take_device(rank, device.type, module)
    try:
        joined = ProcessGroupParallel.join(device)
    except (RuntimeError, ValueError) as error:  # torch raises RuntimeError for network errors
        first = str(error).partition("\n")[0]
        raise AttnplugError(f"rank {rank} of {world} cannot meet the others at {where}:{port}: {first}") from error
    joined.exit_code_when_lost = _LOST if watched else None
    return joined


def leave_ranks(parallel: TensorParallel, code: int) -> int:
    """Leave the ranks joined by :func:`join_ranks`, with the command's exit code.

    Ranks exit together: if one has exited while another's torch still listens to it, torch may abort the other. Ranks
    other than the first end right here, without torch's shutdown.
    """
    from attnplug_engine.parallel.collectives import ProcessGroupParallel

    if isinstance(parallel, ProcessGroupParallel):
        parallel.close()
        if parallel.rank:
            os._exit(code)
    return code


_TORCHRUN = "torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: set all of them, or unset RANK"


def _number(name: str, most: int = 1 << 20) -> int:
    text = os.environ.get(name)
    if text is None:
        raise UsageError(f"{name} is not set, but RANK is; {_TORCHRUN}")
    if not (text.isascii() and text.isdigit() and int(text[:10]) <= most):
        raise UsageError(f"{name}={text!r:.100} is not a number from 0 to {most}; {_TORCHRUN}")
    return int(text)


def _take_device(rank: int, name: str, module: Any) -> None:
    local = _number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else 0
    if local >= (count := module.device_count()):
        raise UsageError(
            f"rank {rank} needs a device of its own, {name}:{local}, and torch sees {count}; lower `tensor_parallel`",
            settings=["tensor_parallel"],
        )
    module.set_device(local)


def _end_with_parent() -> bool:
    """End this process when its parent has exited for any reason: the parent's end of the pipe closes.

    Returns True if :func:`run_ranks` started this process.
    """
    descriptor = os.environ.pop(_PARENT, None)
    if descriptor is None:
        return False

    def watch() -> None:
        os.read(int(descriptor), 1)  # returns only when the pipe closes
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    return True


@contextmanager
def prompts_for_ranks(path: str | None) -> Iterator[None]:
    """Give ranks a copy of prompts that can be read only once: of standard input (``-``) or another pipe."""
    if path is None or not _read_once(path):
        yield
        return
    with tempfile.NamedTemporaryFile(prefix="attnplug-prompts-") as copy:
        try:
            if path == "-":
                shutil.copyfileobj(sys.stdin.buffer, copy)
            else:
                with open(path, "rb") as given:
                    shutil.copyfileobj(given, copy)
            copy.flush()
        except OSError as error:
            raise UsageError(f"--prompts {path} cannot be read: {error.strerror or error}") from error
        os.environ[_COPY] = copy.name
        try:
            yield
        finally:
            del os.environ[_COPY]


def _read_once(path: str) -> bool:
    if path == "-":
        return sys.stdin is not None
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def prompts_path(path: str) -> str:
    """Return the file to read prompts from: ``path``, or the copy of :func:`prompts_for_ranks`."""
    return os.environ.get(_COPY, path)


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank as its parent sees it. ``errors`` captures its standard error; None for the first rank, which uses
    ours."""

    number: int
    process: subprocess.Popen[bytes]
    errors: IO[bytes] | None

    @property
    def code(self) -> int | None:
        return self.process.poll()

    @property
    def failed(self) -> bool:
        """True if the rank failed by itself. One that exits with code 1 silently agrees with the first rank."""
        silent = self.errors is not None and os.fstat(self.errors.fileno()).st_size == 0
        return self.code not in (None, 0, _LOST) and not (self.code == 1 and silent)

    @property
    def message(self) -> str:
        """Last error message, or the last line that it wrote; otherwise its exit code."""
        text = ""
        if self.errors is not None:
            self.errors.seek(0, os.SEEK_END)
            self.errors.seek(max(self.errors.tell() - _MAX_MESSAGE_BYTES, 0))
            text = self.errors.read().decode(errors="replace").strip()
        _, found, message = f"\n{text}".rpartition("\nerror: ")
        return (message if found else text.rpartition("\n")[2]) or f"it ended with exit code {self.code}"


def run_ranks(size: int, arguments: Sequence[str]) -> int:
    """Start the same command once per rank; only the first one writes output. Returns its exit code.

    Raises AttnplugError with another rank's message if that rank failed and the first did not.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    read_end, write_end = os.pipe()
    ranks: list[_Rank] = []
    with ExitStack() as files:
        try:
            with interrupt.raise_on_sigterm():
                # Ctrl-C reaches all processes of the terminal. Ranks inherit that it is blocked, so that only the
                # parent reports it.
                unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                try:
                    for number in range(size):
                        errors = files.enter_context(tempfile.TemporaryFile()) if number else None
                        ranks.append(_Rank(number, _start(number, size, port, read_end, errors, arguments), errors))
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
                return _wait(ranks)
        except (KeyboardInterrupt, SystemExit):
            if ranks:
                _terminate(ranks[0].process)
            raise
        finally:
            _end(ranks)
            os.close(read_end)
            os.close(write_end)


def _start(
    rank: int, size: int, port: int, pipe: int, errors: IO[bytes] | None, arguments: Sequence[str]
) -> subprocess.Popen[bytes]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = {**os.environ, **{name: str(value) for name, value in place.items()}, _PARENT: str(pipe)}
    output = None if rank == 0 else subprocess.DEVNULL
    command = [sys.executable, "-m", "attnplug", *arguments]
    return subprocess.Popen(command, env=environment, stdout=output, stderr=errors, pass_fds=(pipe,))


def _terminate(first: subprocess.Popen[bytes]) -> None:
    """Terminate the first rank gracefully: it may hold finished completions that are not yet written."""
    first.terminate()
    with suppress(subprocess.TimeoutExpired):
        first.wait(timeout=10)


def _end(ranks: list[_Rank]) -> None:
    """Kill the ranks that still run."""
    left = [rank.process for rank in ranks if rank.code is None]
    for process in left:
        process.kill()
        process.wait()
    if left and sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # the first rank hides the cursor while its progress bar moves


def _wait(ranks: list[_Rank]) -> int:
    """Wait for all ranks. If one fails, the others would wait for it forever, so they get a limited time to end."""
    patience = _PATIENCE
    while patience > 0 and any(rank.code is None for rank in ranks):
        time.sleep(_PAUSE)
        failed = any(rank.failed for rank in ranks)
        if failed and ranks[0].code is not None:
            break
        patience -= _PAUSE if failed or any(rank.code == _LOST for rank in ranks) else 0
    codes = [rank.code for rank in ranks]
    if any(code is not None and code > 0 and code != _LOST for code in codes):
        # One rank has something to report. torch may abort a rank at any time after others have exited.
        codes = [_LOST if code == -signal.SIGABRT else code for code in codes]
    _raise_if_killed(codes)
    if codes[0] not in (None, 0, _LOST) or not any(codes):
        return codes[0] or 0
    # A rank that lost the others is not at fault, unless all did.
    rank = next((rank for rank, code in zip(ranks, codes, strict=True) if code not in (None, 0, _LOST)), ranks[0])
    kind = UsageError if rank.code == UsageError.exit_code else AttnplugError
    raise kind(f"rank {rank.number} of {len(ranks)} failed: {rank.message}")


def _raise_if_killed(codes: Sequence[int | None]) -> None:
    """Raise if a signal ended a rank: it could not report that, and the others failed because of it."""
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
            why = "; the system does that where memory runs out" if -code == signal.SIGKILL else ""
            raise AttnplugError(f"rank {rank} of {len(codes)} was ended by {name}{why}")
