"""Real wheels and fresh environments, without network, for the tests that install plugins."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for modules that test files share

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Environment:
    """A virtual environment that holds attnplug from its wheel, and what a test installs."""

    folder: Path
    wheels: Path
    pip: Path
    """A folder with pip and nothing else: the environment has none of its own, which saves making it one."""

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def run(self, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment. Only the variables given here speak to attnplug."""
        program, *arguments = command
        return _run([self.folder / "bin" / program, *arguments], self.folder, variables, check=False)

    def attnplug(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the command that the wheel installed."""
        return self.run("attnplug", *arguments, **variables)

    def backends(self, *flags: str, **variables: str) -> list[dict[str, Any]]:
        """Rows of ``attnplug backends --json``, which must exit with 0 and print nothing but JSON."""
        done = self.attnplug("backends", "--json", *flags, **variables)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def install(self, *distributions: str) -> None:
        """``pip install`` from our wheels alone. What a test imports is compiled then."""
        self._pip(
            "install", "--no-compile", "--no-index", "--no-deps", "--find-links", str(self.wheels), *distributions
        )

    def uninstall(self, *distributions: str) -> None:
        self._pip("uninstall", "--yes", *distributions)

    def _pip(self, command: str, *arguments: str) -> None:
        # Not our pip with --python: that is two processes, of which one only starts the other.
        pip = [self.python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        _run([*pip, command, *arguments], self.folder, {"PYTHONPATH": str(self.pip)})


@pytest.fixture(scope="session")
def dependencies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything installed here but attnplug, its plugins and their kernel libraries."""
    folder = tmp_path_factory.mktemp("dependencies")
    for place in map(Path, sys.path):
        if place.name not in ("site-packages", "dist-packages"):
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


@pytest.fixture(scope="session")
def pip_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pip that is installed here."""
    spec = importlib.util.find_spec("pip")
    assert spec is not None and spec.origin is not None, "pip is not installed"
    folder = tmp_path_factory.mktemp("pip")
    (folder / "pip").symlink_to(Path(spec.origin).parent)
    return folder


@pytest.fixture(scope="session")
def build_wheels(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Build the wheels of attnplug, of its conformance kit, which requires attnplug-sparse, and of some projects."""

    def build(*projects: Path) -> Path:
        wheels = tmp_path_factory.mktemp("wheels")
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        offline = ["--no-index", "--no-deps", "--no-build-isolation"]
        own = (ROOT / "core", ROOT / "plugins" / "sparse", ROOT / "conformance")
        _run([*pip, "wheel", *offline, "--wheel-dir", wheels, *own, *projects], wheels, {})
        return wheels

    return build


@pytest.fixture(scope="session")
def fresh_environment(
    tmp_path_factory: pytest.TempPathFactory, dependencies: Path, pip_alone: Path
) -> Callable[..., Environment]:
    """Make an environment with attnplug, its kit and the distributions named, from a folder of wheels.

    The kit's commands need attnplug-sparse too, which a test that runs them names.
    """

    def make(wheels: Path, *distributions: str) -> Environment:
        folder = tmp_path_factory.mktemp("environment")
        _run([sys.executable, "-m", "venv", "--without-pip", folder], folder, {})
        environment = Environment(folder, wheels, pip_alone)
        where = environment.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        (Path(where.stdout.strip()) / "dependencies.pth").write_text(f"{dependencies}\n")
        environment.install("attnplug", "attnplug-conformance", *distributions)
        return environment

    return make


def _run(
    command: list[str | Path], folder: Path, variables: dict[str, str], *, check: bool = True
) -> subprocess.CompletedProcess[str]:
    ours = ("ATTNPLUG_", "PIP_", "PYTHON")  # what the caller's shell sets must not decide what a test sees
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
