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
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING

from attnplug import Problem, RefusalCode, Role
from attnplug.host import (
    AttnplugError,
    BackendRequest,
    SelectionError,
    UsageError,
    interrupt,
    load_model,
    load_registry,
    select,
)

if TYPE_CHECKING:
    from attnplug_engine.parallel.collectives import TensorParallel

_PARENT = "ATTNPLUG_PARENT_PIPE"
"""For a rank: the descriptor of a pipe to which nobody writes, and which ends with the process that started it."""
_COPY = "ATTNPLUG_PROMPTS_COPY"
"""For a rank: the file that holds what the process that started it has read from a pipe."""

_LOST = 69
"""Exit code of a rank that ended because another one is gone: it has nothing to tell."""
_PATIENCE = 10.0
"""Seconds after a failure in which the other ranks may end, too: the first says the same mistake better."""
_PAUSE = 0.05
_MOST_TOLD = 4000


def started_as_rank() -> bool:
    """Whether this process is one of several ranks already."""
    if "RANK" in os.environ and "WORLD_SIZE" not in os.environ:
        raise UsageError(f"RANK={os.environ['RANK']!r} is set without WORLD_SIZE; {_TORCHRUN}")
    return "RANK" in os.environ


def join_ranks(size: int, asked: str | None) -> TensorParallel:
    """This process's place among ``size`` ranks, on the device that was asked for.

    From here on it ends with the process that started it.
    """
    from attnplug.host import open_device
    from attnplug_engine.parallel.collectives import SINGLE, ProcessGroupParallel  # who starts ranks needs no torch

    device = open_device(asked)[0].type
    watched = _end_with_parent()
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
        joined = ProcessGroupParallel.join(device)
    except (RuntimeError, ValueError) as error:  # torch's network errors are the first
        first = str(error).partition("\n")[0]
        raise AttnplugError(f"rank {rank} of {world} cannot meet the others at {where}:{port}: {first}") from error
    joined.exit_code_when_lost = _LOST if watched else None
    return joined


def leave_ranks(parallel: TensorParallel, code: int) -> int:
    """End what :func:`join_ranks` began, with the exit code of a command that came to its end.

    Ranks leave together: where one is gone while another's torch still listens to it, that may abort the other. Those
    that do not speak end right here, without torch's own way out.
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


def _take_gpu(rank: int) -> None:
    import torch

    local = _number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else 0
    if local >= torch.cuda.device_count():
        raise UsageError(
            f"rank {rank} needs a GPU of its own, the one of number {local}, and torch sees "
            f"{torch.cuda.device_count()}; lower `tensor_parallel`",
            settings=["tensor_parallel"],
        )
    torch.cuda.set_device(local)


def _end_with_parent() -> bool:
    """End this process when the one that started it is gone, however that ended: its end of the pipe closes.

    Returns whether :func:`run_ranks` has started it.
    """
    descriptor = os.environ.pop(_PARENT, None)
    if descriptor is None:
        return False

    def watch() -> None:
        os.read(int(descriptor), 1)  # returns at the end of the pipe only
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    return True


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
    problem = Problem(load_model(model), tensor_parallel=size, is_embedding=is_embedding)
    # What drafts is another model's.
    request = replace(request, roles={role: name for role, name in request.roles.items() if role is not Role.DRAFT})
    try:
        select(load_registry(), request, problem)
    except SelectionError as error:
        judged = [c for choice in error.selection.unserved for c in choice.candidates]
        for refusal in (refusal for candidate in judged for refusal in candidate.refusals):
            if refusal.code == RefusalCode.TENSOR_PARALLEL:  # of the model: no choice of backends changes it
                raise AttnplugError(f"{model}: {refusal.message}", settings=filter(None, [refusal.setting])) from error
        raise


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank as its parent sees it. ``errors`` is what it writes to standard error; the first one's goes to ours."""

    number: int
    process: subprocess.Popen[bytes]
    errors: IO[bytes] | None

    @property
    def code(self) -> int | None:
        return self.process.poll()

    @property
    def failed(self) -> bool:
        """Whether it ended badly by itself. One that ends with a bad code in silence agrees with the first."""
        silent = self.errors is not None and os.fstat(self.errors.fileno()).st_size == 0
        return self.code not in (None, 0, _LOST) and not (self.code == 1 and silent)

    @property
    def told(self) -> str:
        """Its last error message, or the last line that it wrote; how it ended where there is none."""
        text = ""
        if self.errors is not None:
            self.errors.seek(0, os.SEEK_END)
            self.errors.seek(max(self.errors.tell() - _MOST_TOLD, 0))
            text = self.errors.read().decode(errors="replace").strip()
        _, found, message = f"\n{text}".rpartition("\nerror: ")
        return (message if found else text.rpartition("\n")[2]) or f"it ended with exit code {self.code}"


