"""Free host memory."""

from __future__ import annotations

from pathlib import Path

_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Return the bytes of host memory that this process may still allocate: free memory, limited by its control
    group."""
    found = []
    try:
        lines = _MEMORY.read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        limit = (_GROUP / "memory.max").read_text().strip()
        if limit != "max":
            found.append(int(limit) - int((_GROUP / "memory.current").read_text()))
    except (OSError, ValueError, IndexError):
        pass  # no such file: use what was found so far
    return max(min(found, default=1 << 62), 0)
