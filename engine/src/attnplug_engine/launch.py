"""Tensor-parallel ranks: started by torchrun, or by the command itself, one process each."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnplug.errors import AttnplugError, UsageError

if TYPE_CHECKING:
    from attnplug_engine.parallel import TensorParallel


def started_as_rank() -> bool:
    """Whether this process is one of several ranks already."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def join_ranks(size: int, device: str) -> TensorParallel:
    """This process's place among ``size`` ranks."""
    from attnplug_engine.parallel import SINGLE, ProcessGroupParallel  # who starts ranks needs no torch

    if not started_as_rank():
        return SINGLE
    if not os.environ["WORLD_SIZE"].isdigit() or not os.environ["RANK"].isdigit():
        raise UsageError(
            f"RANK={os.environ['RANK']!r} and WORLD_SIZE={os.environ['WORLD_SIZE']!r} are not numbers; "
            "they are torchrun's to set: unset them"
        )
    world = int(os.environ["WORLD_SIZE"])
    if world != size:
        raise UsageError(f"--tensor-parallel {size} was asked for, but {world} ranks were started; make them equal")
    if size == 1:
        return SINGLE
    if device == "cuda":
        import torch

        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return ProcessGroupParallel.join(device)


def run_ranks(size: int, arguments: Sequence[str]) -> int:
    """Start the same command once per rank; only the first speaks. Returns the first bad exit code, or 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Being ended from outside must end the ranks as well, so it takes the way through 'finally'.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    ranks = []
    for rank in range(size):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
        output = None if rank == 0 else subprocess.DEVNULL
        command = [sys.executable, "-m", "attnplug", *arguments]
        ranks.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
    try:
        return _wait(ranks)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()


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
            if rank == 0:
                return code
            try:  # the first rank knows the same mistake and says it better
                return ranks[0].wait(timeout=10) or code
            except subprocess.TimeoutExpired:
                raise AttnplugError(f"rank {rank} of {len(ranks)} failed with exit code {code}") from None
    return 0
