"""Fixtures that run the ``attnplug`` command, and that install distributions with a plugin for it to find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from attnplug import Role
from attnplug.cli.app import main

Attnplug = Callable[..., "Outcome"]
Explained = Callable[..., tuple[int, Any]]
Package = Callable[..., None]


class Outcome(NamedTuple):
    """Exit code, standard output and standard error of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output parsed as strict JSON: nothing else in it, and no NaN."""
        return json.loads(self.out, parse_constant=pytest.fail)


@pytest.fixture
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide GPUs, and the user's settings of attnplug, for one test."""
    for name in ("ATTNPLUG_PLUGINS", "ATTNPLUG_STRICT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # what is refused here must not depend on the machine
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # typer sets its own; this puts it back


@pytest.fixture
def attnplug(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Attnplug:
    """Return a function that runs the command in this process. A traceback fails the test."""

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["attnplug", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            main()
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        code = exit.value.code
        return Outcome(code if isinstance(code, int) else int(code is not None), captured.out, captured.err)

    return run


@pytest.fixture
def explained(plain_environment: None, attnplug: Attnplug) -> Explained:
    """Return a function that runs ``attnplug explain --json`` without a GPU: exit code, and the answer per role.

    It runs in this process, which has imported the libraries already; a new process takes seconds.
    """

    def ask(*arguments: str) -> tuple[int, Any]:
        outcome = attnplug("explain", *arguments, "--json")
        return outcome.code, {role: choice for role, choice in outcome.json.items() if role in list(Role)}

    return ask


def in_own_process(*arguments: str, path: Path | None = None, **environment: str) -> Outcome:
    """Run the command in a new process, as a shell does, with the distributions under ``path`` installed."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-m", "attnplug", *arguments],
        env={**inherited, **({"PYTHONPATH": str(path)} if path else {}), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="surrogateescape",
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


PLUGIN = """
from attnplug import BackendSpec, Capabilities, Problem, Refusal, hookimpl

@hookimpl
def attnplug_backends():
    fields = dict(name={name!r}, summary="a backend of a test", contract="1.0", factory="attnplug:nothing")
    capabilities = dict(kinds=["mha"], devices=["cpu"], dtypes=["float32"])
    capabilities.update({capabilities})
    fields.update({fields})
    return [BackendSpec(capabilities=Capabilities(**capabilities), **fields)]
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    """Return a function that installs a distribution with one plugin module: metadata on the path, as pip writes it."""
    monkeypatch.syspath_prepend(tmp_path)
    modules: list[str] = []

    def install(
        name: str, source: str | None = None, *, version: str = "1.2.3", fields: str = "{}", capabilities: str = "{}"
    ) -> None:
        module = f"plugin_module_{name}"
        modules.append(module)
        if source is None:
            source = PLUGIN.format(name=name, fields=fields, capabilities=capabilities)
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{name}_dist-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-dist\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[attnplug.plugins]\n{name} = {module}\n")

    yield install
    for module in modules:
        sys.modules.pop(module, None)
