"""Fresh virtual environments without network: our packages from wheels, third-party packages from this environment."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Environment:
    """Virtual environment into which a test installs attnplug and other distributions from wheels."""

    folder: Path
    wheels: Path
    pip: Path
    """Folder that contains only pip. Environments are created without pip, which is faster."""

    @classmethod
    def make(cls, folder: Path, wheels: Path, pip: Path, dependencies: Path) -> Environment:
        """Make an environment in an empty folder that sees the packages linked in ``dependencies``."""
        run([sys.executable, "-m", "venv", "--without-pip", folder], folder, {})
        made = cls(folder, wheels, pip)
        where = made.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        (Path(where.stdout.strip()) / "dependencies.pth").write_text(f"{dependencies}\n")
        return made

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def run(self, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, with the environment variables of ``run``."""
        program, *arguments = command
        return run([self.folder / "bin" / program, *arguments], self.folder, variables, check=False)

    def attnplug(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the environment's ``attnplug`` command."""
        return self.run("attnplug", *arguments, **variables)

    def backends(self, *flags: str, **variables: str) -> list[dict[str, Any]]:
        """Rows of ``attnplug backends --json``, which must exit with 0 and print nothing but JSON."""
        done = self.attnplug("backends", "--json", *flags, **variables)
        assert done.returncode == 0, done.stderr
        rows: list[dict[str, Any]] = json.loads(done.stdout)
        return rows

    def install(self, *distributions: str) -> None:
        """Run ``pip install`` with our wheels only. Bytecode is compiled when a module is imported."""
        offline = ("--no-compile", "--no-index", "--no-deps", "--find-links", str(self.wheels))
        self.run_pip("install", "--quiet", *offline, *distributions)

    def uninstall(self, *distributions: str) -> None:
        self.run_pip("uninstall", "--quiet", "--yes", *distributions)

    def run_pip(self, command: str, *arguments: str) -> str:
        """Run pip and return its output. Raises AssertionError if it fails."""
        # ``pip --python`` of this environment would start a second process.
        pip: list[str | Path] = [self.python, "-m", "pip", "--disable-pip-version-check"]
        return run([*pip, command, *arguments], self.folder, {"PYTHONPATH": str(self.pip)}).stdout


def link_dependencies(folder: Path) -> Path:
    """Link everything installed here but attnplug, its plugins and their kernel libraries into a folder."""
    for place in map(Path, sys.path):
        if not any(place.glob("*.dist-info")):
            continue
        for item in sorted(place.iterdir()):
            if not _left_out(item) and not (folder / item.name).exists():
                (folder / item.name).symlink_to(item.resolve())
    return folder


def _left_out(item: Path) -> bool:
    if item.name.startswith(("attnplug", "flashinfer", "pip", "setuptools", "__pycache__")) or item.suffix == ".pth":
        return True
    points = item / "entry_points.txt"
    return points.is_file() and "attnplug.plugins" in points.read_text()


def link_pip(folder: Path) -> Path:
    """Link the pip that is installed here into a folder.

    Not by ``find_spec``: after a lookup of pip, setuptools' import hook returns the standard library's distutils, and
    ``import setuptools`` fails in this process. Inductor imports it.
    """
    (folder / "pip").symlink_to(Path(str(importlib.metadata.distribution("pip").locate_file("pip"))))
    return folder


def run(
    command: list[str | Path], folder: Path, variables: dict[str, str], *, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a command with ``variables``, but without the caller's variables for attnplug, pip and Python."""
    ours = ("ATTNPLUG_", "PIP_", "PYTHON")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=inherited | {"ATTNPLUG_CACHE_DIR": str(folder / "cache")} | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert not check or done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done
