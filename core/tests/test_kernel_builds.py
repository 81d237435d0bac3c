"""Kernels are compiled before backends are built, in processes, each once (E1)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from attnplug import BackendContext, DType, Problem, Role
from attnplug.declare.device import SM, DeviceSpec, Processor
from attnplug.declare.errors import PluginError, PluginWarning
from attnplug.declare.spec import Registered, Source
from attnplug.host import (
    BackendRequest,
    HostContext,
    KVPools,
    Limits,
    Registry,
    WorkspaceOwner,
    build_selection,
    select,
)
from attnplug.kernels import KernelBuild
from attnplug.machine.runtime import DeviceRuntime
from attnplug.registry import kernel_builds
from attnplug.registry.assembly import build_chosen
from attnplug.registry.loading import BuildError
from attnplug_testing.errors import raises_naming
from attnplug_testing.specs import MHA, claiming, model
from support.compilers import fail, run_compiler, write_pid
from support.recorder import Recorder

PROBLEM = Problem(model(MHA), "cpu")
ROLES = frozenset({Role.PREFILL, Role.DECODE})
CONTEXT = HostContext(
    model=PROBLEM.model,
    device=torch.device("cpu"),
    dtype=torch.float32,
    kv_dtype=DType.FLOAT32,
    page_size=64,
    limits=Limits(1, 1, 1),
    pools=KVPools(),
    workspace=WorkspaceOwner(),
)


def make(context: BackendContext) -> Recorder:
    return Recorder(context.name)


def kernel(folder: Path, name: str) -> KernelBuild:
    return KernelBuild(name, partial(write_pid, str(folder / name)), (folder / name).exists)


@pytest.fixture
def declare(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Registered]:
    """Register a backend whose hook returns the given object."""
    monkeypatch.setattr(kernel_builds, "_loaded", set())
    monkeypatch.setattr(kernel_builds, "compiled_kernels", [])

    def register(builds: object, name: str = "acme", **fields: Any) -> Registered:
        monkeypatch.setattr(sys.modules[__name__], f"hook_of_{name}", lambda *given: builds, raising=False)
        spec = replace(claiming(), name=name, kernel_builds=f"{__name__}:hook_of_{name}", **fields)
        return Registered(spec, Source(name, "nowhere", f"{name}-dist", "1.2"))

    return register


def build(backend: Registered, progress: Callable[[int, int], None] | None = None) -> None:
    with kernel_builds.compile_progress(progress):
        kernel_builds.build_kernels([(backend, ROLES, None)], PROBLEM)


def test_what_is_missing_is_compiled_elsewhere_and_everything_is_loaded(declare, tmp_path):
    """E1: the builds run in other processes, then in this one, which loads the compiled kernels."""
    loaded: list[str] = []
    cached = KernelBuild("old", partial(loaded.append, "old"), lambda: True)
    backend, seen = declare([kernel(tmp_path, "a"), kernel(tmp_path, "b"), cached]), []
    build(backend, lambda *counts: seen.append(counts))
    assert seen == [(0, 2), (1, 2), (2, 2)]
    compiled = kernel_builds.compiled_kernels
    assert {name for name, _ in compiled} == {"acme: a", "acme: b"} and all(seconds > 0 for _, seconds in compiled)
    assert loaded == ["old"] and {(tmp_path / name).read_text() for name in "ab"} == {str(os.getpid())}


def test_no_process_starts_if_everything_is_cached_and_nothing_loads_twice(declare, monkeypatch):
    loaded: list[str] = []
    backend = declare([KernelBuild("a", partial(loaded.append, "a"), lambda: True)])
    monkeypatch.setattr(subprocess, "Popen", None)
    build(backend)
    build(backend)
    assert loaded == ["a"] and kernel_builds.compiled_kernels == []


def test_compilers_import_no_file_of_the_working_directory(declare, tmp_path, monkeypatch):
    (tmp_path / "pickle.py").write_text("raise RuntimeError('a file of the user')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    build(declare([kernel(tmp_path, "a")]))
    assert (tmp_path / "a").exists()


def test_a_failed_build_names_backend_and_kernel_and_shows_the_compilers_last_lines(declare):
    backend = declare([KernelBuild("flash", fail, lambda: False)])
    with raises_naming(BuildError, "acme", "acme-dist 1.2", "flash", "no such type", "1 error detected") as caught:
        build(backend)
    assert "Traceback" not in str(caught.value) and "note 5\n" not in str(caught.value)


def test_an_interrupt_ends_compilers_and_what_they_started(declare, tmp_path, monkeypatch):
    child = tmp_path / "pid"
    slow = KernelBuild("slow", partial(run_compiler, str(child)), lambda: False)

    def interrupt(done: int, total: int) -> None:
        while done and not (child.exists() and child.read_text()):
            time.sleep(0.01)
        if done:
            raise KeyboardInterrupt

    started = time.monotonic()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    backend = declare([slow, kernel(tmp_path, "a")])
    with pytest.raises(KeyboardInterrupt):
        build(backend, interrupt)
    assert time.monotonic() - started < 30
    stat = Path(f"/proc/{child.read_text()}/stat")
    deadline = time.monotonic() + 5
    while stat.exists() and stat.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        (None, "NoneType"),
        (["a.cu"], "a.cu"),
        ([KernelBuild("a", fail, lambda: True), KernelBuild("a", fail, lambda: True)], "several kernels named a"),
        ([KernelBuild("a", lambda: None, lambda: False)], "pickle"),
        ([KernelBuild("a", fail, lambda: 1 // 0 > 0)], "ZeroDivisionError"),
    ],
    ids=["nothing", "a text", "one name twice", "not picklable", "is_cached fails"],
)
def test_a_mistake_of_the_hook_is_one_message_that_names_the_plugin(declare, returned, named):
    """D2"""
    with raises_naming(BuildError, "acme", "acme-dist 1.2", named):
        build(declare(returned))


def test_the_hook_is_a_reference():
    with pytest.raises(PluginError, match="kernel_builds"):
        replace(claiming(), kernel_builds="acme")


def test_auto_goes_on_without_a_backend_whose_kernels_cannot_be_compiled(declare):
    """D2, E1: hosts compile while they build, so a missing compiler costs one backend."""
    factory = f"{__name__}:make"
    best = declare([KernelBuild("flash", fail, lambda: False)], "best", preference=100, factory=factory)
    good = declare([], "good", factory=factory)
    with pytest.warns(PluginWarning, match="no such type"):
        selection, built = build_chosen(
            Registry({"best": best, "good": good}),
            BackendRequest(),
            PROBLEM,
            lambda selection: build_selection(selection, CONTEXT),
        )
    assert selection.chosen(Role.DECODE) is good and isinstance(built, Recorder)


def test_the_hook_gets_the_architecture_of_the_device(declare, monkeypatch):
    """E1, E2: a device other than CUDA has no SM."""
    runtime = DeviceRuntime(DeviceSpec("cpu", lambda: [Processor("Acme A2", architecture=SM(3))]))
    monkeypatch.setattr("attnplug.registry.assembly.runtime_of", lambda device: runtime)
    backend, seen = declare([], factory=f"{__name__}:make"), []
    monkeypatch.setattr(sys.modules[__name__], "hook_of_acme", lambda problem, *given: seen.append(problem) or [])
    build_selection(select(Registry({"acme": backend}), BackendRequest(), PROBLEM), CONTEXT)
    assert {(problem.sm, problem.architecture) for problem in seen} == {(None, SM(3))}
