"""Interception of Triton launches: kernels are compiled in forked processes instead of being launched."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

Report = Callable[[Mapping[str, object]], None]
"""Reports an event to the parent process."""


class CompilePool:
    """Up to ``workers`` forked processes. Each compiles one kernel into Triton's disk cache.

    A process is forked per kernel, so a compiler that crashes costs one kernel. Forking is safe, because this process
    has no CUDA context. ``report`` is called in the fork with the kernel's name, seconds and ``cached``, or its
    ``error``.
    """

    def __init__(self, workers: int, report: Report) -> None:
        self._workers, self._report, self._running = workers, report, 0

    def submit(self, name: str, compile_kernel: Callable[[], object]) -> None:
        """Compile a kernel as soon as a process is free."""
        if self._running == self._workers:
            self._wait()
        if os.fork():
            self._running += 1
            return
        code = 1
        try:
            self._compile(name, compile_kernel)
            code = 0
        finally:
            os._exit(code)

    def join(self) -> None:
        """Wait until all kernels are compiled."""
        while self._running:
            self._wait()

    def _wait(self) -> None:
        os.wait()
        self._running -= 1

    def _compile(self, name: str, compile_kernel: Callable[[], object]) -> None:
        hits: list[bool] = []
        knobs.compilation.listener = lambda **event: hits.append(event["cache_hit"])
        started = time.perf_counter()
        try:
            compile_kernel()
        except Exception as error:
            self._report({"name": name, "error": f"{type(error).__name__}: {error}"[:1000]})
            return
        self._report({"name": name, "seconds": time.perf_counter() - started, "cached": all(hits)})


def record_launches(target: tuple[str, Any, int], found: Callable[[str, Callable[[], object]], None]) -> None:
    """Call ``found(name, compile)`` for each new kernel variant instead of launching it.

    All configurations of an autotuned kernel are variants. Patches Triton permanently.
    """
    driver.set_active(_Driver(GPUTarget(*target)))

    def do_compile(
        self: Any, key: Any, signature: Any, device: int, constants: Any, options: Any, attrs: Any, _warmup: bool
    ) -> _NotLaunched:
        kernels, _, own_target, *_ = self.device_caches[device]
        source = self.ASTSource(self, signature, constants, attrs)
        found(self._fn_name, partial(self.compile, source, target=own_target, options=options.__dict__))
        kernels[key] = _NotLaunched()
        return kernels[key]  # type: ignore[no-any-return] # a dictionary of Triton's

    def run_all(self: Any, *args: Any, **named: Any) -> None:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        for config in self.prune_configs(named):
            self.fn.run(*args, **{**named, **config.all_kwargs()})
        self.nargs = None

    JITFunction._do_compile = do_compile
    Autotuner.run = run_all


class _NotLaunched:
    """Stand-in for a compiled kernel. Its launch does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None:
        pass

    def run(self, *_: object) -> None:
        pass


class _Driver:
    """Triton driver for a GPU that the machine does not have."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int | None = None) -> int:
        return 0


def json_lines(descriptor: int) -> Report:
    """Return a ``Report`` that writes JSON lines. Lines are shorter than PIPE_BUF, so lines of several
    processes do not interleave."""

    def write(values: Mapping[str, object]) -> None:
        os.write(descriptor, (json.dumps(values)[:4000] + "\n").encode())

    return write


def redirect_stdout() -> int:
    """Redirect standard output to standard error; return a descriptor of the original standard output."""
    sys.stdout.flush()
    original = os.dup(1)
    os.dup2(2, 1)
    return original
