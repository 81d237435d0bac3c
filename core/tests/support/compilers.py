"""Builds of kernels that run in processes of their own. Imports no torch: each process would import it, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def write_pid(path: str) -> None:
    """Pretend to compile and load: write the process that did it last."""
    Path(path).write_text(str(os.getpid()))


def fail() -> None:
    sys.stdout.write("".join(f"note {number}\n" for number in range(50)))
    raise RuntimeError("kernel.cu(3): error: no such type\n1 error detected")


def run_compiler(path: str) -> None:
    """Start a process that takes a minute, and write its number."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(path).write_text(str(child.pid))
    child.wait()
