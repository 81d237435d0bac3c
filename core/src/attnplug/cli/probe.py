"""Probes that run in separate processes, in parallel, with a progress line.

Libraries are imported only there, because some raise AssertionError or RuntimeError on import, some print, and some
crash the process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from typing import Any, TextIO

Findings = dict[str, Any]
TIMEOUT_SECONDS = 120.0


class Probes:
    """Runs probes, at most one per core at a time. ``terminal`` shows progress; None shows none."""

    def __init__(self, terminal: TextIO | None) -> None:
        self._terminal = terminal
        self._slots = threading.BoundedSemaphore(os.cpu_count() or 1)
        self._lock = threading.RLock()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._started = self._finished = 0
        self._stopped = False

    def run(self, name: str, code: str) -> Findings:
        """Run Python code in a new process and return its variable ``answer``, a dict, or ``{"failed": reason}``."""
        with self._lock:
            self._started += 1
        with self._slots:
            try:
                return self._run(name, code)
            finally:
                with self._lock:
                    self._running.pop(name, None)
                    self._finished += 1
                    self._show()

    def _run(self, name: str, code: str) -> Findings:
        mark = f"attnplug-{os.urandom(8).hex()}"  # distinguishes the answer from output of the code
        script = (
            "import json, os\ntry:\n    scope = {}\n"
            f"    exec({code!r}, scope)\n    answer = scope['answer']\n"
            "except BaseException as error:\n    answer = {'failed': f'{type(error).__name__}: {error}'}\n"
            f"os.write(1, ('\\n{mark}' + json.dumps(answer) + '\\n').encode())\nos._exit(0)"
        )
        with self._lock:
            if self._stopped:
                return {"failed": "interrupted"}
            process = self._running[name] = subprocess.Popen(
                [sys.executable, "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            self._show()
        try:
            out, _ = process.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return {"failed": f"no answer within {TIMEOUT_SECONDS:g} s"}
        for line in reversed(out.decode(errors="replace").splitlines()):
            if line.startswith(mark):
                answer: Findings = json.loads(line.removeprefix(mark))
                return answer
        status = process.returncode
        ended = f"killed by signal {-status}" if status < 0 else f"exit code {status}"
        return {"failed": f"the process ended during the import ({ended})"}

    def stop(self) -> None:
        """Kill running probes and start no more."""
        with self._lock:
            self._stopped = True
            for process in self._running.values():
                process.kill()

    def print(self, text: str) -> None:
        """Print a part of the report above the progress line."""
        with self._lock:
            self._clear()
            print(text, flush=True)
            self._show()

    def _show(self) -> None:
        if self._terminal is not None:
            self._clear()
            if self._running:
                line = f"probing {', '.join(self._running)} … {self._finished}/{self._started}"
                self._terminal.write(
                    line[: shutil.get_terminal_size().columns - 1]
                )  # a wrapped line could not be cleared
                self._terminal.flush()

    def _clear(self) -> None:
        if self._terminal is not None:
            self._terminal.write("\r\x1b[K")
            self._terminal.flush()
