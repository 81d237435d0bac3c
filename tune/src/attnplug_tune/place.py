"""Circumstances of a benchmark: the device's memory bandwidth, and the commit."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

from attnplug.declare.errors import UsageError
from attnplug.machine.runtime import runtime_of

_BYTES, _GPU_BYTES = 256 << 20, 4 << 30


def commit() -> str | None:
    """Commit of this package's source if it runs from a checkout, with ``+`` if files were changed."""
    commands = (["rev-parse", "HEAD"], ["ls-files", "--error-unmatch", __file__], ["status", "--porcelain"])
    folder = Path(__file__).parent
    try:
        head, _, changes = (
            subprocess.run(
                ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True
            ).stdout
            for arguments in commands
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head.strip() + "+" * bool(changes.strip())


def bandwidth(device: torch.device) -> float:
    """Bytes per second of plain reads or copies, whichever is faster, over more memory than any cache holds."""
    size = _BYTES if runtime_of(device).module is None else _GPU_BYTES
    try:
        memory = torch.ones(size // 4, dtype=torch.float32, device=device)
    except torch.OutOfMemoryError as error:
        needed = f"{size >> 20} MiB"
        raise UsageError(
            f"{device} has no {needed} of free memory to measure its bandwidth; end what uses it"
        ) from error
    first, second = memory.chunk(2)  # a copy reads one half and writes the other
    seconds = min(_best_s(lambda: memory.sum(), device), _best_s(lambda: first.copy_(second), device))
    return memory.numel() * memory.element_size() / seconds


def _best_s(call: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(6):
        started = time.perf_counter()
        call()
        if (module := runtime_of(device).module) is not None:
            module.synchronize()
        times.append(time.perf_counter() - started)
    return min(times[1:])
