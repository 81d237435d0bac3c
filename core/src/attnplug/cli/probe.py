"""Questions that are asked in processes of their own, several at a time, with a line that shows which are running.

Libraries are imported only there: some raise AssertionError or RuntimeError on import, some print, some crash the
process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import TextIO

Findings = Mapping[str, str]
SECONDS = 120.0
"""Seconds after which a process is given up."""


class Probes:
    """Runs as many processes at a time as there are cores. ``terminal`` is where progress is shown, if anywhere."""

    def __init__(self, terminal: TextIO | None) -> None:
        self._terminal = terminal
        self._room = threading.BoundedSemaphore(os.cpu_count() or 1)
        self._lock = threading.RLock()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._asked = self._answered = 0
        self._stopped = False

    def ask(self, name: str, code: str) -> Findings:
        """What the code leaves in ``answer``, or ``{"failed": why}`` if it does not get that far."""
        with self._lock:
            self._asked += 1
        with self._room:
            try:
                return self._ask(name, code)
            finally:
                with self._lock:
                    self._running.pop(name, None)
                    self._answered += 1
                    self._show()

    def _ask(self, name: str, code: str) -> Findings:
        mark = f"attnplug-{os.urandom(8).hex()}"  # tells the answer from what the code prints, at exit too
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
            out, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return {"failed": f"no answer within {SECONDS:g} s"}
        for line in reversed(out.decode(errors="replace").splitlines()):
            if line.startswith(mark):
                return {str(key): str(text) for key, text in json.loads(line.removeprefix(mark)).items()}
        status = process.returncode
        ended = f"killed by signal {-status}" if status < 0 else f"exit code {status}"
        return {"failed": f"the process ended during the import ({ended})"}

    def stop(self) -> None:
        """End what is running, and start nothing more."""
        with self._lock:
            self._stopped = True
            for process in self._running.values():
                process.kill()

    def print(self, text: str) -> None:
        """Print a part of the report, in place of the line that shows progress."""
        with self._lock:
            self._clear()
            print(text, flush=True)
            self._show()

    def _show(self) -> None:
        if self._terminal is not None:
            self._clear()
            if self._running:
                line = f"probing {', '.join(self._running)} … {self._answered}/{self._asked}"
                self._terminal.write(line[: shutil.get_terminal_size().columns - 1])  # a wrapped line is not cleared
                self._terminal.flush()

    def _clear(self) -> None:
        if self._terminal is not None:
            self._terminal.write("\r\x1b[K")
            self._terminal.flush()
