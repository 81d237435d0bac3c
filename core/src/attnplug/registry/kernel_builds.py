"""Compilation of the kernels of selected backends, in parallel processes, before the backends are built (E1)."""

from __future__ import annotations

import os
import pickle
import pkgutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from itertools import islice
from typing import Any

from attnplug.declare.errors import BackendError
from attnplug.declare.problem import Problem, Role
from attnplug.declare.spec import KernelBuild, Registered
from attnplug.registry.loading import BuildError, attributed_to

compiled_kernels: list[tuple[str, float]] = []
"""Name and seconds of every kernel that :func:`build_kernels` compiled for this process."""
_BYTES_PER_COMPILER = 4 << 30
_loaded: set[tuple[str, str]] = set()  # backend, kernel
_progress: ContextVar[Callable[[int, int], None] | None] = ContextVar("progress", default=None)


@contextmanager
def compile_progress(progress: Callable[[int, int], None] | None) -> Iterator[None]:
    """Call ``progress(done, total)`` while kernels are compiled inside the block."""
    token = _progress.set(progress)
    try:
        yield
    finally:
        _progress.reset(token)


def build_kernels(backends: Iterable[tuple[Registered, frozenset[Role], Any]], problem: Problem) -> None:
    """Compile the kernels that backends need for a problem and that no disk cache has, and load all of them.

    A backend comes with its roles and its parsed options. ``problem`` states model, device, SM and dtypes. Starts no
    process if everything is cached. Raises :class:`BuildError` with the compiler's last lines. An interrupt ends all
    compilers.
    """
    wanted: dict[tuple[str, str], tuple[Registered, KernelBuild]] = {}
    for backend, roles, options in backends:
        for build in declared_builds(backend, problem, roles, options):
            if (key := (backend.spec.name, build.name)) not in _loaded:
                wanted[key] = backend, build
    missing = [(owner, build) for owner, build in wanted.values() if not _call(owner, build.name, build.is_cached)]
    if missing:
        _compile(missing, 1 if problem.model is None else problem.model.ranks)
    for key, (backend, build) in wanted.items():
        _call(backend, build.name, build.build)
        _loaded.add(key)


def declared_builds(backend: Registered, problem: Problem, roles: frozenset[Role], options: Any) -> list[KernelBuild]:
    """Return the kernels that a backend's spec lists for a problem. Raises BuildError if the list is malformed."""
    spec, reference = backend.spec, backend.spec.kernel_builds
    with attributed_to(backend, f"{reference} failed"):
        given = spec.options() if options is None and spec.options is not None else options
        builds = [] if reference is None else list(pkgutil.resolve_name(reference)(problem, roles, given))
        if wrong := [build for build in builds if not isinstance(build, KernelBuild)]:
            raise TypeError(f"it returned {wrong[0]!r} in its list, which is not a KernelBuild")
        names = [build.name for build in builds]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"it returned several kernels named {', '.join(sorted(repeated))}")
        return builds


def _call(backend: Registered, name: str, function: Callable[[], Any]) -> Any:
    with attributed_to(backend, f"{name} failed"):
        return function()


def _compile(missing: Sequence[tuple[Registered, KernelBuild]], ranks: int) -> None:
    """Compile kernels in as many processes as cores and memory allow.

    Not by ``multiprocessing``, which would run the host's ``__main__`` again in every process. A process leads a
    session, so that it can be killed together with the compilers it starts.
    """
    memory, progress = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _progress.get()
    most = max(min(len(os.sched_getaffinity(0)), memory // _BYTES_PER_COMPILER) // ranks, 1)
    workers = min(most, len(missing))
    environment = {"MAX_JOBS": str(most // workers), **os.environ}  # compilers of one process: ninja's, for instance
    environment["PYTHONPATH"] = os.pathsep.join(path or os.curdir for path in sys.path)
    command = [sys.executable, "-P", "-c", f"from {__name__} import run_pickled; run_pickled()"]
    running: set[subprocess.Popen[bytes]] = set()
    stopped, pipe = False, subprocess.PIPE

    def compile_one(backend: Registered, build: KernelBuild, pickled: bytes) -> tuple[str, float]:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        running.add(process)
        if stopped:
            process.kill()
        printed, _ = process.communicate(pickled)
        running.discard(process)
        if process.returncode:
            lines = printed.decode(errors="replace").rstrip().splitlines()[-12:]
            text = "\n".join(f"  {line[:400]}" for line in lines) or f"  exit code {process.returncode}"
            raise BuildError(backend, BackendError(f"kernel {build.name} cannot be compiled:\n{text}"))
        return f"{backend.spec.name}: {build.name}", time.perf_counter() - started

    # Pickled here, because a plugin's code is isolated by state of the whole process.
    work = [(owner, build, _call(owner, build.name, partial(pickle.dumps, build.build))) for owner, build in missing]
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(compile_one, *one) for one in work]
        finished = as_completed(futures)
        try:
            for done in range(len(futures) + 1):
                if progress is not None:
                    progress(done, len(futures))
                compiled_kernels.extend(future.result() for future in islice(finished, 1))
        except BaseException:  # a failed build, or an interrupt
            stopped = True
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            raise


def run_pickled() -> None:
    """Run the pickled function of standard input, in a process of its own."""
    try:
        pickle.load(sys.stdin.buffer)()
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")  # all of it: a compiler's errors come last
