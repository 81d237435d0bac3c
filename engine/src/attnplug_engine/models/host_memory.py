"""How much memory of the host there is."""

from __future__ import annotations

from pathlib import Path

_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes of host memory that this process may still take: what is free, and what its control group leaves."""
    found = []
    try:
        lines = _MEMORY.read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        limit = (_GROUP / "memory.max").read_text().strip()
        if limit != "max":
            found.append(int(limit) - int((_GROUP / "memory.current").read_text()))
    except (OSError, ValueError, IndexError):
        pass  # no such file: what was found before it counts
    return max(min(found, default=1 << 62), 0)