def run_ranks(size: int, arguments: Sequence[str]) -> int:
    """Start the same command once per rank; only the first speaks. Returns its exit code.

    Raises AttnplugError with what another rank has to say, where that failed and the first did not.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    theirs, ours = os.pipe()
    ranks: list[_Rank] = []
    with ExitStack() as files:
        try:
            with interrupt.terminated_in_order():
                # Ctrl-C goes to all processes of the terminal. Ranks inherit that it is blocked: only we speak of it.
                unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                try:
                    for number in range(size):
                        errors = files.enter_context(tempfile.TemporaryFile()) if number else None
                        ranks.append(_Rank(number, _start(number, size, port, theirs, errors, arguments), errors))
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
                return _wait(ranks)
        except (KeyboardInterrupt, SystemExit):
            if ranks:
                _let_write(ranks[0].process)
            raise
        finally:
            _end(ranks)
            os.close(theirs)
            os.close(ours)


def _start(
    rank: int, size: int, port: int, pipe: int, errors: IO[bytes] | None, arguments: Sequence[str]
) -> subprocess.Popen[bytes]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = {**os.environ, **{name: str(value) for name, value in place.items()}, _PARENT: str(pipe)}
    output = None if rank == 0 else subprocess.DEVNULL
    command = [sys.executable, "-m", "attnplug", *arguments]
    return subprocess.Popen(command, env=environment, stdout=output, stderr=errors, pass_fds=(pipe,))


def _let_write(first: subprocess.Popen[bytes]) -> None:
    """Ask the first rank to end by itself: it may hold what is finished and not yet written."""
    first.terminate()
    with suppress(subprocess.TimeoutExpired):
        first.wait(timeout=10)


def _end(ranks: list[_Rank]) -> None:
    """End those that still run."""
    left = [rank.process for rank in ranks if rank.code is None]
    for process in left:
        process.kill()
        process.wait()
    if left and sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # the first rank hides the cursor while its progress bar moves


def _wait(ranks: list[_Rank]) -> int:
    """Wait for all; when one fails, the others would wait for it for ever, so they have a moment to end."""
    patience = _PATIENCE
    while patience > 0 and any(rank.code is None for rank in ranks):
        time.sleep(_PAUSE)
        failed = any(rank.failed for rank in ranks)
        if failed and ranks[0].code is not None:
            break
        patience -= _PAUSE if failed or any(rank.code == _LOST for rank in ranks) else 0
    codes = [rank.code for rank in ranks]
    if any(code is not None and code > 0 and code != _LOST for code in codes):
        # One has something to tell. Torch aborts a rank that it finds without the others, at any time.
        codes = [_LOST if code == -signal.SIGABRT else code for code in codes]
    _tell_of_killed(codes)
    if codes[0] not in (None, 0, _LOST) or not any(codes):
        return codes[0] or 0
    # One that lost the others is not at fault, unless nobody is.
    rank = next((rank for rank, code in zip(ranks, codes, strict=True) if code not in (None, 0, _LOST)), ranks[0])
    kind = UsageError if rank.code == UsageError.exit_code else AttnplugError
    raise kind(f"rank {rank.number} of {len(ranks)} failed: {rank.told}")


def _tell_of_killed(codes: Sequence[int | None]) -> None:
    """Raise where a signal ended a rank: it could not say so, and the others failed because of it."""
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
            why = "; the system does that where memory runs out" if -code == signal.SIGKILL else ""
            raise AttnplugError(f"rank {rank} of {len(codes)} was ended by {name}{why}")
