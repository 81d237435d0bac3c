"""Tensor-parallel ranks: started by torchrun, or by the command itself, one process each."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from attnplug import interrupt
from attnplug.errors import AttnplugError, UsageError
from attnplug.model_config import load_model
from attnplug.problem import Problem
from attnplug.registry import load_registry
from attnplug.select import BackendRequest, select

if TYPE_CHECKING:
    from attnplug_engine.parallel import TensorParallel

_PARENT = "ATTNPLUG_PARENT_PIPE"
"""For a rank: the descriptor of a pipe to which nobody writes, and which ends with the process that started it."""
_COPY = "ATTNPLUG_PROMPTS_COPY"
"""For a rank: the file that holds what the process that started it has read from a pipe."""


def started_as_rank() -> bool:
    """Whether this process is one of several ranks already."""
    if "RANK" in os.environ and "WORLD_SIZE" not in os.environ:
        raise UsageError(f"RANK={os.environ['RANK']!r} is set without WORLD_SIZE; {_TORCHRUN}")
    return "RANK" in os.environ


@contextmanager
def joined_ranks(size: int, device: str | None) -> Iterator[TensorParallel]:
    """This process's place among ``size`` ranks, on what a user calls ``device``.

    From here on it ends with the process that started it.
    """
    from attnplug.device import open_device

    parallel = _join(size, open_device(device)[0].type)
    try:
        yield parallel
    except RuntimeError as error:  # torch's, of a group that fell apart
        if parallel.size == 1:
            raise
        first = str(error).partition("\n")[0]
        raise AttnplugError(f"rank {parallel.rank} lost the others, or one of them failed: {first}") from error


def _join(size: int, device: str) -> TensorParallel:
    from attnplug_engine.parallel import SINGLE, ProcessGroupParallel  # who starts ranks needs no torch

    _end_with_parent()
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return SINGLE
    rank, world = _number("RANK"), _number("WORLD_SIZE")
    if world != size:
        raise UsageError(f"--tensor-parallel {size} was asked for, but {world} ranks were started; make them equal")
    if rank >= world:
        raise UsageError(f"RANK={rank} is not one of WORLD_SIZE={world} ranks, which count from 0; {_TORCHRUN}")
    if size == 1:
        return SINGLE
    where = os.environ.get("MASTER_ADDR")
    if not where:
        raise UsageError(f"RANK={rank} is set without MASTER_ADDR, the host where ranks meet; {_TORCHRUN}")
    port = _number("MASTER_PORT", most=65535)
    if device == "cuda":
        _take_gpu(rank)
    try:
        return ProcessGroupParallel.join(device)
    except (RuntimeError, ValueError) as error:  # torch's network errors are the first
        first = str(error).partition("\n")[0]
        raise AttnplugError(f"rank {rank} of {world} cannot meet the others at {where}:{port}: {first}") from error


_TORCHRUN = "torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: set all of them, or unset RANK"


def _number(name: str, most: int = 1 << 20) -> int:
    text = os.environ.get(name)
    if text is None:
        raise UsageError(f"{name} is not set, but RANK is; {_TORCHRUN}")
    if not (text.isascii() and text.isdigit() and int(text[:10]) <= most):
        raise UsageError(f"{name}={text!r:.100} is not a number from 0 to {most}; {_TORCHRUN}")
    return int(text)


def _take_gpu(rank: int) -> None:
    import torch

    local = _number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else 0
    if local >= torch.cuda.device_count():
        raise UsageError(
            f"rank {rank} needs a GPU of its own, the one of number {local}, and torch sees "
            f"{torch.cuda.device_count()}; lower --tensor-parallel"
        )
    torch.cuda.set_device(local)


def _end_with_parent() -> None:
    """End this process when the one that started it is gone, however that ended: its end of the pipe closes."""
    descriptor = os.environ.pop(_PARENT, None)
    if descriptor is None:
        return

    def watch() -> None:
        os.read(int(descriptor), 1)  # returns at the end of the pipe only
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def kept_for_ranks(path: str | None) -> Iterator[None]:
    """Inside, ranks find a copy of what can be read only once: of standard input (``-``) or of another pipe."""
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


def readable(path: str) -> str:
    """Where to read the prompts that a user calls ``path``: there, or in the copy of :func:`kept_for_ranks`."""
    return os.environ.get(_COPY, path)


def check_division(model: str, request: BackendRequest, size: int, *, is_embedding: bool = False) -> None:
    """Raise where no backend can serve the model on so many ranks, before any is started and without torch.

    Where it runs, and in which types, is for the ranks to judge.
    """
    select(load_registry(), request, Problem(load_model(model), tensor_parallel=size, is_embedding=is_embedding))


def run_ranks(size: int, arguments: Sequence[str]) -> int:
    """Start the same command once per rank; only the first speaks. Returns the first bad exit code, or 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    theirs, ours = os.pipe()
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        with interrupt.terminated_in_order():
            # Ctrl-C goes to all processes of the terminal. Ranks inherit that it is blocked: only we speak of it.
            unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                for rank in range(size):
                    ranks.append(_start(rank, size, port, theirs, arguments))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            return _wait(ranks)
    except (KeyboardInterrupt, SystemExit):
        if ranks:
            _let_write(ranks[0])
        raise
    finally:
        _end(ranks)
        os.close(theirs)
        os.close(ours)


def _start(rank: int, size: int, port: int, pipe: int, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = {**os.environ, **{name: str(value) for name, value in place.items()}, _PARENT: str(pipe)}
    output = None if rank == 0 else subprocess.DEVNULL
    command = [sys.executable, "-m", "attnplug", *arguments]
    return subprocess.Popen(command, env=environment, stdout=output, stderr=output, pass_fds=(pipe,))


def _let_write(first: subprocess.Popen[bytes]) -> None:
    """Ask the first rank to end by itself: it may hold what is finished and not yet written."""
    first.terminate()
    with suppress(subprocess.TimeoutExpired):
        first.wait(timeout=10)


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """End those that still run."""
    left = [process for process in ranks if process.poll() is None]
    for process in left:
        process.kill()
        process.wait()
    if left and sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # the first rank hides the cursor while its progress bar moves


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    """Wait for all; when one fails, the others would wait for it for ever, so they are ended."""
    waiting = dict(enumerate(ranks))
    while waiting:
        for rank, process in list(waiting.items()):
            try:
                code = process.wait(timeout=0.1)
            except subprocess.TimeoutExpired:
                continue
            del waiting[rank]
            if code == 0:
                continue
            _tell_of_killed(ranks)
            if rank == 0:
                return code
            try:  # the first rank knows the same mistake and says it better
                return ranks[0].wait(timeout=10) or code
            except subprocess.TimeoutExpired:
                raise AttnplugError(f"rank {rank} of {len(ranks)} failed with exit code {code}") from None
    return 0


def _tell_of_killed(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Raise where a signal ended a rank: it could not say so, and the others failed because of it."""
    for rank, process in enumerate(ranks):
        code = process.poll()
        if code is not None and code < 0:
            name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
            why = "; the system does that where memory runs out" if -code == signal.SIGKILL else ""
            raise AttnplugError(f"rank {rank} of {len(ranks)} was ended by {name}{why}")
