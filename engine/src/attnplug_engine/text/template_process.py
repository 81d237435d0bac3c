"""Process that renders chat templates. One per Python process, started at the first use.

Nothing here imports torch or Jinja, so a command starts the process while it imports them.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from attnplug import UsageError
from attnplug.host import AttnplugError

SECONDS = 5.0
"""Time limit of one rendering. A template of a published model takes about 1 ms, compilation included 20 ms."""
MEMORY = 512 << 20
"""Memory limit in bytes, in addition to what the process has at its start."""

_WORKER = Path(__file__).with_name("template_worker.py")
_OUT_OF_MEMORY = 77  # exit code


class TemplateProcess:
    """Handle of the worker process. A process that exceeds a limit ends; the next call starts another one.

    Calls of several threads run one after another. The worker ends when this process ends, however that happens.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def start(self) -> None:
        """Start the worker unless it runs. Returns before it is ready."""
        with self._lock:
            self._running()

    def render(self, template: str, variables: Mapping[str, object]) -> dict[str, str]:
        """Return the worker's answer, as ``template_worker`` describes it.

        Raises UsageError if a limit is exceeded or if ``variables`` are not JSON, and AttnplugError if the worker
        cannot be run.
        """
        request = {"template": template, "variables": variables, "seconds": SECONDS}
        try:
            text = json.dumps(request, default=_as_dict, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"the messages hold something that is not JSON: {error}") from None
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(text.encode(errors="surrogatepass") + b"\n")
                process.stdin.flush()
                answered = process.stdout.readline()
            except BrokenPipeError:
                answered = b""
            except BaseException:  # an interrupt: the answer would be taken for that of the next request
                self._end()
                raise
            if not answered:
                self._end()
                raise _exceeded(process.returncode)
        answer: dict[str, str] = json.loads(answered)
        return answer

    def close(self) -> None:
        """End the worker, if it runs."""
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        self._end()
        arguments = [str(MEMORY), str(_OUT_OF_MEMORY), json.dumps(sys.path)]
        try:
            # -I -S: without .pth files and the environment's settings, it starts in a third of the time. A process
            # group of its own: Ctrl-C reaches this process only.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_WORKER), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                process_group=0,
            )
        except OSError as error:
            raise AttnplugError(f"the process that renders chat templates cannot be started: {error}") from error
        self._owner = os.getpid()  # a forked child must not share the pipes
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        assert process.stdin is not None and process.stdout is not None
        process.stdout.close()
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.kill()
        process.wait()


def _as_dict(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def _exceeded(code: int | None) -> AttnplugError:
    """Return the error for a worker that ended with ``code`` instead of answering."""
    if code == -signal.SIGALRM:
        return UsageError(f"the chat template takes longer than {SECONDS:g} s")
    if code == _OUT_OF_MEMORY:
        return UsageError(f"the chat template takes more than {MEMORY >> 20} MiB of memory")
    how = f"with exit code {code}" if code is None or code >= 0 else f"by signal {-code}"
    return AttnplugError(f"the process that renders chat templates was ended {how}")


PROCESS = TemplateProcess()
atexit.register(PROCESS.close)
