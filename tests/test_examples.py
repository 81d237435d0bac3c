"""The scripts and the package in examples/ run, and the package's backends are right."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from attnplug import Problem
from attnplug.host import Registry, load_registry
from attnplug.registry.loading import find_entry_points
from attnplug_conformance import Subject
from attnplug_conformance.catalog import all_checks
from attnplug_conformance.runner import Status, run_check
from attnplug_testing.plugins import entry_point

EXAMPLES = Path(__file__).parent.parent / "examples"
CHECKS = {check.name: check for check in all_checks()}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Function that runs a script and returns its output."""
    monkeypatch.syspath_prepend(EXAMPLES)
    names: list[str] = []

    def imported(script: str) -> str:
        names.append(script)
        importlib.import_module(script).main()
        return capsys.readouterr().out

    yield imported
    for name in names:
        del sys.modules[name]


def test_the_host_attends_over_its_own_memory(run: Callable[[str], str]) -> None:
    assert "9 steps on torch_native" in run("build_an_engine")


def test_the_kit_accepts_the_kernel_and_names_the_bug(run: Callable[[str], str]) -> None:
    lines = run("write_kernels").splitlines()
    assert lines[0].startswith("mine conforms") and lines[-1].startswith("mine does not conform")
    assert "head_dim ** -0.5" in lines[-2]


def test_one_backend_serves_the_engine_and_transformers(run: Callable[[str], str]) -> None:
    assert "the same tokens" in run("serve_models")


@pytest.mark.long
def test_make_run_generates_the_tokens_of_transformers() -> None:
    command = [sys.executable, EXAMPLES / "generate_and_check.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("3 of 3 generations are the same as transformers'\n")


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    """The registry with the example package, as if it were installed."""
    points, broken = find_entry_points()
    acme = entry_point("acme", "acme_attention.plugin", "acme-attention", "0.1.0")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES / "acme_attention" / "src")
        patch.setattr("attnplug.registry.registry.find_entry_points", lambda: ([*points, acme], broken))
        yield load_registry()
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_attention"]:
        del sys.modules[name]


def test_the_package_loads(registry: Registry) -> None:
    assert not [fault for fault in registry.broken if fault.source.distribution == "acme-attention"]
    assert {"acme_mha", "acme_mla", "acme_linear", "acme_sparse"} <= registry.backends.keys()


@pytest.mark.parametrize(
    ("backend", "check"),
    [
        ("acme_mha", "mha.extend.ragged"),
        ("acme_mha", "mha.graph.decode"),
        ("acme_mha", "mha.graph.lanes"),
        ("acme_mha", "mha.nvfp4.decode"),
        ("acme_mla", "mla.extend.ragged"),
        ("acme_mla", "mla.path.one_shot"),
        ("acme_mla", "mla.path.chunked"),
        ("acme_linear", "lightning.mixed"),
        ("acme_linear", "lightning.padding.requests"),
        ("acme_sparse", "mla.sparse.extend"),
        ("acme_sparse", "mla.sparse.decode"),
    ],
)
def test_the_packages_backends_are_right(registry: Registry, backend: str, check: str) -> None:
    """A step of the guide shows each; the package's own tests run all checks."""
    subject = replace(Subject.installed(registry.backends[backend], "cpu"), budget=0)
    result = run_check(CHECKS[check], subject)
    assert result.status is Status.PASSED, result.message


def test_the_packages_option_is_refused_where_its_check_says(registry: Registry) -> None:
    spec = registry.backends["acme_mha"].spec
    assert spec.options is not None and spec.check is not None
    wanted = spec.options(accumulate="float64")
    refused = {device: [*spec.check(Problem(device=device), None, wanted)] for device in ("cpu", "cuda")}
    assert not refused["cpu"] and [each.setting for each in refused["cuda"]] == ["acme_mha.accumulate"]
